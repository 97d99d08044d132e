"""timm's preprocessing of images, read and written."""

import dataclasses
import math

import numpy as np
import pytest
from PIL import Image

from tests.checkpoints.formats.timm_folder import TINY
from tests.checkpoints.random_weights import random_checkpoint, random_images
from vit_jax.checkpoints.formats import image_configs
from vit_jax.checkpoints.formats import timm as convert
from vit_jax.checkpoints.formats.json_config import JsonConfig
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.data.transforms import EvalTransform


def test_their_transform_gives_our_pixels(tmp_path, timm):
  """For an image that has the model's size already."""
  preprocessing = Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
  checkpoint = dataclasses.replace(
    random_checkpoint(None, (32, 32), **TINY), preprocessing=preprocessing
  )
  convert.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  model = timm.create_model(f'local-dir:{tmp_path / "x"}', pretrained=True)
  config = timm.data.resolve_data_config({}, model=model)
  (image,) = random_images((32, 32), 1)
  got = timm.data.create_transform(**config)(Image.fromarray(image))
  want = (image / 255 - preprocessing.mean) / preprocessing.std
  np.testing.assert_allclose(got.permute(1, 2, 0), want, rtol=0, atol=1e-6)


LIKE_TIMM = Preprocessing(resize_like='torchvision')


def test_every_resizing_comes_back():
  for side in range(8, 520, 7):
    for resize_small in (0, *range(side, side + 200, 3)):
      squash = resize_small > side and resize_small % 2 == 1
      preprocessing = dataclasses.replace(
        LIKE_TIMM, resize_small=resize_small, squash=squash
      )
      part, lines = image_configs.to_timm(preprocessing, (side, side))
      assert lines == []
      # As timm computes it.
      if resize_small:
        assert math.floor(side / part['crop_pct']) == resize_small
      pretrained = JsonConfig(part, '')
      back = image_configs.of_timm(pretrained, (side, side))
      assert (back, pretrained.warnings) == (preprocessing, [])
  # Of quotients that need no more digits it is as timm writes it.
  part, _ = image_configs.to_timm(Preprocessing(256), (224, 224))
  assert part['crop_pct'] == 0.875


def test_resizing_that_timm_does_otherwise_is_said():
  _, lines = image_configs.to_timm(Preprocessing(64), (32, 48))
  (line,) = lines
  assert line.startswith('Images are resized to a shorter side of 64 pixels')
  assert line.endswith('at least 2 times the crop.')


def images_of(**changes):
  pretrained = JsonConfig(changes, 'x.json')
  return image_configs.of_timm(pretrained, (224, 224)), pretrained.warnings


def test_what_a_configuration_leaves_out_is_timms_default():
  preprocessing, warnings = images_of(mean=None)
  assert preprocessing == Preprocessing(
    256,
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
    'bicubic',
    resize_like='torchvision',
  )
  assert warnings == []


def test_another_interpolation_is_warned_about():
  preprocessing, (warning,) = images_of(interpolation='lanczos')
  assert preprocessing.interpolation == 'bilinear'
  assert warning.startswith("x.json: interpolation is 'lanczos'")


@pytest.mark.parametrize(
  ('crop_pct', 'resize_small', 'how'),
  [
    (0.875, 0, 'resizes images as a whole'),
    (0.4, 80, 'to a shorter side of 80 pixels and crops them'),
  ],
)
def test_the_centre_is_taken_where_it_is_large_enough(
  crop_pct, resize_small, how
):
  pretrained = JsonConfig({'crop_pct': crop_pct}, 'x.json')
  preprocessing = image_configs.of_timm(pretrained, (32, 64))
  (warning,) = pretrained.warnings
  assert how in warning
  assert preprocessing.resize_small == resize_small
  # Which refuses a part that is larger than the whole.
  EvalTransform((32, 64), preprocessing)


@pytest.mark.edge
@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    # timm would pad images with black.
    ({'crop_pct': 1.1}, 'x.json: crop_pct is 1.1; it must be above 0'),
    ({'crop_mode': 'border'}, "x.json: crop_mode is 'border'; it must be"),
    # The sides of images would overflow.
    ({'crop_pct': 1e-3}, 'x.json: resize_small is 224000; it must'),
  ],
)
def test_impossible_images_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    images_of(**changes)
