"""A task that the package does not know takes one class and a registration."""

import contextlib
import dataclasses
import importlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from vit_jax.training import sharding

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


@pytest.fixture(scope='module', autouse=True)
def registered():
  with pytest.MonkeyPatch.context() as patch:
    for kind in (Brightness, Momentum):
      place = f'{__name__}:{kind.__name__}'
      patch.setitem(objectives.OBJECTIVES, kind.__name__.lower(), place)
    yield


def new_config():
  config = digits.get_config()
  config_lib.choose_objective(config, 'brightness')
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2)
  config.data.image_size = '8'
  config.best_metric = 'test/error'
  return config


@pytest.fixture
def config():
  return new_config()


@pytest.fixture(scope='module')
def trained(registered, tmp_path_factory):
  """A config and the workdir of its run."""
  config = new_config()
  # So high a rate makes it worse before it makes it better.
  config.optimizer.update(lr=0.1, decay='constant', warmup='0 steps')
  config.update(
    total='4 steps', eval_every='1 step', log_every='1 step', keep_last=1
  )
  config.early_stopping = True
  workdir = tmp_path_factory.mktemp('trained')
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    train.train(config, str(workdir))
  return config, workdir, printed.getvalue()


@pytest.mark.slow
def test_it_trains_and_keeps_the_lowest(trained):
  _, workdir, printed = trained
  checkpoint = opening.open_checkpoint(str(workdir))
  assert checkpoint.class_names == ()
  assert checkpoint.model.num_classes == 1
  lines = (workdir / 'metrics.csv').read_text().splitlines()
  column = lines[0].split(',').index('test/error')
  values = {int(x.split(',')[0]): x.split(',')[column] for x in lines[1:]}
  errors = {step: float(x) for step, x in values.items() if x}
  best = min(errors, key=errors.get)
  assert len(errors) == 4 and best not in (4, max(errors, key=errors.get))
  kept = {int(p.name) for p in (workdir / 'checkpoints').iterdir()}
  assert kept == {4, best}
  # What a run that stops early opens at.
  assert checkpoint.path == str(workdir / 'checkpoints' / str(best))
  assert f' {checkpoint.path}\n' in printed


@pytest.mark.slow
def test_it_is_measured(trained):
  config, workdir, _ = trained
  checkpoint = opening.open_checkpoint(str(workdir))
  config = config.copy_and_resolve_references()
  config.eval_only = True
  found = train.evaluate_only(config, str(workdir))
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


def state_after_two_steps(config, batch):
  made = Experiment(CheckedConfig(config), Facts((), 1000))
  state = made.start(made.new_params())
  fixed = made.place(made.objective.fixed())
  for step in range(2):
    rows = sharding.global_batch(batch, made.mesh)
    state, _ = made.train_step()(state, fixed, rows, np.int32(step))
  return state


@pytest.mark.slow
def test_its_state_is_the_same_on_a_mesh_and_in_parts(config):
  config_lib.choose_objective(config, 'momentum')
  config.optimizer.update(name='sgd', lr=0.1, warmup='0 steps')
  config.batch_size = 16
  config.mesh.update(data=2, fsdp=4)
  rng = np.random.default_rng(0)
  batch = {'image': rng.integers(0, 256, (16, 8, 8, 3), np.uint8)}
  want = state_after_two_steps(config, batch)
  teacher = want.objective_state['teacher']
  placed = [
    jax.tree.map(lambda x: x.sharding, tree) for tree in (want.params, teacher)
  ]
  assert placed[0] == placed[1]
  assert not all(x.is_fully_replicated for x in jax.tree.leaves(teacher))
  assert want.objective_state['center'] != 0
  config.accum_steps = 2
  got = state_after_two_steps(config, batch)
  assert got.objective_state['steps'] == 2
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    *(got, want),
  )
