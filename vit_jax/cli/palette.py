"""Finds the colours that stand for all others in images, for iGPT.

  python -m vit_jax.palette DATASET --colours=512 --out=palette.npy

clusters pixels by k-means in RGB and writes the means, from dark to bright, as
float32 (colours, 3) in [-1, 1]; a picture beside it shows them, and some images
before and after. configs/igpt.py takes the file, and it travels in the
checkpoint from there on.
"""

import argparse
import logging
import math
import pathlib
import sys
import warnings
from collections.abc import Sequence

import numpy as np

from vit_jax.cli import flags
from vit_jax.data import bad_images, images, transforms, whole
from vit_jax.data.sources import Source
from vit_jax.visualize import draw

_log = logging.getLogger(__name__)

# Of the source, evenly spread, and how many of their pixels are clustered: ten
# times as many took minutes.
IMAGES, PIXELS = 10_000, 1_000_000
# Pixels of a step of k-means, which scikit-learn advises to be above 3,000.
_STEP = 8_192
# Images in the picture, and the side they are enlarged to.
_SHOWN, _SIDE = 8, 96


def fit(pixels_NC: np.ndarray, colours: int) -> np.ndarray:
  """Returns the means of pixels' clusters, from dark to bright.

  Args:
    pixels_NC: uint8 RGB.
    colours: K.

  Returns:
    float32 KC in [-1, 1].

  Raises:
    ValueError: if there are fewer colours than that.
  """
  from sklearn.cluster import MiniBatchKMeans  # slow to import

  there = len(np.unique(pixels_NC.astype(np.int32) @ [1 << 16, 1 << 8, 1]))
  if there < colours:
    raise ValueError(
      f'--colours={colours}, and the images have {there:,} different ones: ask '
      'for at most as many.'
    )
  values_NC = pixels_NC.astype(np.float32) / np.float32(127.5) - 1
  kmeans = MiniBatchKMeans(
    colours, batch_size=_STEP, n_init=3, random_state=0, max_iter=20
  )
  with warnings.catch_warnings():
    # Of small data, whose batches are smaller than was asked for.
    warnings.simplefilter('ignore')
    kmeans.fit(values_NC)
  found_KC = np.clip(kmeans.cluster_centers_, -1, 1).astype(np.float32)
  found_KC = found_KC[np.argsort(found_KC.sum(-1), kind='stable')]
  if found_KC.min() >= 0:
    # Of images that are bright everywhere. `read` would take them for [0, 1].
    found_KC[0] = -1
  return found_KC


def nearest(pixels_NC: np.ndarray, palette_KC: np.ndarray) -> np.ndarray:
  """Returns uint8 pixels with the colours of the palette."""
  from sklearn.metrics import pairwise_distances_argmin

  values_NC = pixels_NC.astype(np.float32) / np.float32(127.5) - 1
  found_NC = palette_KC[pairwise_distances_argmin(values_NC, palette_KC)]
  return np.rint(127.5 * (found_NC + 1)).astype(np.uint8)


def read(path: str) -> tuple[float, ...]:
  """Returns a palette as `model.palette` takes it.

  A .npy file with an array (colours, 3), or (colours, 1) of greys, of values in
  [-1, 1], or in [0, 1] as teddykoker/image-gpt has them: where none is below 0,
  which is said, they are of these.

  Raises:
    FileNotFoundError: if there is none.
    ValueError: if it holds none.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(
      f'No palette at {path}: python -m vit_jax.palette DATASET --out={path}'
    )
  try:
    found = np.load(path, allow_pickle=False)
    values = np.asarray(found, np.float32)
  except Exception as e:
    raise ValueError(f'{path} is no .npy file of numbers: {e}') from e
  if values.ndim != 2 or values.shape[1] not in (1, 3) or len(values) < 2:
    raise ValueError(
      f'{path} has the shape {values.shape}, and a palette (colours, 3) or, of '
      'greys, (colours, 1).'
    )
  if not np.all(np.abs(values) <= 1):
    raise ValueError(f'{path} has values that are not in [-1, 1].')
  if values.min() >= 0:
    _log.warning('%s has no value below 0: it is read as of [0, 1].', path)
    values = 2 * values - 1
  values = np.broadcast_to(values, (len(values), 3))
  return tuple(values.ravel().tolist())


def _picture(images_BHWC: np.ndarray, palette_KC: np.ndarray) -> bytes:
  """Returns a PNG: images, the same in the palette, and its colours."""
  same = nearest(images_BHWC.reshape(-1, 3), palette_KC)
  scale = math.ceil(_SIDE / max(images_BHWC.shape[1:3]))
  rows = [
    np.concatenate(list(x), 1).repeat(scale, 0).repeat(scale, 1)
    for x in (images_BHWC, same.reshape(images_BHWC.shape))
  ]
  width = rows[0].shape[1]
  columns = min(len(palette_KC), 64)
  lines = math.ceil(len(palette_KC) / columns)
  swatches = np.full((lines * columns, 3), 255, np.uint8)
  swatches[: len(palette_KC)] = np.rint(127.5 * (palette_KC + 1))
  side = max(width // columns, 1)
  grid = swatches.reshape(lines, columns, 3).repeat(side, 0).repeat(side, 1)
  grid = np.pad(
    grid[:, :width],
    ((0, 0), (0, max(width - grid.shape[1], 0)), (0, 0)),
    constant_values=255,
  )
  return draw.png(np.concatenate([*rows, grid]))


def _images(source: Source, size: tuple[int, int]) -> np.ndarray:
  """Returns at most `IMAGES` of a source as a model sees them, uint8 BHWC."""
  transform = transforms.EvalTransform(size)
  count = min(IMAGES, len(source))
  rows = np.linspace(0, len(source) - 1, count).astype(int)
  return np.stack([transform(source[int(i)])['image'] for i in rows])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status: 0, or 2 for bad input."""
  parser = flags.parser('palette', __doc__)
  add = parser.add_argument
  add('dataset', help="'digits', a folder of images, or a TFDS name")
  add('--colours', type=int, default=512, help='how many (default: 512)')
  add('--out', required=True, metavar='FILE.npy', help='new file')
  add('--split', default='train', help='of the data (default: train)')
  flags.add_data(parser)
  add('--image_size', default='32', help='side in pixels (default: 32)')
  args = parser.parse_args(argv)
  if args.colours < 2:
    parser.error(f'--colours={args.colours}: at least 2 are needed.')
  if not args.out.endswith('.npy'):
    parser.error(f'--out={args.out}: its name should end in .npy.')
  return flags.command(_run, args)


def _run(args: argparse.Namespace) -> None:
  picture = str(pathlib.Path(args.out).with_suffix('.png'))
  for path in (args.out, picture):
    whole.refuse_existing(path)
  size = images.size_of(args.image_size, '--image_size')
  data = flags.data_of(args.dataset, args)
  images_BHWC = _images(bad_images.open_checked(data, args.split), size)
  pixels_NC = images_BHWC.reshape(-1, 3)
  if len(pixels_NC) > PIXELS:
    rows_N = np.random.default_rng(0).choice(len(pixels_NC), PIXELS, False)
    pixels_NC = pixels_NC[rows_N]
  palette_KC = fit(pixels_NC, args.colours)
  error = np.float32(nearest(pixels_NC, palette_KC)) - pixels_NC
  rmse = math.sqrt(np.mean(np.square(error)))
  with whole.new_file(args.out) as new, new.open('wb') as file:
    np.save(file, palette_KC)
  whole.replace(picture, _picture(images_BHWC[:_SHOWN], palette_KC))
  print(
    f'data     {args.dataset} {args.split}: {len(pixels_NC):,} pixels of '
    f'{len(images_BHWC):,} images\n'
    f'error    {rmse:.2f} of 255, the root of the mean square of red, green '
    f'and blue\nwritten  {args.out}: {args.colours} colours\n'
    f'written  {picture}'
  )


if __name__ == '__main__':
  sys.exit(main())
