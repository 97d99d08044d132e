"""Maps over photographs, and which pixels stay."""

import numpy as np
import pytest

from vit_jax.visualize import draw


@pytest.mark.parametrize('share', [0.0, 0.3, 0.5, 1.0])
def test_exactly_a_share_of_the_pixels_is_highest(share):
  rng = np.random.default_rng(0)
  values = rng.random((9, 11))
  found = draw.highest(values, share)
  assert found.sum() == round(share * 99)
  if 0 < share < 1:
    assert values[found].min() > values[~found].max()


def test_of_equal_values_as_many_stay():
  assert draw.highest(np.ones((10, 10)), 0.3).sum() == 30


def test_a_map_is_enlarged_about_the_centres_of_patches():
  map_hw = np.zeros((3, 4))
  map_hw[1, 2] = 1
  large = draw.enlarge(map_hw, (30, 40))
  assert large.shape == (30, 40)
  # The centre of the patch lies between pixels 14 and 15, 24 and 25.
  np.testing.assert_allclose(large[14:16, 24:26], 0.95**2, rtol=1e-5)
  # Half of the way to the next patch, along the row through the centre.
  np.testing.assert_allclose(large[14, [19, 20]].mean(), 0.5 * 0.95, rtol=1e-5)
  np.testing.assert_array_equal(large[:5], 0)


def test_masked_keeps_pixels_and_grays_the_others():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 100, (8, 8, 3), np.uint8)
  map_hw = np.zeros((2, 2))
  map_hw[:, 0] = 1
  masked = draw.masked(image, map_hw)
  np.testing.assert_array_equal(masked[:, :4], image[:, :4])
  np.testing.assert_array_equal(masked[:, 4:], 128)


def test_overlay_and_heat_brighten_with_the_map():
  image = np.full((4, 4, 3), 100, np.uint8)
  map_hw = np.linspace(0, 1, 16).reshape(4, 4)
  for kind in (draw.overlay, draw.heat):
    brightness = kind(image, map_hw).astype(float).sum(-1).ravel()
    assert np.all(np.diff(brightness) > 0)


def test_a_file_has_the_pixels():
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (5, 7, 3), np.uint8)
  np.testing.assert_array_equal(draw.pixels(draw.png(image)), image)
