"""A small model with a random head, and meshes."""

import functools
import types

import jax

from configs import digits
from vit_jax.data.images import Images
from vit_jax.models import variants
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts
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


def parts_of(source, extract, names=()):
  """Returns a stand-in for `Parts` with one source and a given extractor."""
  return types.SimpleNamespace(
    config=digits.get_config(),
    objective=Classification(model_of(1000)[0], Images(SIZE)),
    facts=Facts(names, 9),
    source=lambda split: source,
    extractor=lambda function: extract,
  )


def mesh_of(devices):
  return sharding.make_mesh(
    {'data': -1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:devices]
  )
