"""Completes photographs with a causal iGPT, and tells how likely they are.

  python -m vit_jax.complete CHECKPOINT photo.jpg --keep=0.5 --samples=4 \
      --out=complete.png

Rows of pixels from the top are kept and the others are drawn, pixel after
pixel, of what the model thinks of them. The picture has a row for each
photograph: itself in the model's colours, what is kept of it, and the samples.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.cli import flags
from vit_jax.data import decode, whole
from vit_jax.projects.igpt.model import IGPT
from vit_jax.visualize import draw

# Side that images are enlarged to, about, what is between them, and for pixels
# that are not kept.
_SIDE, _GAP, _GREY = 128, 4, 128


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


def bits(model: IGPT, params: Any, colours_BL: jax.Array) -> jax.Array:
  """Returns the bits a pixel of images, -log2 p(image) / L, B."""
  _, aux = model.apply({'params': params}, colours_BL, capture=('pixels',))
  log_BLK = jax.nn.log_softmax(aux['pixels'])
  log_BL = jnp.take_along_axis(log_BLK, colours_BL[..., None], axis=-1)
  return -jnp.mean(log_BL[..., 0], axis=1) / jnp.log(2.0)


def complete(
  checkpoint: opening.Checkpoint, args: argparse.Namespace
) -> np.ndarray:
  """Completes photographs, and prints their bits a pixel.

  Returns:
    The picture, uint8 HWC.

  Raises:
    ValueError: if the checkpoint is of another model, or a file is no image.
  """
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
    transform.image(decode.read_file(path), path) for path in args.images
  ]
  H, W = checkpoint.image_size
  # At least a row is drawn.
  kept = min(round(args.keep * H), H - 1)
  params = checkpoint.on_device
  rows = []
  # One after the other, as the keys and values of all would not fit.
  for i, path in enumerate(args.images):
    image_1HWC = checkpoint.normalize(jnp.asarray(images_BHWC[i][None]))
    colours_1L, bits_1 = _read(model, params, image_1HWC)
    print(f'{flags.printable(path)}  {bits_1[0]:.3f} bits a pixel', flush=True)
    drawn_SL = continued(
      model,
      params,
      jnp.repeat(colours_1L, args.samples, axis=0),
      kept * W,
      jax.random.fold_in(jax.random.key(args.seed), i),
      args.temperature,
    )
    own_HWC = model.painted(np.asarray(colours_1L)[0]).reshape(H, W, 3)
    seen_HWC = own_HWC.copy()
    seen_HWC[kept:] = _GREY
    samples = model.painted(np.asarray(drawn_SL)).reshape(-1, H, W, 3)
    rows.append([own_HWC, seen_HWC, *samples])
  return _grid(np.array(rows))


@functools.partial(jax.jit, static_argnames='model')
def _read(
  model: IGPT, params: Any, images_BHWC: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the colours BL of images, and their bits a pixel B."""
  colours_BL = model.quantised(images_BHWC)
  return colours_BL, bits(model, params, colours_BL)


def _grid(images_RCHWC: np.ndarray) -> np.ndarray:
  """Returns rows R and columns C of images as one, enlarged."""
  times = max(_SIDE // images_RCHWC.shape[2], 1)
  big = images_RCHWC.repeat(times, 2).repeat(times, 3)
  padding = ((0, 0), (0, 0), (0, _GAP), (0, _GAP), (0, 0))
  big = np.pad(big, padding, constant_values=255)
  R, C, H, W, _ = big.shape
  joined = big.swapaxes(1, 2).reshape(R * H, C * W, 3)
  return joined[:-_GAP, :-_GAP]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  parser = flags.parser('complete', __doc__)
  add = parser.add_argument
  add('checkpoint', help=WHAT_OPENS)
  add('images', nargs='+', help='image files')
  add(
    '--keep',
    type=float,
    default=0.5,
    help='share of the rows of pixels, from the top (default: 0.5)',
  )
  add('--samples', type=int, default=4, help='of each image (default: 4)')
  add(
    '--temperature',
    type=float,
    default=1.0,
    help='below 1 for likelier pixels (default: 1)',
  )
  add('--seed', type=int, default=0, help='of the samples (default: 0)')
  add(
    '--out',
    default='complete.png',
    metavar='FILE.png',
    help='the picture, replaced if it is there (default: complete.png)',
  )
  args = parser.parse_args(argv)
  if not 0 <= args.keep < 1:
    parser.error(f'--keep={args.keep}: a share from 0 to less than 1.')
  if args.samples < 1:
    parser.error(f'--samples={args.samples}: at least 1.')
  if not args.temperature > 0:
    parser.error(f'--temperature={args.temperature}: it is above 0.')
  if not args.out.endswith('.png'):
    parser.error(f'--out={args.out}: its name should end in .png.')
  if not pathlib.Path(args.out).absolute().parent.is_dir():
    parser.error(f'--out={args.out}: there is no such folder; make it first.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> None:
  picture = complete(opening.open_checkpoint(args.checkpoint), args)
  whole.replace(args.out, draw.png(picture))
  print(f'written  {args.out}')


if __name__ == '__main__':
  sys.exit(main())
