"""Models with random weights, without zeros or constant arrays."""

import functools

import jax
import numpy as np
from flax import traverse_util

from vit_jax.checkpoints import opening
from vit_jax.models import flops, variants


def random_arrays(model, image_size, seed=0):
  """Returns random arrays by path, on the scale of trained ones."""
  rng = np.random.default_rng(seed)

  def draw(path, shape):
    x = rng.standard_normal(shape, np.float32)
    if path.endswith('kernel'):
      if 'encoderblock/' in path:
        shape = shape[1:]  # a stack of layers is no larger than its layers
      fan_in = shape[0] if 'Attention' in path else np.prod(shape[:-1])
      if path.endswith('out/kernel'):
        fan_in = shape[0] * shape[1]
      return x * np.float32(fan_in**-0.5)
    if path.endswith('scale'):
      return 1 + np.float32(0.3) * x
    return np.float32(0.1) * x

  # Cached: opening the model's files needs the same shapes.
  tree = flops.param_shapes(model, image_size)
  flat = traverse_util.flatten_dict(tree, sep='/')
  return {path: draw(path, leaf.shape) for path, leaf in flat.items()}


def random_checkpoint(variant, size=None, num_classes=7, names=True, **fields):
  """Returns a `Checkpoint` of a variant, or of fields alone.

  Args:
    variant: as in 'ti16', or None to take `fields` alone.
    size: (H, W), 224 x 224 if None.
    num_classes: C.
    names: whether the classes have names.
    **fields: of `variants.build`, over those of the variant.
  """
  size = size or (224, 224)
  fields = (variants.fields(variant) if variant else {}) | fields
  model = variants.build(num_classes=num_classes, image_size=size, **fields)
  return opening.Checkpoint(
    path='random',
    model=model,
    params=traverse_util.unflatten_dict(random_arrays(model, size), sep='/'),
    image_size=size,
    class_names=tuple(f'class {i}' for i in range(num_classes))
    if names
    else (),
  )


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, images):
  return model.apply({'params': params}, images)[0]


def logits_of(checkpoint, images_uint8_BHWC):
  """Returns float32 logits of our model for images of values up to 255."""
  p = checkpoint.preprocessing
  images = (images_uint8_BHWC / np.float32(255) - np.float32(p.mean)) / (
    np.float32(p.std)
  )
  images = images.astype(np.float32)
  return np.asarray(_apply(checkpoint.model, checkpoint.params, images))


def random_images(size, count=2, seed=1):
  """Returns uint8 images BHWC."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (count, *size, 3), np.uint8)


def relative_difference(got, want):
  """Returns the largest difference as a share of the largest value."""
  assert got.shape == want.shape
  return np.abs(got - want).max() / np.abs(want).max()
