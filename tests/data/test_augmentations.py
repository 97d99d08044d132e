import dataclasses

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import augmentations, transforms
from vit_jax.data.augmentations import OPERATIONS


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


@pytest.mark.parametrize('negative', [False, True])
@pytest.mark.parametrize('magnitude', [0, 3, 7, 10])
@pytest.mark.parametrize('name', OPERATIONS)
def test_operations_equal_torchvisions(
  torchvision, pixels, name, magnitude, negative
):
  """Pixel by pixel, at the values that its own table has of the ranges."""
  operation = OPERATIONS[name]
  image = Image.fromarray(pixels)
  height, width, _ = pixels.shape
  theirs = torchvision.AutoAugment()._augmentation_space(11, (height, width))
  value, signed = 0.0, False
  if name != 'Identity':
    values, signed = theirs[name]
    value = round(float(values[magnitude]), 6) if values.ndim else 0.0
  if name == 'Solarize':  # which ends at 255, where white is left as it is
    value = 256 - round(25.6 * magnitude)
  assert signed == operation.signed
  want = torchvision._apply_op(
    image,
    name,
    -value if negative and signed else value,
    torchvision.InterpolationMode.BILINEAR,
    [128, 128, 128],
  )
  got = operation(image, magnitude, Direction(negative))
  apart = np.abs(np.array(got, int) - np.array(want, int))
  # It computes a shear through the angle, and pixels fall on either side of a
  # half.
  assert apart.max() <= name.startswith('Shear')
  assert np.mean(apart > 0) < 0.01
  if operation.end:
    assert np.array_equal(np.array(got), pixels) == (magnitude == 0)


@pytest.mark.parametrize('policy', ['imagenet', 'cifar10'])
def test_policies_are_torchvisions(torchvision, policy):
  theirs = torchvision.AutoAugment(
    torchvision.AutoAugmentPolicy(policy)
  ).policies
  assert augmentations.AutoAugment(policy).pairs() == [
    [(name, probability, magnitude or 0) for name, probability, magnitude in x]
    for x in theirs
  ]


def test_rand_augment_draws_all_operations_alike(pixels, monkeypatch):
  drawn, magnitudes = [], []

  def note(name):
    def apply(self, image, magnitude, rng):
      drawn.append(name)
      magnitudes.append(magnitude)
      return image

    return apply

  recording = {
    name: type(name, (), {'__call__': note(name)})() for name in OPERATIONS
  }
  monkeypatch.setattr(augmentations, 'OPERATIONS', recording)
  rng = np.random.default_rng(0)
  augment = augmentations.RandAugment(2, 5, 0.5)
  for _ in range(2000):
    np.testing.assert_array_equal(augment(pixels, rng), pixels)
  assert len(drawn) == 4000
  names, counts = np.unique(drawn, return_counts=True)
  assert set(names) == set(OPERATIONS) - {'Invert'}
  # A binomial of 4,000 draws with 1/14 each: 286 and a deviation of 16.
  assert np.all(np.abs(counts - 4000 / 14) < 5 * 16.3)
  assert abs(np.mean(magnitudes) - 5) < 0.05
  assert abs(np.std(magnitudes) - 0.5) < 0.05


def test_magnitudes_stay_in_their_range(pixels):
  image = Image.fromarray(pixels)
  rotate = OPERATIONS['Rotate']
  for far, end in ((12, 10), (-1, 0)):
    got, want = (rotate(image, m, Direction(False)) for m in (far, end))
    np.testing.assert_array_equal(np.array(got), np.array(want))


def test_three_augment_is_grey_solarized_or_blurred(pixels):
  augment = augmentations.ThreeAugment(0.0)
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
  jittered = augmentations.ThreeAugment(0.5)(pixels, np.random.default_rng(1))
  assert not np.array_equal(jittered, augment(pixels, np.random.default_rng(1)))


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('', None),
    ('randaugment', augmentations.RandAugment(2, 9)),
    ('randaugment(3, 7.5, 0.5)', augmentations.RandAugment(3, 7.5, 0.5)),
    ('autoaugment', augmentations.AutoAugment('imagenet')),
    ('autoaugment(cifar10)', augmentations.AutoAugment('cifar10')),
    ('3augment(0.2)', augmentations.ThreeAugment(0.2)),
  ],
)
def test_texts_of_configs(text, want):
  assert augmentations.parse(text) == want


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('rand', r"data\.augment is 'rand': write randaugment\(2, 9\)"),
    ('randaugment(2, 9', 'write randaugment'),
    ('randaugment(a)', 'write randaugment'),
    ('randaugment(1, 2, 3, 4)', 'write randaugment'),
    ('randaugment(0)', 'at least 1 operation'),
    ('randaugment(2, 11)', 'from 0 to 10'),
    ('randaugment(2, 9, -1)', 'not below 0'),
    ('autoaugment(svhn)', 'policies are cifar10 and imagenet'),
    ('3augment(2)', 'a share from 0 to 1'),
  ],
)
def test_texts_that_name_none(text, message):
  with pytest.raises(ValueError, match=message):
    augmentations.parse(text)


@pytest.mark.parametrize('text', ['randaugment', 'autoaugment', '3augment'])
def test_they_follow_the_crop_and_the_generator(pixels, text):
  plain = transforms.TrainTransform((24, 16))
  augmentation = augmentations.parse(text)
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
