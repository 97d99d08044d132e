"""Image processors of transformers, read and written."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.checkpoints import hf_peer
from tests.checkpoints.formats.hf_folder import SIZE, TINY
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints.formats import hf, image_configs
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.data.transforms import EvalTransform


def test_their_processor_gives_our_pixels(tmp_path, transformers):
  checkpoint = dataclasses.replace(
    random_checkpoint(None, SIZE, **TINY),
    preprocessing=Preprocessing(resize_small=32),
  )
  hf.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'x')
  (image,) = random_images(SIZE, count=1)
  got = processor(image, return_tensors='pt').pixel_values
  want = (image.astype(np.float32) - 127.5) / 127.5
  np.testing.assert_array_equal(got[0].permute(1, 2, 0), want)
  # Their processor gives a grey image three channels.
  grey = Image.fromarray(image[..., 0])
  got = processor(grey, return_tensors='pt').pixel_values
  np.testing.assert_array_equal(got[0, 2], want[..., 0])


@pytest.mark.parametrize(
  ('resize_small', 'interpolation', 'squash', 'size'),
  [
    (0, 'bilinear', False, SIZE),
    (40, 'bicubic', False, SIZE),
    (40, 'bicubic', True, (32, 64)),
  ],
)
def test_their_processor_resizes_as_ours(
  tmp_path, transformers, resize_small, interpolation, squash, size
):
  """Within two levels: Pillow, torchvision and OpenCV round differently."""
  checkpoint = dataclasses.replace(
    random_checkpoint(None, size, **TINY),
    preprocessing=Preprocessing(
      resize_small=resize_small, interpolation=interpolation, squash=squash
    ),
  )
  hf.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'x')
  y, x = np.mgrid[:80, :112]
  waves = np.stack([np.sin(y / 15), np.cos(x / 15), np.sin((x - y) / 20)], -1)
  image = np.uint8(127.5 + 127.5 * waves)
  got = processor(image, return_tensors='pt').pixel_values
  want = EvalTransform(size, checkpoint.preprocessing).image(image, 'x')
  levels = got[0].permute(1, 2, 0).numpy() * 127.5 + 127.5
  assert np.abs(levels - want).max() < 2.5


IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
SQUASH = {
  'image_processor_type': 'ViTImageProcessor',
  'size': {'height': 32, 'width': 32},
}
CROP = {
  'image_processor_type': 'BitImageProcessor',
  'size': {'shortest_edge': 40},
  'crop_size': {'height': 32, 'width': 32},
  'image_mean': IMAGENET[0],
  'image_std': IMAGENET[1],
}
CROPPED = Preprocessing(
  40, tuple(IMAGENET[0]), tuple(IMAGENET[1]), interpolation='bicubic'
)
# What a file says, what is read, and words of the warning.
PROCESSORS = {
  'defaults': (SQUASH, Preprocessing(), ''),
  'crop': (CROP, CROPPED, ''),
  'crop of what is not resized': (
    CROP | {'do_resize': False},
    dataclasses.replace(CROPPED, resize_small=0),
    'do_resize is False',
  ),
  'not normalised': (
    SQUASH | {'do_normalize': False},
    Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3),
    '',
  ),
  'padded': (
    SQUASH | {'do_pad': True, 'pad_size': {'height': 40, 'width': 40}},
    Preprocessing(),
    'do_pad is True; vit_jax does not pad',
  ),
  'nearest': (SQUASH | {'resample': 0}, Preprocessing(), 'resample is 0'),
  'squashed and cropped': (
    {'image_processor_type': 'DeiTImageProcessor', 'size': 40, 'crop_size': 32},
    Preprocessing(40, interpolation='bicubic', squash=True),
    '',
  ),
  'a share': (
    {'image_processor_type': 'ConvNextImageProcessor', 'crop_pct': 0.8}
    | {'size': {'shortest_edge': 32}},
    Preprocessing(40, interpolation='bicubic'),
    '',
  ),
  'not cropped': (
    CROP | {'do_center_crop': False, 'size': {'shortest_edge': 32}},
    dataclasses.replace(CROPPED, resize_small=0),
    'the crop is None',
  ),
  'other size': (
    CROP | {'crop_size': 24},
    dataclasses.replace(CROPPED, resize_small=0),
    'images have .24, 24. pixels, but the model takes .32, 32.',
  ),
  'unknown class': (
    SQUASH | {'image_processor_type': 'SwinImageProcessor'},
    Preprocessing(),
    'SwinImageProcessor',
  ),
}


@pytest.mark.parametrize('kind', PROCESSORS)
def test_image_processors(folder, caplog, kind):
  stated, want, words = PROCESSORS[kind]
  (folder.path / image_configs.FILE).write_text(json.dumps(stated))
  checkpoint = folder.open()
  assert checkpoint.image_size == SIZE
  got = checkpoint.preprocessing
  assert got.resize_small == want.resize_small
  assert got.interpolation == want.interpolation
  assert got.squash == want.squash
  assert got.resize_like == 'transformers'
  np.testing.assert_allclose(got.mean, want.mean, rtol=1e-12)
  np.testing.assert_allclose(got.std, want.std, rtol=1e-12)
  assert len(caplog.messages) == bool(words)
  if words:
    assert re.search(words, caplog.text)


@pytest.mark.parametrize('kind', ['crop', 'not normalised'])
@pytest.mark.usefixtures('transformers')
def test_image_processors_scale_as_theirs(folder, kind):
  stated = PROCESSORS[kind][0]
  stated = {'image_processor_type': 'ViTImageProcessor'} | stated
  (folder.path / image_configs.FILE).write_text(json.dumps(stated))
  images = random_images(SIZE)
  want = hf_peer.open_peer(str(folder.path)).run(images)
  got = logits_of(folder.open(), images)
  # Sums of float32 in another order.
  assert relative_difference(got, want) < 1e-5


def read(folder, model_type, **stated):
  (folder / image_configs.FILE).write_text(json.dumps(stated))
  return image_configs.of_hf(str(folder), model_type, None)


def test_a_crop_that_is_wider_than_what_is_resized_is_none(tmp_path):
  crop = {'height': 64, 'width': 96}
  for edge, resize_small, warnings in ((96, 96, 0), (95, 0, 1)):
    preprocessing, size, found = read(
      tmp_path, 'bit', size={'shortest_edge': edge}, crop_size=crop
    )
    assert (size, preprocessing.resize_small) == ((64, 96), resize_small)
    assert len(found) == warnings


@pytest.mark.parametrize(
  'model_type',
  [
    *('vit', 'ijepa', 'deit', 'bit', 'dinov2', 'dinov3_vit', 'clip', 'siglip'),
    'siglip2',
    'imagegpt',
  ],
)
def test_what_a_processor_does_not_say_is_its_default(
  tmp_path, transformers, model_type
):
  """The default of the processor that transformers has for the model type."""
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': model_type}))
  (tmp_path / image_configs.FILE).write_text('{}')
  theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)
  found, size, warnings = read(tmp_path, model_type)
  assert found.interpolation == {2: 'bilinear', 3: 'bicubic'}[theirs.resample]
  if model_type != 'imagegpt':
    assert (found.mean, found.std) == (
      tuple(theirs.image_mean),
      tuple(theirs.image_std),
    )
  assert theirs.do_resize and theirs.do_normalize and theirs.do_rescale
  assert theirs.rescale_factor == 1 / 255
  if model_type == 'siglip2':
    return  # Its images have any size.
  crops = bool(theirs.do_center_crop)
  makes = theirs.crop_size if crops else theirs.size
  assert size == (makes['height'], makes['width'])
  edge = theirs.size.get('shortest_edge') or theirs.size['height']
  assert found.resize_small == (edge if crops else 0)
  assert found.squash == (model_type == 'deit')
  assert not warnings


def test_without_a_processor_images_are_those_of_the_paper(
  folder, bit_folder, caplog
):
  (folder.path / image_configs.FILE).unlink()
  (bit_folder.path / image_configs.FILE).unlink()
  want = Preprocessing(resize_like='transformers')
  assert folder.open().preprocessing == want
  assert not caplog.messages
  assert bit_folder.open().image_size == (224, 224)
  assert 'vit_jax assumes 224x224 pixels' in caplog.text


@pytest.mark.edge
@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'size': 'large'}, "size is 'large'"),
    ({'image_std': [0.5, 0.5, 0]}, 'std is .* at least 1e-6'),
    ({'do_rescale': False}, 'do_rescale is False'),
  ],
)
def test_processors_that_make_no_sense_are_refused(folder, change, words):
  folder.change_config(image_configs.FILE, **change)
  with pytest.raises(ValueError, match=words) as e:
    folder.open()
  assert image_configs.FILE in str(e.value)
