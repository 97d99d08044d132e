"""A task that the package does not know takes one class and a registration."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from configs import digits
from vit_jax import config as config_lib
from vit_jax import objectives
from vit_jax.checkpoints import opening
from vit_jax.data import sources, transforms
from vit_jax.evaluators import build
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models.fields import field
from vit_jax.objectives.objective import Facts, Objective
from vit_jax.tools.plan import aot
from vit_jax.training import preemption, sharding

train = importlib.import_module('vit_jax.train')


@dataclasses.dataclass(frozen=True)
class Brightness(Objective):
  """Learns how bright an image is on average, from 0 to `scale`."""

  metrics = {'error': 'lowest'}
  classes = 1

  scale: float = field(2.0, 'The output for a white image.')

  def augment(self, batch, key):
    bright_B = jnp.mean(batch['image'] / 255, axis=(1, 2, 3))
    images = self.images.normalize(batch['image'])
    return {'image': images, 'bright': bright_B}

  def loss(self, params, batch, key):
    x_B1, _ = self.model.apply({'params': params}, batch['image'])
    loss = jnp.mean((x_B1[:, 0] - self.scale * batch['bright']) ** 2)
    return loss, {'loss': loss}

  def evaluate(self, params, batch):
    augmented = self.augment(batch, None)
    x_B1, _ = self.model.apply({'params': params}, augmented['image'])
    error_B = (x_B1[:, 0] - self.scale * augmented['bright']) ** 2
    mask_B = batch['mask']
    return {'examples': mask_B.sum(), 'error': (error_B * mask_B).sum()}


class Momentum(Brightness):
  """Learns what a slow average of itself says of the mirrored image.

  Its state is that average, a centre of what it says, and the steps taken.
  """

  def new_state(self, params):
    return {
      'teacher': params,
      'center': jnp.zeros(()),
      'steps': jnp.zeros((), jnp.int32),
    }

  def loss_and_seen(self, params, fixed, state, batch, key):
    x = batch['image']
    x_B1, _ = self.model.apply({'params': params}, x)
    wanted_B1, _ = self.model.apply({'params': state['teacher']}, x[:, :, ::-1])
    wanted_B = wanted_B1[:, 0] - state['center'] + batch['bright']
    loss = jnp.mean((x_B1[:, 0] - wanted_B) ** 2)
    return loss, ({'loss': loss}, {'center': wanted_B1.mean()})

  def next_state(self, state, params, seen):
    return {
      'teacher': optax.incremental_update(params, state['teacher'], 0.1),
      'center': 0.5 * state['center'] + 0.5 * seen['center'],
      'steps': state['steps'] + 1,
    }


@pytest.fixture
def config(monkeypatch):
  for kind in (Brightness, Momentum):
    place = f'{__name__}:{kind.__name__}'
    monkeypatch.setitem(objectives.OBJECTIVES, kind.__name__.lower(), place)
  config = digits.get_config()
  config_lib.choose_objective(config, 'brightness')
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2)
  config.data.image_size = '8'
  config.update(
    total='30 steps', eval_every='10 steps', checkpoint_every='5 steps'
  )
  config.best_metric = 'test/error'
  return config


@pytest.mark.slow
def test_it_trains_keeps_the_lowest_and_resumes(
  config, tmp_path, preempt_at, capsys
):
  # So high a rate makes it worse before it makes it better.
  config.optimizer.update(lr=0.1, decay='constant', warmup='0 steps')
  config.update(
    total='4 steps', eval_every='1 step', log_every='1 step', keep_last=1
  )
  config.early_stopping = True
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train.train(config, str(whole))
  assert 'best test/error' in capsys.readouterr().out

  preempt_at(2)
  with pytest.raises(preemption.Preempted):
    train.train(config, str(parts))
  preempt_at(None)
  train.train(config, str(parts))
  assert (whole / 'metrics.csv').read_text() == (
    parts / 'metrics.csv'
  ).read_text()
  one, other = (opening.open_checkpoint(str(path)) for path in (whole, parts))
  jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
  assert one.class_names == ()
  assert one.model.num_classes == 1

  lines = (whole / 'metrics.csv').read_text().splitlines()
  column = lines[0].split(',').index('test/error')
  values = {int(x.split(',')[0]): x.split(',')[column] for x in lines[1:]}
  errors = {step: float(x) for step, x in values.items() if x}
  best = min(errors, key=errors.get)
  assert len(errors) == 4 and best not in (4, max(errors, key=errors.get))
  kept = {int(p.name) for p in (whole / 'checkpoints').iterdir()}
  assert kept == {4, best}
  # What a run that stops early opens at.
  assert one.path == str(whole / 'checkpoints' / str(best))
  same = opening.open_checkpoint(one.path)
  jax.tree.map(np.testing.assert_array_equal, one.params, same.params)


@pytest.mark.slow
def test_it_is_measured(config, tmp_path):
  config.update(total='150 steps', eval_every='100%')
  train.train(config, str(tmp_path))
  checkpoint = opening.open_checkpoint(str(tmp_path))
  config.eval_only = True
  found = train.evaluate_only(config, str(tmp_path))
  source = sources.open_source('digits', 'test')
  transform = transforms.EvalTransform((8, 8))
  images = np.stack([transform(source[i])['image'] for i in range(len(source))])
  bright = 2 * (images / 255).mean((1, 2, 3))
  x, _ = jax.jit(checkpoint.model.apply)(
    {'params': checkpoint.params}, (images / 127.5 - 1).astype(np.float32)
  )
  want = ((np.asarray(x)[:, 0] - bright) ** 2).mean()
  assert found['test/error'] == pytest.approx(want, rel=1e-4)
  assert found['test/examples'] == 360
  # Better than the best guess for all of them.
  assert want < bright.var()


def test_it_stops_early_and_is_chosen_by(config):
  assert build.shown(config)[config.best_metric] == 'lowest'
  config.best_metric = 'test/accuracy'
  with pytest.raises(ValueError, match='evaluators do not measure.*test/error'):
    build.shown(config)


def test_it_is_planned(config):
  experiment = Experiment(
    CheckedConfig(config, jax.devices()[:2]), Facts((), 1000)
  )
  program = aot.training(experiment)
  assert program.shapes[2].keys() == {'image'}
  compiled = program.lower().compile()
  assert aot.peak_bytes(compiled) > 0


def state_after(config, batch, steps=2):
  """Returns the state of a few steps on one batch."""
  made = Experiment(CheckedConfig(config), Facts((), 1000))
  state = made.start(made.new_params())
  fixed = made.place(made.objective.fixed())
  for step in range(steps):
    rows = sharding.global_batch(batch, made.mesh)
    state, metrics = made.train_step()(state, fixed, rows, np.int32(step))
  return state, metrics


@pytest.fixture
def with_state(config):
  config_lib.choose_objective(config, 'momentum')
  config.optimizer.update(name='sgd', lr=0.1, warmup='0 steps')
  config.batch_size = 16
  return config


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Sharding info not provided')
def test_its_state_is_resumed(with_state, tmp_path, preempt_at):
  """A run that forgot the teacher would learn something else."""
  with_state.update(total='6 steps', eval_every='6 steps')
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  train.train(with_state, str(whole))
  preempt_at(3)
  with pytest.raises(preemption.Preempted):
    train.train(with_state, str(parts))
  preempt_at(None)
  train.train(with_state, str(parts))
  for file in ('metrics.csv', 'checkpoints/6/objective_state/_METADATA'):
    assert (whole / file).read_text() == (parts / file).read_text()
  ends = [
    ocp.PyTreeCheckpointer().restore(path / 'checkpoints/6/objective_state')
    for path in (whole, parts)
  ]
  assert ends[0].keys() == {'teacher', 'center', 'steps'}
  assert ends[0]['steps'] == 6
  jax.tree.map(np.testing.assert_array_equal, *ends)
  one, other = (opening.open_checkpoint(str(path)) for path in (whole, parts))
  jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


@pytest.mark.slow
def test_its_state_is_the_same_on_a_mesh_and_in_parts(with_state):
  images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), np.uint8)
  with_state.mesh.update(data=2, fsdp=4)
  want, _ = state_after(with_state, {'image': images})
  teacher = want.objective_state['teacher']
  placed = [
    jax.tree.map(lambda x: x.sharding, tree) for tree in (want.params, teacher)
  ]
  assert placed[0] == placed[1]
  assert not all(x.is_fully_replicated for x in jax.tree.leaves(teacher))
  assert want.objective_state['center'] != 0
  with_state.accum_steps = 2
  got, _ = state_after(with_state, {'image': images})
  assert got.objective_state['steps'] == 2
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    *(got, want),
  )
