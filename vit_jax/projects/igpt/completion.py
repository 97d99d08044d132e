"""Completes photographs with a causal iGPT, and tells how likely they are."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.data import decode
from vit_jax.projects.igpt.model import IGPT
from vit_jax.visualize import draw

_GREY = 128  # of pixels that are not kept


@functools.partial(jax.jit, static_argnames=('model', 'given'))
def continued(
  model: IGPT,
  params: Any,
  colours_BL: jax.Array,
  given: int,
  key: jax.Array,
  temperature: float,
) -> jax.Array:
  """Draws the pixels after the first `given` ones.

  p(pixel i | those before) to the power 1 / temperature, normalised. Position
  i has the key that is folded from i, whatever is given.

  Args:
    model: causal.
    params: of the model.
    colours_BL: by number; those not given make no difference.
    given: number of pixels.
    key: of the draws.
    temperature: above 0; below 1 for likelier pixels.

  Returns:
    Colours by number, int32 BL, the first ones as they are.
  """
  _, aux = model.apply({'params': params}, colours_BL, capture=('cache',))
  keys, values, _ = aux['cache']
  L = colours_BL.shape[1]

  def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
    colours_BL, cache = carry
    before_B1 = jax.lax.dynamic_slice_in_dim(
      colours_BL, jnp.maximum(i - 1, 0), 1, axis=1
    )
    _, aux = model.apply(
      {'params': params}, before_B1, capture=('pixels',), cache=cache
    )
    drawn_B = jax.random.categorical(
      jax.random.fold_in(key, i), aux['pixels'][:, 0] / temperature
    )
    colours_BL = jax.lax.dynamic_update_slice_in_dim(
      colours_BL, drawn_B[:, None].astype(jnp.int32), i, axis=1
    )
    return (colours_BL, aux['cache']), None

  carry = (colours_BL, (keys, values, jnp.int32(given)))
  (colours_BL, _), _ = jax.lax.scan(step, carry, jnp.arange(given, L))
  return colours_BL


@functools.partial(jax.jit, static_argnames='model')
def bits(model: IGPT, params: Any, colours_BL: jax.Array) -> jax.Array:
  """Returns the bits a pixel of images, -log2 p(image) / L, B."""
  _, aux = model.apply({'params': params}, colours_BL, capture=('pixels',))
  log_BLK = jax.nn.log_softmax(aux['pixels'])
  log_BL = jnp.take_along_axis(log_BLK, colours_BL[..., None], axis=-1)
  return -jnp.mean(log_BL[..., 0], axis=1) / jnp.log(2.0)


class Completed(NamedTuple):
  """A photograph and what a model makes of it.

  Attributes:
    own_HWC: in the model's colours, uint8.
    samples_SHWC: completions, uint8.
    kept: rows from the top that were kept.
    bits: a pixel, -log2 of the photograph's probability.
  """

  own_HWC: np.ndarray
  samples_SHWC: np.ndarray
  kept: int
  bits: float


def complete(
  checkpoint: opening.Checkpoint | str,
  images: Sequence[str],
  *,
  keep: float = 0.5,
  samples: int = 4,
  temperature: float = 1.0,
  seed: int = 0,
) -> Iterator[Completed]:
  """Completes photographs, one after the other.

  Args:
    checkpoint: of a causal iGPT, open or anything that `open_checkpoint` opens.
    images: paths.
    keep: share of the rows of pixels that are kept, from the top.
    samples: of each image.
    temperature: above 0; below 1 for likelier pixels.
    seed: of the samples.

  Raises:
    ValueError: if the checkpoint is of another model, or a file is no image.
  """
  checkpoint = opening.open_checkpoint(checkpoint)
  model = checkpoint.model
  if not isinstance(model, IGPT) or not model.causal:
    kind = f'a {type(model).__name__}'
    if isinstance(model, IGPT):
      kind = 'an iGPT that is not causal'
    raise ValueError(
      f'{checkpoint.path} is {kind}, which tells no pixel of those before it: '
      'give a causal iGPT, as configs/igpt.py trains.'
    )
  transform = checkpoint.transform()
  images_BHWC = [
    transform.image(decode.read_file(path), path) for path in images
  ]
  H, W = checkpoint.image_size
  # At least a row is drawn.
  kept = min(round(keep * H), H - 1)
  params = checkpoint.on_device
  # One after the other, as the keys and values of all would not fit.
  for i, image_HWC in enumerate(images_BHWC):
    image_1HWC = checkpoint.normalize(jnp.asarray(image_HWC[None]))
    colours_1L = model.quantised(image_1HWC)
    drawn_SL = continued(
      model,
      params,
      jnp.repeat(colours_1L, samples, axis=0),
      kept * W,
      jax.random.fold_in(jax.random.key(seed), i),
      temperature,
    )
    yield Completed(
      model.painted(np.asarray(colours_1L)[0]).reshape(H, W, 3),
      model.painted(np.asarray(drawn_SL)).reshape(-1, H, W, 3),
      kept,
      float(bits(model, params, colours_1L)[0]),
    )


def picture(found: Sequence[Completed], names: Sequence[str]) -> bytes:
  """Returns a PNG with a row for each photograph, called by its name.

  Its columns are the photograph, what is kept of it, and the samples.
  """
  rows = []
  for own_HWC, samples_SHWC, kept, _ in found:
    seen_HWC = own_HWC.copy()
    seen_HWC[kept:] = _GREY
    samples = {f'sample {i}': x for i, x in enumerate(samples_SHWC, 1)}
    rows.append({'photograph': own_HWC, 'kept': seen_HWC} | samples)
  return draw.sheet(rows, names)
