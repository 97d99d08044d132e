"""Complete photographs with a causal iGPT, and compute their likelihood."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.projects.igpt.model import IGPT
from vit_jax.visualize import draw, photos

_GREY = 128  # fills the rows below the kept rows in `picture`


@functools.partial(jax.jit, static_argnames=('model', 'given'))
def continued(
  model: IGPT,
  params: Any,
  colours_BL: jax.Array,
  given: int,
  key: jax.Array,
  temperature: float,
) -> jax.Array:
  """Samples all pixels after the first `given` ones.

  The distribution of pixel i is p(pixel i | pixels before i)^(1 / temperature),
  normalised. The random key of pixel i depends on `key` and i, not on `given`.
  Takes and returns palette indices, int32 BL. The model must be causal, and the
  temperature above 0.
  """
  _, aux = model.apply({'params': params}, colours_BL, capture=('cache',))
  keys, values, _ = aux['cache']
  L = colours_BL.shape[1]

  def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
    colours_BL, cache = carry
    before_B1 = colours_BL[:, jnp.maximum(i - 1, 0)][:, None]
    _, aux = model.apply(
      {'params': params}, before_B1, capture=('pixels',), cache=cache
    )
    drawn_B = jax.random.categorical(
      jax.random.fold_in(key, i), aux['pixels'][:, 0] / temperature
    )
    return (colours_BL.at[:, i].set(drawn_B), aux['cache']), None

  carry = (colours_BL, (keys, values, jnp.int32(given)))
  (colours_BL, _), _ = jax.lax.scan(step, carry, jnp.arange(given, L))
  return colours_BL


@functools.partial(jax.jit, static_argnames='model')
def bits(model: IGPT, params: Any, colours_BL: jax.Array) -> jax.Array:
  """Returns the bits per pixel of each image, -log2 p(image) / L, float32 B."""
  _, aux = model.apply({'params': params}, colours_BL, capture=('pixels',))
  log_BLK = jax.nn.log_softmax(aux['pixels'])
  log_BL = jnp.take_along_axis(log_BLK, colours_BL[..., None], axis=-1)
  return -jnp.mean(log_BL[..., 0], axis=1) / jnp.log(2.0)


class Completed(NamedTuple):
  """A photograph and its completions, at the model's image size.

  `own_HWC` is the photograph in the palette's colours, and `samples_SHWC` are
  its completions, uint8. `kept` is the number of kept rows at the top. `bits`
  is the photograph's bits per pixel.
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
  """Yields the completions of each photograph.

  Args:
    checkpoint: an open checkpoint of a causal iGPT, or its path.
    images: paths of image files.
    keep: share of the pixel rows to keep, from the top. The last row is always
      sampled.
    samples: number of completions per image.
    temperature: above 0; values below 1 favour likely pixels.
    seed: seed of the samples.

  Raises:
    ValueError: if the checkpoint is not a causal iGPT.
    UnreadableImage: if a file is missing, damaged or not an image.

  Also raises the errors of `opening.open_checkpoint`.
  """
  checkpoint = opening.open_checkpoint(checkpoint)
  model = checkpoint.model
  if not isinstance(model, IGPT) or not model.causal:
    found = checkpoint.describe()
    if isinstance(model, IGPT):
      found = 'iGPT (BERT)'
    raise ValueError(
      f'{checkpoint.path} is not a causal iGPT: it is {found}. Give a '
      'checkpoint trained with configs/igpt.py and model.causal=True.'
    )
  images_BHWC = [x.seen_HWC for x in photos.load(images, checkpoint)]
  H, W = checkpoint.image_size
  kept = min(round(keep * H), H - 1)
  params = checkpoint.on_device
  # Completes one image at a time, because the cached keys and values of all
  # images might not fit into memory.
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
  """Returns a PNG with a named row for each photograph.

  The columns are the photograph, its kept part, and the samples.
  """
  rows = []
  for own_HWC, samples_SHWC, kept, _ in found:
    seen_HWC = own_HWC.copy()
    seen_HWC[kept:] = _GREY
    samples = {f'sample {i}': x for i, x in enumerate(samples_SHWC, 1)}
    rows.append({'photograph': own_HWC, 'kept': seen_HWC} | samples)
  return draw.sheet(rows, names)
