"""Figures as files."""

import io

import pytest
from PIL import Image

from vit_jax.training import plots


@pytest.mark.parametrize(
  ('given', 'size'),
  [({}, (200, 300)), ({'dots_per_inch': 110}, (220, 330))],
)
def test_a_picture_has_as_many_pixels_as_were_asked_for(given, size):
  """Inches times dots per inch; and no version of matplotlib in the file."""
  data = plots.png(plots.figure(2, 3), **given)
  with Image.open(io.BytesIO(data)) as image:
    assert (image.format, image.size) == ('PNG', size)
    assert 'Software' not in image.info
