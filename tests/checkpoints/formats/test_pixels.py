"""The pixels of foreign checkpoints are those of the library that wrote them.

In levels from 0 to 255, over photographs of random shapes, given as arrays and
as JPEG files.
"""

import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from vit_jax.checkpoints.formats import image_configs, torchvision
from vit_jax.checkpoints.formats.json_config import JsonConfig
from vit_jax.data import decode
from vit_jax.data.transforms import EvalTransform

SIZE = (224, 224)
SQUARE = {'height': 224, 'width': 224}
LARGER = {'height': 256, 'width': 256}
# By name: the type of a model, its processor and what its file says.
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
  'ViT bilinear': ('vit', 'ViT', {'resample': 2}),
  'CLIP': ('clip', 'CLIP', {'size': {'shortest_edge': 224}}),
  'DINOv2': ('dinov2', 'Bit', {'size': {'shortest_edge': 256}}),
  'DINOv3': ('dinov3_vit', 'DINOv3ViT', {}),
  'DeiT': ('deit', 'DeiT', {'size': LARGER}),
  'ConvNeXt': (
    'vit',
    'ConvNext',
    {'size': {'shortest_edge': 224}, 'crop_pct': 0.9},
  ),
}
# crop_mode, crop_pct, interpolation.
TIMM = [
  ('center', 0.875, 'bilinear'),
  ('center', 0.9, 'bicubic'),
  ('center', 1.0, 'bicubic'),
  ('squash', 1.0, 'bicubic'),
  ('squash', 0.9, 'bilinear'),
]


def photographs():
  """Yields pixels of random shapes: a photograph, continued by its mirror."""
  rng = np.random.default_rng(0)
  for _ in range(2):
    height, width = rng.integers(150, 1200, 2)
    tile = load_sample_image('china.jpg')
    tile = np.concatenate([tile, tile[:, ::-1]], 1)
    tile = np.concatenate([tile, tile[::-1], tile])
    top, left = (rng.integers(n) for n in (81, 80))
    yield np.ascontiguousarray(tile[top : top + height, left : left + width])


def compare(theirs, preprocessing, images=(), **limits):
  """Checks arrays and files; prints the mean and the largest difference."""
  transform = EvalTransform(SIZE, preprocessing)
  for kind in ('array', 'file'):
    differences = []
    for given in images or photographs():
      pixels = given
      if kind == 'file':
        file = io.BytesIO()
        Image.fromarray(given).save(file, 'JPEG', quality=92)
        given = file.getvalue()
        pixels = decode.decode(given, 'x')
      ours = transform.image(given, 'x')
      differences.append(np.abs(ours.astype(np.float64) - theirs(pixels)))
    mean, most = np.mean(differences), np.max(differences)
    print(f'{kind}: mean {mean:.4f}, largest {most:.2f}')
    assert mean < limits.get('mean', 0.02)
    assert most <= limits.get('most', 1) + 1e-3


@pytest.mark.parametrize('name', PROCESSORS)
def test_pixels_of_transformers(tmp_path, transformers, name):
  model_type, kind, values = PROCESSORS[name]
  values |= {'image_processor_type': f'{kind}ImageProcessor'}
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': model_type}))
  (tmp_path / image_configs.FILE).write_text(json.dumps(values))
  processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
  preprocessing, size, warnings = image_configs.of_hf(
    str(tmp_path), model_type, SIZE
  )
  assert (size, warnings) == (SIZE, ())

  def theirs(pixels):
    found = processor(pixels, return_tensors='pt').pixel_values[0]
    scaled = found.permute(1, 2, 0).double().numpy()
    return 255 * (scaled * processor.image_std + processor.image_mean)

  limits = {}
  if preprocessing.interpolation == 'bicubic':
    # PyTorch's weights have 16 bits: one pixel in a million differs by 2.
    limits = {'most': 2}
  if name == 'DINOv3':
    # Theirs are not rounded to the 8 bits that pixels have here.
    limits = {'mean': 0.26, 'most': 0.51}
  compare(theirs, preprocessing, **limits)


def pixels_of_timm(timm, mode, share, interpolation):
  """Returns our preprocessing and timm's pixels as a function of pixels."""
  values = {'crop_mode': mode, 'crop_pct': share, 'mean': [0.0] * 3}
  values |= {'std': [1.0] * 3, 'interpolation': interpolation}
  preprocessing = image_configs.of_timm(JsonConfig(values, 'x'), SIZE)
  transform = timm.data.create_transform(224, **values)

  def theirs(pixels):
    return 255 * transform(Image.fromarray(pixels)).permute(1, 2, 0).numpy()

  return preprocessing, theirs


@pytest.mark.parametrize(('mode', 'share', 'interpolation'), TIMM)
def test_pixels_of_timm(timm, mode, share, interpolation):
  preprocessing, theirs = pixels_of_timm(timm, mode, share, interpolation)
  # Of the same Pillow: not one pixel differs.
  compare(theirs, preprocessing, most=0)


def test_panoramas_are_resized_whole(timm):
  """A part of a panorama would be resized to sides of another scale."""
  preprocessing, theirs = pixels_of_timm(timm, 'center', 0.875, 'bicubic')
  panorama = load_sample_image('china.jpg')[200:242]  # 15 times as wide as high
  upright = np.ascontiguousarray(panorama.transpose(1, 0, 2))
  compare(theirs, preprocessing, [panorama, upright], most=0)


def test_pixels_of_torchvision(torch):
  presets = pytest.importorskip('torchvision.transforms._presets')
  transform = presets.ImageClassification(crop_size=224, antialias=True)

  def theirs(pixels):
    scaled = transform(Image.fromarray(pixels)).permute(1, 2, 0).numpy()
    return 255 * (scaled * transform.std + transform.mean)

  compare(theirs, torchvision.IMAGES, most=0)


def test_a_strip_takes_the_memory_of_its_middle():
  strip = np.zeros((2, 30_000, 3), np.uint8)
  strip[:, 15_000:] = 255
  preprocessing = dataclasses.replace(torchvision.IMAGES, resize_small=224)
  assert preprocessing.plan(strip.shape[:2], SIZE).part == (224, 32 * 224)
  image = EvalTransform(SIZE, preprocessing).image(strip, 'x')
  assert image[:, 0].max() == 0 and image[:, -1].min() == 255
