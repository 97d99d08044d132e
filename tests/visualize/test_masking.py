"""What hiding pixels leaves of the accuracy."""

import collections
import dataclasses

import numpy as np
import pytest

from tests.checkpoints.random_weights import logits_of, random_checkpoint
from tests.checkpoints.random_weights import random_images as pixels
from tests.test_digits import final_metrics
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import table
from vit_jax.data import sources
from vit_jax.visualize import masking

SIZE = (16, 24)


@dataclasses.dataclass
class Images:
  """Eleven images of three classes."""

  class_names: tuple = ('class 0', 'class 1', 'class 2')

  def __len__(self):
    return 11

  def __getitem__(self, i):
    image = pixels(SIZE, 1, seed=i)[0]
    return {'image': image, 'label': i % 3, 'name': f'{i}'}


@pytest.fixture(scope='module')
def checkpoint():
  fields = dict(patch_size=8, width=16, depth=2, mlp_dim=24, heads=2)
  made = random_checkpoint(None, SIZE, num_classes=3, **fields)
  return dataclasses.replace(
    made, preprocessing=table.Preprocessing(mean=(0.2, 0.4, 0.6))
  )


def test_hidden_are_the_highest_pixels():
  image = pixels(SIZE, 1)[0]
  map_HW = np.arange(16 * 24).reshape(16, 24)
  got = masking.hide(image, map_HW, 0.25, (0.2, 0.4, 0.6))
  np.testing.assert_array_equal(got[:12], image[:12])
  np.testing.assert_array_equal(got[12:], np.full((4, 24, 3), (51, 102, 153)))


@pytest.mark.parametrize('share', [0.0, 1.0])
def test_nothing_and_everything_hidden(share, checkpoint):
  """Without a pixel left, all is labelled as a gray image is."""
  subject, labels = masking.of_source(checkpoint, Images(), '')
  np.testing.assert_array_equal(labels, np.arange(11) % 3)
  found = masking.rights(subject, labels, share)
  assert [*found] == [
    *('none', 'highest', 'lowest', 'class', 'patches', 'pixels')
  ]
  seen = np.stack([Images()[i]['image'] for i in range(11)])
  as_they_are = logits_of(checkpoint, seen).argmax(-1) == labels
  np.testing.assert_array_equal(found.pop('none'), as_they_are)
  gray = np.full((11, *SIZE, 3), (51, 102, 153), np.uint8)
  want = as_they_are
  if share:
    want = logits_of(checkpoint, gray).argmax(-1) == labels
  for right in found.values():
    np.testing.assert_array_equal(right, want)


@pytest.mark.slow
def test_a_trained_model_misses_what_its_maps_point_at(tmp_path):
  """Digits: what is hidden at random leaves more to recognise them by.

  The mean of three models: of one, rounding moves these shares by ten points.
  """
  share = collections.Counter()
  for seed in range(3):
    workdir = tmp_path / str(seed)
    final_metrics(
      workdir,
      'configs/digits.py',
      '--config.model.width=48',
      '--config.model.depth=2',
      '--config.model.mlp_dim=96',
      '--config.model.heads=3',
      '--config.total=15 epochs',
      '--config.eval_every=100%',
      f'--config.seed={seed}',
    )
    section = masking.section(
      opening.open_checkpoint(str(workdir)),
      sources.open_source('digits', 'test'),
    )
    print(section.text)
    for kind, x in section.arrays.items():
      share[kind] += 100 * x.mean() / 3
  # Two standard deviations of a difference of two shares of 360 are 7.
  for of_rollout in ('highest', 'class'):
    for at_random in ('patches', 'pixels'):
      assert share[of_rollout] < share[at_random] - 3
    assert share[of_rollout] < share['lowest'] - 10


def test_other_classes_are_refused(checkpoint):
  with pytest.raises(ValueError, match='does not know'):
    masking.of_source(checkpoint, Images(('a', 'b', 'c')), '')


def test_what_stands_for_hidden_pixels_is_rounded():
  image = np.zeros((1, 2, 3), np.uint8)
  got = masking.hide(image, np.array([[0, 1]]), 0.5, (0.499, 0.501, 1))
  assert got.dtype == np.uint8
  np.testing.assert_array_equal(got, [[[0, 0, 0], [127, 128, 255]]])
