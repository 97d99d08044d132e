import dataclasses
import itertools

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tests.conftest import ROOT
from vit_jax.data import host_augmentation, transforms
from vit_jax.data.host_augmentation import BIG_VISION, OPERATIONS

# Images by big_vision's own functions of TensorFlow 2.21, as NAME_MAGNITUDE or
# NAME_MAGNITUDE_negative; tensorflow_addons' three by the TensorFlow operation
# that they call.
GOLDEN = np.load(ROOT / 'tests/golden/randaugment_big_vision.npz')


@pytest.fixture
def pixels():
  """Of a photograph's smoothness, and neither square nor symmetric."""
  rng = np.random.default_rng(0)
  small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
  return np.array(small.resize((40, 30), Image.Resampling.BICUBIC))


class Direction:
  """In place of a generator: the direction and nothing else."""

  def __init__(self, negative):
    self._negative = negative

  def random(self):
    return 0.0 if self._negative else 1.0


@pytest.fixture(scope='module')
def torchvision(torch):
  del torch
  return pytest.importorskip('torchvision.transforms.autoaugment')


@pytest.mark.parametrize(
  ('name', 'negative'),
  [*((name, False) for name in OPERATIONS), ('ShearX', True), ('Color', True)],
)
def test_operations_equal_torchvisions(torchvision, pixels, name, negative):
  """Pixel by pixel, at the values that its own table has of the ranges."""
  operation = OPERATIONS[name]
  image = Image.fromarray(pixels)
  height, width, _ = pixels.shape
  theirs = torchvision.AutoAugment()._augmentation_space(11, (height, width))
  value, signed = 0.0, False
  if name != 'Identity':
    values, signed = theirs[name]
    value = round(float(values[7]), 6) if values.ndim else 0.0
  if name == 'Solarize':  # which ends at 255, where white is left as it is
    value = 256 - round(25.6 * 7)
  assert signed == operation.signed
  want = torchvision._apply_op(
    image,
    name,
    -value if negative and signed else value,
    torchvision.InterpolationMode.BILINEAR,
    [128, 128, 128],
  )
  got = operation(image, 7, Direction(negative))
  apart = np.abs(np.array(got, int) - np.array(want, int))
  # It computes a shear through the angle, and pixels fall on either side of a
  # half.
  assert apart.max() <= name.startswith('Shear')
  assert np.mean(apart > 0) < 0.01
  if operation.end:
    assert not np.array_equal(np.array(got), pixels)
    unchanged = operation(image, 0, Direction(negative))
    np.testing.assert_array_equal(np.array(unchanged), pixels)


@pytest.mark.parametrize('key', [key for key in GOLDEN.files if '_' in key])
def test_operations_equal_big_visions(key):
  name, magnitude, *negative = key.split('_')
  got = BIG_VISION[name](
    Image.fromarray(GOLDEN['image']), float(magnitude), Direction(negative)
  )
  apart = np.abs(np.array(got, int) - GOLDEN[key].astype(int))
  # Pillow rounds greys and smoothed pixels, which TensorFlow cuts off.
  assert apart.max() <= (name in ('Color', 'Sharpness'))


def test_cutout_is_a_square_around_any_pixel():
  white = Image.fromarray(np.full((100, 120, 3), 255, np.uint8))
  rng, tops = np.random.default_rng(0), []
  for _ in range(300):
    grey = np.array(BIG_VISION['Cutout'](white, 5, rng))[..., 0] == 128
    y, x = np.nonzero(grey)
    inside = np.ix_(*(np.arange(v.min(), v.max() + 1) for v in (y, x)))
    assert grey[inside].all()
    # Half of the side is 20 pixels, as far as they are in the image.
    for v, side in ((y, 100), (x, 120)):
      assert 20 <= np.ptp(v) + 1 <= 40
      if 0 < v.min() and v.max() < side - 1:
        assert np.ptp(v) + 1 == 40
    tops.append(y.max() - 19)
  assert min(tops) < 10 and max(tops) > 78
  for magnitude in (0, -1):
    unchanged = BIG_VISION['Cutout'](white, magnitude, rng)
    assert np.array(unchanged).min() == 255


@pytest.mark.parametrize('whose', ['torchvision', 'big_vision'])
def test_rand_augment_draws_all_operations_alike(pixels, monkeypatch, whose):
  operations = {'torchvision': OPERATIONS, 'big_vision': BIG_VISION}[whose]
  drawn, magnitudes = [], []

  def note(name):
    def apply(self, image, magnitude, rng):
      drawn.append(name)
      magnitudes.append(magnitude)
      return image

    return apply

  for name in operations:
    recorder = type(name, (), {'__call__': note(name)})()
    monkeypatch.setitem(operations, name, recorder)
  rng = np.random.default_rng(0)
  augment = host_augmentation.RandAugment(2, 5, 0.5, whose)
  for _ in range(2000):
    np.testing.assert_array_equal(augment(pixels, rng), pixels)
  assert len(drawn) == 4000
  names, counts = np.unique(drawn, return_counts=True)
  assert set(names) == set(operations)
  # A binomial of 4,000 draws with 1/14 each, or 1/16: a deviation of 16.
  assert np.all(np.abs(counts - 4000 / len(operations)) < 5 * 16.3)
  assert abs(np.mean(magnitudes) - 5) < 0.05
  assert abs(np.std(magnitudes) - 0.5) < 0.05


def test_either_direction_is_as_likely(pixels):
  image, rng = Image.fromarray(pixels), np.random.default_rng(0)
  values = []
  operation = host_augmentation.Operation(lambda _, v: values.append(v), 8.0)
  for _ in range(400):
    operation(image, 5, rng)
  assert set(values) == {-4.0, 4.0}
  # A binomial of 400 draws: 200 and a deviation of 10.
  assert abs(values.count(4.0) - 200) < 50
  values.clear()
  one_way = dataclasses.replace(operation, signed=False)
  for _ in range(20):
    one_way(image, 2.5, rng)
  assert set(values) == {2.0}


def test_colours_are_jittered_in_any_order_and_as_far_as_is_said(
  pixels, monkeypatch
):
  found = []

  def recorder(name):
    def record(image, value):
      found.append((name, value))
      return image

    return host_augmentation.Operation(record)

  names = ('Brightness', 'Contrast', 'Color')
  recording = {name: recorder(name) for name in names}
  monkeypatch.setattr(host_augmentation, 'OPERATIONS', recording)
  radii = []

  def blur(radius):
    radii.append(radius)
    return ImageFilter.BoxBlur(0)

  monkeypatch.setattr(host_augmentation.ImageFilter, 'GaussianBlur', blur)
  rng = np.random.default_rng(0)
  for _ in range(300):
    host_augmentation.ThreeAugment(0.4)(pixels[:1, :1], rng)
  orders = {
    tuple(name for name, _ in found[i : i + 3]) for i in range(0, 900, 3)
  }
  assert orders == set(itertools.permutations(names))
  for name in names:
    values = np.array([value for n, value in found if n == name])
    # Uniform: the ends of 300 draws are within 5 %, but for 1 in 10^3.
    assert -0.4 <= values.min() < -0.36 and 0.36 < values.max() <= 0.4
    assert abs(values.mean()) < 5 * 0.4 / np.sqrt(3 * 300)
  assert 0.1 <= min(radii) < 0.3 and 1.8 < max(radii) <= 2


def test_magnitudes_stay_in_their_range(pixels):
  image = Image.fromarray(pixels)
  rotate = OPERATIONS['Rotate']
  for far, end in ((12, 10), (-1, 0)):
    got, want = (rotate(image, m, Direction(False)) for m in (far, end))
    np.testing.assert_array_equal(np.array(got), np.array(want))


def test_three_augment_is_grey_solarized_or_blurred(pixels):
  augment = host_augmentation.ThreeAugment(0.0)
  grey = np.array(Image.fromarray(pixels).convert('L'))[..., None]
  solarized = np.where(pixels < 128, pixels, 255 - pixels)
  rng = np.random.default_rng(0)
  kinds = []
  for _ in range(300):
    got = augment(pixels, rng)
    if np.array_equal(got, np.broadcast_to(grey, got.shape)):
      kinds.append('grey')
    elif np.array_equal(got, solarized):
      kinds.append('solarized')
    else:  # blurred: the same mean, and less change from pixel to pixel
      assert abs(got.mean() - pixels.mean()) < 2
      rough = [
        np.abs(np.diff(x.astype(int), axis=1)).mean() for x in (got, pixels)
      ]
      assert rough[0] <= rough[1]  # equal at the smallest radius
      kinds.append('blurred')
  _, counts = np.unique(kinds, return_counts=True)
  assert len(counts) == 3
  assert np.all(np.abs(counts - 100) < 5 * 8.2)
  jittered = host_augmentation.ThreeAugment(0.5)(
    pixels, np.random.default_rng(1)
  )
  assert not np.array_equal(jittered, augment(pixels, np.random.default_rng(1)))


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('', None),
    ('randaugment', host_augmentation.RandAugment(2, 9)),
    ('3augment(0.2)', host_augmentation.ThreeAugment(0.2)),
    (' randaugment( 1 ,0, ) ', host_augmentation.RandAugment(1, 0)),
    (
      'randaugment(1, 10, 0.5, as = big_vision )',
      host_augmentation.RandAugment(1, 10, 0.5, 'big_vision'),
    ),
  ],
)
def test_texts_of_configs(text, want):
  assert host_augmentation.parse(text) == want


@pytest.mark.parametrize(
  'text',
  [
    'randaugment(2, 9',
    'randaugment(1, 2, 3, 4)',
    'randaugment(0)',
    'randaugment(2, 11)',
    'randaugment(2, 9, -1)',
    'randaugment(2, 9, as=timm)',
    'autoaugment',
    '3augment(2)',
  ],
)
def test_other_texts_are_refused(text):
  with pytest.raises(ValueError) as e:
    host_augmentation.parse(text)
  assert str(e.value).startswith(f'data.augment is {text!r}: use randaugment')


def test_they_follow_the_crop_and_the_generator(pixels):
  plain = transforms.TrainTransform((24, 16))
  augmentation = host_augmentation.parse('randaugment')
  varied = dataclasses.replace(plain, augmentation=augmentation)
  record = {'image': pixels, 'name': 'x', 'label': 3}
  seen = set()
  for seed in range(10):
    rng = np.random.default_rng(seed)
    cropped = plain(record, rng)['image']
    want = augmentation(cropped, rng)
    got = varied(record, np.random.default_rng(seed))
    np.testing.assert_array_equal(got['image'], want)
    assert got['label'] == 3
    assert (want.shape, want.dtype) == ((24, 16, 3), np.uint8)
    seen.add(want.tobytes())
  assert len(seen) == 10
