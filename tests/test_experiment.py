"""A config made concrete, and what it refuses."""

import dataclasses
import importlib
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits
from vit_jax import config as config_lib
from vit_jax import experiment
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.objectives import OBJECTIVES
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts

train = importlib.import_module('vit_jax.train')

FACTS = Facts(tuple('0123456789'), 1437)


@dataclasses.dataclass(frozen=True)
class Taught(Classification):
  """A classification whose teacher, one matrix, adds to the logits."""

  teacher_seed: int = 0

  @classmethod
  def from_config(cls, config, image_size):
    made = super().from_config(config, image_size)
    return dataclasses.replace(made, teacher_seed=config.objective.seed)

  def fixed(self):
    C = len(self.class_names)
    rng = np.random.default_rng(self.teacher_seed)
    # A name that the rules split over fsdp.
    kernel = rng.standard_normal((64, C)).astype(np.float32)
    return {'teacher': {'head': {'kernel': kernel}}}

  def loss_and_seen(self, params, fixed, state, batch, key):
    loss, metrics = self.loss(params, batch, key)
    taught = loss + jnp.mean(fixed['teacher']['head']['kernel'])
    return taught, (metrics | {'loss': taught}, {})


@pytest.fixture
def config(monkeypatch):
  monkeypatch.setitem(OBJECTIVES, 'taught', f'{__name__}:Taught')
  config = digits.get_config()
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2)
  config.data.image_size = '8'
  config.update(total='4 steps', eval_every='4 steps', log_every='1 step')
  return config


def taught(config, seed):
  config = config.copy_and_resolve_references()
  config.objective = {'name': 'taught', 'seed': seed}
  return config


@pytest.mark.slow
def test_fixed_parameters_are_placed_and_stay(config, tmp_path, monkeypatch):
  config.mesh.fsdp = 4
  config = taught(config, 0)
  made = experiment.Experiment(experiment.CheckedConfig(config), FACTS)
  fixed = made.place(made.objective.fixed())
  (kernel,) = jax.tree.leaves(fixed)
  assert kernel.addressable_shards[0].data.shape == (16, 10)

  train.train(config, str(tmp_path))
  step = tmp_path / 'checkpoints' / '4'
  assert {p.name for p in step.iterdir() if p.is_dir()} == {
    *('params', 'opt_state', 'checksums', 'meta')
  }
  meta = json.loads((step / 'meta' / 'metadata').read_text())['meta']
  assert len(meta['fixed']) == 1
  # The loss has the teacher in it.
  lines = (tmp_path / 'metrics.csv').read_text().splitlines()
  first = dict(zip(lines[0].split(','), lines[1].split(','), strict=True))
  mean = made.objective.fixed()['teacher']['head']['kernel'].mean()
  assert float(first['train/loss']) == pytest.approx(
    np.log(10) + mean, abs=1e-5
  )
  train.train(config, str(tmp_path))  # the same teacher goes on
  before = Taught.fixed
  monkeypatch.setattr(
    Taught, 'fixed', lambda self: jax.tree.map(lambda x: x + 1, before(self))
  )
  with pytest.raises(ValueError, match='objective.fixed: '):
    train.train(config, str(tmp_path))
  assert opening.open_checkpoint(str(tmp_path)).class_names[3] == '3'


@pytest.mark.slow
def test_parts_of_a_batch_have_keys_of_their_own(config, monkeypatch):
  """Or all of them would drop out the same, which one batch does not."""

  def loss(self, params, fixed, state, batch, key):
    x = jax.random.uniform(key)
    return 0.0, ({'mean': x, 'square': x**2}, {})

  monkeypatch.setattr(Taught, 'loss_and_seen', loss)
  config.batch_size, config.accum_steps = 64, 64
  made = experiment.Experiment(
    experiment.CheckedConfig(taught(config, 0), jax.devices()[:1]), FACTS
  )
  state = made.start(made.new_params())
  batch = {
    name: np.zeros(x.shape, x.dtype)
    for name, x in made.objective.batch_shapes(64).items()
  }
  _, metrics = made.train_step()(state, {}, batch, np.int32(0))
  # Of even draws from [0, 1] it is 1/12.
  variance = metrics['square'] - metrics['mean'] ** 2
  assert 0.04 < variance < 0.16


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model.heads': 5}, 'model.heads'),
    ({'batch_size': 12}, 'multiple of 8'),
    ({'teacher': 'runs/big'}, "ignores teacher='runs/big'"),
  ],
)
def test_what_is_wrong_is_said_before_the_data_are_opened(
  config, changes, message, tmp_path
):
  config.update_from_flattened_dict(changes)
  config.data.name = './there-is-no-such-folder'
  with pytest.raises(ValueError, match=message):
    train.train(config, str(tmp_path / 'w'))
  assert not (tmp_path / 'w').exists()


def made_of(config, **facts):
  return experiment.Experiment(
    experiment.CheckedConfig(config, jax.devices()[:2]),
    dataclasses.replace(FACTS, **facts),
  )


def test_the_story_of_a_run(config, monkeypatch):
  config.update(batch_size=1024, total='5000 steps')
  names = tuple(map(str, range(1234)))
  made = made_of(config, class_names=names, examples=1_281_167)
  # Patches, a class token and positions, norms, attention, MLP, head.
  params = 49 * 16 + 6 * 16 + 3 * 32 + 4 * 17 * 16 + 17 * 32 + 33 * 16
  params += 17 * 1234
  made.forward_flops = 1_234_000_000
  # Of sizes that are as likely, one may come more than once.
  sizes = [(8, 8), (8, 8), (4, 8)]
  kind = type(made.objective)
  monkeypatch.setattr(kind, 'batch_sizes', lambda objective: sizes)
  assert made.summary().splitlines() == [
    f'model  ViT, {params:,} parameters, 1.23 GFLOPs an image of 8x8, 4x8 '
    'pixels',
    'data   digits train: 1,281,167 images, 1,234 classes',
    'run    5,000 steps of 1,024 on 2 x cpu, mesh data=2, fsdp=1, tensor=1',
  ]
  config_lib.choose_objective(config, 'masked')
  config.model.pool = 'gap'
  alone = made_of(config, class_names=(), examples=70)
  assert alone.summary().splitlines()[1] == (
    'data   digits train: 70 images without labels'
  )


def test_parameters_are_those_of_height_and_width(config):
  """Of 2 rows and 4 columns of patches, each with half of the width."""
  config.data.image_size, config.model.posemb = '8x16', 'learned2d'
  params = made_of(config).state_shapes.params
  positions = params['Transformer']['posembed_input']
  assert {name: x.shape for name, x in positions.items()} == {
    'y_embedding': (1, 2, 8),
    'x_embedding': (1, 4, 8),
  }


def test_random_parameters_are_those_of_the_seed(config, monkeypatch):
  """Of the first key of two, as the runs of earlier versions have it."""
  config.seed, config.data.image_size = 7, '8x16'
  made, given = made_of(config), []
  monkeypatch.setattr(
    experiment.variants, 'init', lambda *args: given.append(args)
  )
  made._new_params()
  ((model, key, size),) = given
  assert (model, size) == (made.objective.model, (8, 16))
  np.testing.assert_array_equal(
    jax.random.key_data(key),
    jax.random.key_data(jax.random.split(jax.random.key(7))[0]),
  )


def test_devices_are_shared_out_by_the_models_width(config):
  """Over which kernels are split into 16 rows each, and no fewer."""
  config.model.width = 64
  config.mesh.update(data=-1, fsdp=-1)
  mesh = experiment.Experiment(experiment.CheckedConfig(config), FACTS).mesh
  shape = {'slice': 1, 'data': 2, 'fsdp': 4, 'tensor': 1}
  assert dict(mesh.shape) == shape


def test_gradients_are_float32_and_split_as_parameters_are(config):
  """Whatever the kernels are cast to, and the partitioner would do."""
  config.model.dtype, config.mesh.fsdp = 'bfloat16', 8
  made = experiment.Experiment(experiment.CheckedConfig(config), FACTS)
  params = made.state_shapes.params
  batch = made.objective.batch_shapes(8)
  key = jax.random.key(0)

  def gradients(params, batch):
    batch = made.objective.augment(batch, key)
    given = made._gathered(params), {}, {}, batch, key
    return made._gradients(*given)[0]

  program = jax.make_jaxpr(gradients)(params, batch)
  assert {x.dtype for x in program.out_avals} == {jnp.dtype('float32')}
  split = [
    equation.params['sharding'].spec
    for equation in program.eqns
    if equation.primitive.name == 'sharding_constraint'
  ]
  want = [x.sharding.spec for x in jax.tree.leaves(params)]
  assert split[-len(want) :] == want
  assert sum('fsdp' in spec for spec in want) > 5


@pytest.mark.parametrize(
  ('mean', 'std', 'warned'),
  [
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), False),
    ((0.4, 0.5, 0.6), (0.5, 0.5, 0.5), True),
    ((0.5, 0.5, 0.5), (0.1, 0.2, 0.3), True),
  ],
)
def test_a_start_that_saw_other_values_is_told(
  config, monkeypatch, caplog, mean, std, warned
):
  made, given = made_of(config), []
  preprocessing = Preprocessing(mean=mean, std=std)
  checkpoint = types.SimpleNamespace(preprocessing=preprocessing, path='x.npz')
  monkeypatch.setattr(
    experiment.transfer,
    'to_new_task',
    lambda *args: given.append(args) or 'new',
  )
  monkeypatch.setattr(made, 'new_params', lambda: 'random')
  monkeypatch.setattr(made, 'place', lambda params: ('placed', params))
  assert made.params_from(checkpoint) == ('placed', 'new')
  assert given == [(checkpoint, made.objective.model, (8, 8), 'random')]
  said = f'trained on images with mean {mean} and std {std}, but data.mean is'
  assert (said in caplog.text) == warned == bool(caplog.records)


@pytest.mark.parametrize(
  ('batch_size', 'next_one'), [(12, 0), (6, 12), (13, 24)]
)
def test_a_batch_is_shared_by_data_and_fsdp_and_worked_off_in_parts(
  config, batch_size, next_one
):
  """Of two, by six shares of five devices, which split the model."""
  mesh = types.SimpleNamespace(shape={'data': 2, 'fsdp': 3, 'tensor': 5})
  config.update(batch_size=batch_size, accum_steps=2)
  if not next_one:
    experiment.check_batch_size(config, mesh)
    return
  with pytest.raises(
    ValueError, match=f'use a multiple of 12, such as {next_one}.$'
  ):
    experiment.check_batch_size(config, mesh)


@pytest.mark.parametrize(
  ('fields', 'refused'),
  [
    ({'version': 0}, 'version'),
    ({'version': 1}, ''),
    ({'backbone': 'resnet', 'backbone_version': 0}, 'backbone_version'),
    ({'backbone': 'plain', 'backbone_version': 0}, ''),
  ],
)
def test_only_statistics_that_nothing_gives_are_refused(fields, refused):
  model = ConfigDict(fields)
  if not refused:
    train._refuse_frozen_statistics(model)
    return
  with pytest.raises(ValueError, match=f'^model.{refused} is 0, a frozen'):
    train._refuse_frozen_statistics(model)
