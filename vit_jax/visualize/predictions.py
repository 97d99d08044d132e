"""Draw the predictions of masked patches."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.images import Images
from vit_jax.models.fields import check_value
from vit_jax.models.masked_vit import KEPT, MASKED, OTHER, SMALL, MaskedViT
from vit_jax.objectives import masked as objective
from vit_jax.visualize.photos import SMALLEST, Subject
from vit_jax.visualize.sections import Section, sheets

RATE = 0.5


def section(subject: Subject, rate: float) -> Section:
  """Predictions of masked patches by a model trained with configs/masked.py.

  Arrays of pixels (image, H, W, RGB): `images`, `hidden` (the model's input,
  with masked patches gray) and `predicted` (patches of kind 0 are copied from
  `images`). `kind` (image, h, w) is 0 for visible patches, 1 for masked
  patches, 2 for patches replaced by another patch, and 3 for visible patches
  that are predicted too. `files` has the paths.

  Raises:
    ValueError: if the checkpoint does not predict masked patches, or the rate
      is invalid.
  """
  check_value('--rate', rate, objective.MaskedPatches.valid['rate'])
  checkpoint = subject.checkpoint
  model: Any = checkpoint.model
  if not isinstance(model, MaskedViT):
    raise ValueError(
      f'{checkpoint.path} is a {type(model).__name__}, which does not predict '
      'masked patches. Give a checkpoint trained with configs/masked.py.'
    )
  made = objective.MaskedPatches(model, checkpoint.images, rate=rate)
  h, w = model.grid(checkpoint.image_size)

  @jax.jit
  def predict(
    params: Any, image_HWC: jax.Array, key: jax.Array
  ) -> tuple[jax.Array, ...]:
    hidden = made.hide(image_HWC[None], key[None])
    kind_1L, other_1L = hidden['kind'], hidden['other']
    predicted, _ = model.apply(
      {'params': params}, hidden['image'], corruption=(kind_1L, other_1L)
    )
    return kind_1L[0], other_1L[0], predicted[0], hidden['target'][0]

  rows, kinds = [], []
  for n, photograph in enumerate(subject.photographs):
    key = jax.random.fold_in(jax.random.key(0), n)
    kind_L, other_L, predicted, target = jax.device_get(
      predict(checkpoint.on_device, photograph.seen_HWC, key)
    )
    H, W, _ = photograph.seen_HWC.shape
    cells_1LX = objective.cells(jnp.array(photograph.seen_HWC)[None], h, w)
    seen_LPPC = np.reshape(cells_1LX, (h * w, H // h, W // w, 3))
    if model.target != 'pixels':
      predicted = predicted.argmax(-1)
    guess_LPPC, true_LPPC = (
      colours_of(model, made.images, values, seen_LPPC.shape[1:])
      for values in (predicted, target)
    )
    kinds.append(kind_L.reshape(h, w))
    at_LPPC = kind_L[:, None, None, None]
    other_LPPC = np.where(at_LPPC == OTHER, seen_LPPC[other_L], seen_LPPC)
    patches = {
      'image': seen_LPPC,
      'what it sees': np.where(at_LPPC == MASKED, np.uint8(128), other_LPPC),
      'what it predicts': np.where(at_LPPC == KEPT, seen_LPPC, guess_LPPC),
      'what is right': np.where(at_LPPC == KEPT, seen_LPPC, true_LPPC),
    }
    parts = {k: x.reshape(h, w, *x.shape[1:]) for k, x in patches.items()}
    rows.append(
      {k: x.swapaxes(1, 2).reshape(H, W, 3) for k, x in parts.items()}
    )

  def line(n: int) -> dict[str, np.ndarray]:
    # An integer factor keeps pixels sharp.
    times = math.ceil(SMALLEST / max(checkpoint.image_size))
    return {k: x.repeat(times, 0).repeat(times, 1) for k, x in rows[n].items()}

  columns = (np.stack(x) for x in zip(*(r.values() for r in rows), strict=True))
  return Section(
    'Masked patches',
    f'In each image, {np.sum(kinds[0] != KEPT)} of {h * w} patches are '
    'corrupted: most are replaced by the mask (gray), a few by another patch, '
    'and a few stay visible. For each corrupted patch the model predicts '
    f'{_WHAT[model.target]}.',
    dict(zip(('images', 'hidden', 'predicted'), columns, strict=False))
    | {'kind': np.stack(kinds), 'files': subject.files},
    sheets('masked', 'masked patches', subject.photographs, line),
  )


_WHAT = {
  'mean_colour': 'the mean colour, one of 512',
  'downsized': f'{SMALL} x {SMALL} colours, each one of 512',
  'pixels': 'all pixels',
}


def colours_of(
  model: MaskedViT, images: Images, values: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
  """Converts predictions or targets of one image to patches, uint8 LPPC.

  `objectives.masked.target` describes `values`; `shape` is (P, P, 3).
  """
  L, (height, width, _) = len(values), shape
  if model.target == 'pixels':
    mean, std = images.preprocessing.mean, images.preprocessing.std
    x_LPPC = values.reshape(L, *shape) * np.array(std) + mean
    return np.clip(np.round(255 * x_LPPC), 0, 255).astype(np.uint8)
  # Each channel has 8 bins of 32 values; take the middle of the bin.
  rgb = 32 * np.stack([values // 64, values // 8 % 8, values % 8], -1) + 16
  side = 1 if model.target == 'mean_colour' else SMALL
  cells = rgb.reshape(L, side, side, 3).astype(np.uint8)
  return cells.repeat(height // side, 1).repeat(width // side, 2)
