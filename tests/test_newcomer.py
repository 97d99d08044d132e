"""A task that the package does not know takes one class and a registration."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from vit_jax import config as config_lib
from vit_jax import objectives
from vit_jax.checkpoints import opening
from vit_jax.data import sources, transforms
from vit_jax.data.images import Images
from vit_jax.evaluators import build
from vit_jax.experiment import Experiment, facts_of
from vit_jax.models import variants
from vit_jax.models.model import Model
from vit_jax.tools.plan import aot
from vit_jax.training import preemption

train = importlib.import_module('vit_jax.train')


@dataclasses.dataclass(frozen=True)
class Brightness:
  """Learns how bright an image is on average, from 0 to `scale`."""

  defaults = {'scale': 2.0}
  unused = {}
  metrics = {'error': 'lowest'}
  model: Model
  images: Images
  scale: float
  class_names: tuple[str, ...] = ()
  images_seen = 1

  @classmethod
  def from_config(cls, config, facts):
    model = variants.build(
      num_classes=1, image_size=facts.image_size, **config.model
    )
    images = Images.from_config(config.data, facts.image_size)
    return cls(model, images, config.objective.scale)

  def train_transform(self):
    return transforms.WithoutLabel(self.images.train_transform())

  def eval_transform(self):
    return transforms.WithoutLabel(self.images.eval_transform())

  def batch_shapes(self, size):
    return {'image': self.images.batch_shape(size)}

  def fixed(self):
    return {'scale': np.float32(self.scale)}

  def augment(self, batch, key):
    del key
    bright_B = jnp.mean(batch['image'] / 255, axis=(1, 2, 3))
    images = self.images.normalize(batch['image'])
    return {'image': images, 'bright': bright_B}

  def loss(self, params, fixed, batch, key, *, train):
    x_B1, _ = self.model.apply({'params': params}, batch['image'])
    loss = jnp.mean((x_B1[:, 0] - fixed['scale'] * batch['bright']) ** 2)
    return loss, {'loss': loss}

  def evaluate(self, params, fixed, batch):
    augmented = self.augment(batch, None)
    x_B1, _ = self.model.apply({'params': params}, augmented['image'])
    error_B = (x_B1[:, 0] - fixed['scale'] * augmented['bright']) ** 2
    mask_B = batch['mask']
    return {'examples': mask_B.sum(), 'error': (error_B * mask_B).sum()}


@pytest.fixture
def config(monkeypatch):
  place = f'{__name__}:Brightness'
  monkeypatch.setitem(objectives.OBJECTIVES, 'brightness', place)
  config = digits.get_config()
  config_lib.choose_objective(config, 'brightness')
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2)
  config.data.image_size = '8'
  config.update(
    total='30 steps', eval_every='10 steps', checkpoint_every='5 steps'
  )
  config.best_metric = 'test/error'
  return config


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
  x, _ = checkpoint.model.apply(
    {'params': checkpoint.params}, (images / 127.5 - 1).astype(np.float32)
  )
  want = ((np.asarray(x)[:, 0] - bright) ** 2).mean()
  assert found['test/error'] == pytest.approx(want, rel=1e-4)
  assert found['test/examples'] == 360
  # Better than the best guess for all of them.
  assert want < bright.var()


def test_it_stops_early_and_is_chosen_by(config):
  assert build.best_of(config) == 'lowest'
  config.best_metric = 'test/accuracy'
  with pytest.raises(ValueError, match='none of the evaluators .*test/error'):
    build.best_of(config)


def test_it_is_planned(config):
  experiment = Experiment(config, facts_of(config, (), 1000), jax.devices()[:2])
  program = aot.training(experiment)
  assert program.shapes[2].keys() == {'image'}
  compiled = program.lower().compile()
  assert aot.peak_bytes(compiled) > 0
