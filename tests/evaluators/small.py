"""A small model with a random head, and meshes."""

import functools

import jax

from vit_jax.models import variants
from vit_jax.training import sharding

SIZE = (8, 8)
TINY = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 32, 'heads': 2}


@functools.cache
def _initial(model):
  init = jax.jit(lambda key: variants.init(model, key, SIZE))
  return init(jax.random.key(0))


def model_of(num_classes=10, **fields):
  """Returns a ViT and its parameters."""
  fields = TINY | {'num_classes': num_classes} | fields
  model = variants.build(image_size=SIZE, **fields)
  params = jax.tree.map(lambda x: x, _initial(model))
  if num_classes:
    shape = params['head']['kernel'].shape
    params['head']['kernel'] = jax.random.normal(jax.random.key(1), shape)
  return model, params


def mesh_of(devices):
  return sharding.make_mesh(
    {'data': -1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:devices]
  )
