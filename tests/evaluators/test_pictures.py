"""Pictures during training, on any mesh."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits
from vit_jax.data import device_augmentation, sources, transforms
from vit_jax.data.images import Images
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.evaluators import pictures
from vit_jax.evaluators.evaluator import Parts
from vit_jax.models import variants
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts
from vit_jax.training import sharding
from vit_jax.visualize import draw, filters
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import rollout

SIZE = (16, 16)
MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.3, 0.25)


@pytest.fixture
def tensorboard(monkeypatch):
  monkeypatch.setattr(
    pictures.importlib.util, 'find_spec', lambda name: object()
  )


VIT = {
  'name': 'vit',
  'patch_size': 4,
  'width': 64,
  'depth': 2,
  'mlp_dim': 64,
  'heads': 4,
}


def model_of(fields=VIT):
  return variants.build(image_size=SIZE, num_classes=10, **fields)


def mesh_of(data=1, fsdp=1, tensor=1):
  return sharding.make_mesh(
    {'data': data, 'fsdp': fsdp, 'tensor': tensor},
    devices=jax.devices()[: data * fsdp * tensor],
  )


def parts_of(model, mesh, wandb=''):
  config = digits.get_config()
  config.wandb = wandb
  names = tuple('0123456789')
  images = Images(SIZE, Preprocessing(0, MEAN, STD))
  objective = Classification(model, images, names)
  return Parts(config, objective, mesh, Facts(names, 9))


def evaluator(model, mesh, count=3, wandb=''):
  return pictures.PicturesEvaluator(
    parts_of(model, mesh, wandb),
    'seen',
    ConfigDict({'split': 'test', 'images': count}),
  )


@pytest.mark.slow
def test_they_are_the_rollout_and_the_filters(tensorboard, monkeypatch):
  model = model_of(VIT | {'scan': True})
  mesh = mesh_of(data=2, fsdp=2, tensor=2)
  params = jax.jit(lambda key: variants.init(model, key, SIZE))(
    jax.random.key(0)
  )
  placed = jax.device_put(params, sharding.tree_shardings(params, mesh))
  drawn = []
  monkeypatch.setattr(
    draw, 'overlay', lambda image, map_hw: drawn.append(map_hw) or image
  )
  found = evaluator(model, mesh).run(placed)
  assert [*found] == ['seen/rollout', 'seen/filters']
  for picture in found.values():
    assert picture.dtype == np.uint8
    assert picture.shape[2:] == (3,)
  source = sources.open_source('digits', 'test')
  transform = transforms.EvalTransform(SIZE)
  images = np.stack([transform(source[i])['image'] for i in range(3)])
  want = rollout(
    Layers(model, params, device_augmentation.normalize(images, MEAN, STD))
  )
  np.testing.assert_allclose(drawn, want, atol=1e-5)
  components = filters.principal_components(
    np.asarray(params['embedding']['kernel']), 28
  )
  np.testing.assert_array_equal(
    found['seen/filters'], draw.pixels(draw.filters(components))
  )


@pytest.mark.slow
def test_the_first_process_shows_them_and_all_look(tensorboard, monkeypatch):
  """The pictures show the images that the model takes."""
  model, mesh = model_of(), mesh_of()
  params = jax.jit(lambda key: variants.init(model, key, SIZE))(
    jax.random.key(0)
  )
  source = sources.open_source('digits', 'test')
  made = evaluator(model, mesh, 2)
  sheets = []
  sheet = draw.sheet
  monkeypatch.setattr(
    draw, 'sheet', lambda *args: sheets.append(args) or sheet(*args)
  )
  made.run(params)
  ((rows, names),) = sheets
  assert names == ['', '']
  transform = transforms.EvalTransform(SIZE)
  for i, row in enumerate(rows):
    assert [*row] == ['image', 'rollout']
    np.testing.assert_array_equal(row['image'], transform(source[i])['image'])
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  assert made.run(params) == {} and len(sheets) == 1


def test_of_fewer_images_than_wanted_all_are_drawn(tensorboard):
  made = evaluator(model_of(), mesh_of(), 361)
  assert len(made._images_BHWC) == 360
