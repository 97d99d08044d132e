"""What the model sees, and the same part in the file's detail."""

import numpy as np
import pytest
from PIL import Image

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints.formats import table
from vit_jax.visualize import photos


def checkpoint(resize_small):
  made = random_checkpoint(
    None, (16, 16), patch_size=8, width=8, depth=1, mlp_dim=8, heads=1
  )
  object.__setattr__(
    made, 'preprocessing', table.Preprocessing(resize_small=resize_small)
  )
  return made


def ramp(height, width):
  """Red says the column and green the row, from 0 to 255."""
  y, x = np.mgrid[:height, :width]
  image = np.zeros((height, width, 3), np.uint8)
  image[..., 0] = np.round(255 * (x + 0.5) / width)
  image[..., 1] = np.round(255 * (y + 0.5) / height)
  return image


@pytest.mark.parametrize(
  ('resize_small', 'shape'), [(0, (900, 450)), (20, (300, 600))]
)
def test_shown_is_the_part_that_is_seen(resize_small, shape, tmp_path):
  path = str(tmp_path / 'ramp.png')
  Image.fromarray(ramp(*shape)).save(path)
  (photograph,) = photos.load([path], checkpoint(resize_small))
  shown = photograph.shown()
  assert 256 <= max(shown.shape) <= 1024
  if not resize_small:
    assert shown.shape[:2] == shape
  # The edges of both show the same places, half a pixel of either apart.
  seen = photograph.seen_HWC.astype(float)
  shown = shown.astype(float)
  for channel, axis in ((0, 1), (1, 0)):
    for end in (0, -1):
      place = np.take(seen[..., channel], end, axis).mean()
      edge = np.take(shown[..., channel], end, axis).mean()
      assert abs(edge - place) < 255 / min(16, *shape)
  ranges = np.ptp(seen, (0, 1))[:2] / np.ptp(shown, (0, 1))[:2]
  np.testing.assert_allclose(ranges, 15 / 16, atol=0.08)


def test_a_crop_is_shown_in_the_detail_of_the_file(tmp_path):
  path = str(tmp_path / 'ramp.png')
  Image.fromarray(ramp(900, 450)).save(path)
  (photograph,) = photos.load([path], checkpoint(20))
  # 16 of 20 pixels of the shorter side.
  assert photograph.shown().shape == (360, 360, 3)


def test_names_are_their_own(tmp_path):
  names = ('a.png', 'x/a.png', 'x/a-2.png', 'y/a.png')
  paths = [tmp_path / name for name in names]
  for path in paths:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(ramp(20, 20)).save(path)
  found = photos.load([str(path) for path in paths], checkpoint(0))
  assert len({photograph.name for photograph in found}) == 4
