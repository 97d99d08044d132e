"""OpenCV's resizing without OpenCV."""

import numpy as np
import pytest

from tests.tools.serve.pictures_to_send import pixels
from vit_jax.data import transforms
from vit_jax.tools.serve import resizing


@pytest.mark.parametrize('seed', range(3))
def test_it_gives_the_pixels_of_opencv(seed):
  rng = np.random.default_rng(seed)
  for case in range(40):
    h, w, H, W = (int(n) for n in rng.integers(1, (90, 90, 300, 300)))
    if case % 5 == 0:  # sums of whole pixels
      H, W = h * int(rng.integers(1, 7)), w * int(rng.integers(1, 7))
    if case % 20 == 1:  # averaged over 2 x 2, which alone rounds halves up
      H, W = 4 * h, 4 * w
    image = pixels(H, W, seed=case)
    got = resizing.resize(image, (h, w))
    want = transforms.resize(image, (h, w))
    assert got.dtype == np.uint8 and got.shape == want.shape
    # Means of areas are float32, which another CPU may round to another side.
    away = np.abs(got.astype(int) - want)
    assert away.max() <= 1 and (away > 0).mean() < 1e-3, (H, W, h, w)
