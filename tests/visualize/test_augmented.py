"""The sheet of augmentations: operations down, images across."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import host_augmentation
from vit_jax.visualize import augmented, draw


@pytest.fixture
def path(tmp_path):
  pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'a.png')
  return str(tmp_path / 'a.png')


def test_eight_images_are_in_the_picture_and_all_in_the_arrays(
  path, monkeypatch
):
  sheets = []
  monkeypatch.setattr(draw, 'sheet', lambda *args: sheets.append(args) or b'')
  section = augmented.section([path] * 9, (8, 12))
  (figure,) = section.figures
  figure.draw()
  ((rows, names),) = sheets
  arrays = section.arrays
  assert names == arrays['operations'].tolist()
  assert arrays['files'].tolist() == [path] * 9
  assert arrays['images'].shape == (len(names), 9, 8, 12, 3)
  for row, images in zip(rows, arrays['images'], strict=True):
    assert [*row] == [f'{i}' for i in range(1, 9)]
    for i, image in enumerate(row.values()):
      np.testing.assert_array_equal(image, images[i])


def test_values_are_those_of_magnitude_10(path):
  """Either way, negative first, where an operation has two."""
  names = augmented.section([path], (8, 12)).arrays['operations'].tolist()
  for name in host_augmentation.RANDAUGMENT:
    operation = host_augmentation.OPERATIONS[name]
    found = [x for x in names if x.split()[0] == name]
    if not operation.end:
      assert found == [name]
      continue
    values = [float(x.split('(')[1].rstrip(')')) for x in found]
    want = (
      [-operation.end, operation.end] if operation.signed else [operation.end]
    )
    assert values == pytest.approx(want, rel=0.01)
