"""The student's loss from its formula, and the labels that it learns."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy import special

from tests.objectives import test_every
from vit_jax.checkpoints import opening
from vit_jax.data import sources
from vit_jax.experiment import CheckedConfig
from vit_jax.projects.few_labels import pseudo_labels as soft_labels
from vit_jax.training import sharding

NAMES = tuple(map(str, range(10)))


def objective_of(**changes):
  return test_every.experiment_of('pseudo_labels', **changes).objective


def kept_in(path, teacher, source, images, names, split_seed=0):
  name, _, split = images.partition(' ')
  data = ConfigDict(
    {'name': name, 'split': split, 'split_seed': split_seed, 'workers': 0}
  )
  return soft_labels.kept(path, teacher, source, data, names)


@pytest.mark.slow
def test_the_loss_is_that_of_the_formula():
  """The labels are smoothed, what the teacher says is not."""
  objective = objective_of(**{'loss.label_smoothing': 0.1})
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32),
    test_every.experiment_of('pseudo_labels').new_params(),
  )
  raw = {
    'image': rng.integers(0, 256, (3, 16, 16, 3), np.uint8),
    'label': rng.integers(0, 10, 3, np.int32),
    'unlabelled': rng.integers(0, 256, (3, 2, 16, 16, 3), np.uint8),
    'soft': rng.dirichlet(np.ones(10), (3, 2)).astype(np.float32),
  }
  apply = jax.jit(objective.model.apply)
  losses, hits = [], []
  for b in range(3):
    images = [raw['image'][b], *raw['unlabelled'][b]]
    labels = [0.9 * np.eye(10)[raw['label'][b]] + 0.01, *raw['soft'][b]]
    for image, label in zip(images, labels, strict=True):
      logits, _ = apply(
        {'params': params}, (image[None] - 127.5) / np.float32(127.5)
      )
      told = special.log_softmax(np.asarray(logits[0], np.float64))
      losses.append(-np.sum(label * told))
      hits.append(told.argmax() == label.argmax())
  batch = objective.augment(raw, jax.random.key(1))
  loss, metrics = test_every.loss_of(objective, params, batch)
  losses, hits = (np.reshape(x, (3, 3)) for x in (losses, hits))
  np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)
  np.testing.assert_allclose(
    metrics['pseudo_loss'], losses[:, 1:].mean(), rtol=1e-5
  )
  assert metrics['accuracy'] == np.float32(hits[:, 0].mean())
  assert metrics['agreement'] == np.float32(hits[:, 1:].mean())


@pytest.mark.parametrize('name', ['mixup', 'cutmix'])
def test_both_kinds_of_images_are_mixed_as_their_labels_are(name):
  """As white as an image is, so much of its label is class 0."""
  rng = np.random.default_rng(0)
  white = rng.integers(0, 256, (4, 2, 1, 1, 1), np.uint8)
  raw = {
    'image': np.zeros((4, 16, 16, 3), np.uint8),
    'label': np.array([0, 1, 1, 0]),
    'unlabelled': np.broadcast_to(white, (4, 2, 16, 16, 3)),
    'soft': np.zeros((4, 2, 10), np.float32),
  }
  raw['image'][raw['label'] == 0] = 255
  raw['soft'][..., 0] = white[..., 0, 0, 0] / 255
  objective = dataclasses.replace(objective_of(), **{name: 1.0})
  mixed = objective.augment(raw, jax.random.key(2))
  images = (np.asarray(mixed['image']) + 1) / 2
  assert images.shape == (4, 3, 16, 16, 3)
  np.testing.assert_allclose(
    images.mean((2, 3, 4)), mixed['label'][..., 0], atol=1e-5
  )
  # The teacher has seen the images unmixed.
  np.testing.assert_array_equal(mixed['taught'], raw['soft'].argmax(-1))
  plain = objective_of().augment(raw, jax.random.key(2))
  assert np.abs(mixed['label'] - plain['label']).max() > 0.1
  spread = np.ptp(images, axis=(2, 3, 4)).max()
  assert (spread > 0.1) == (name == 'cutmix')


def test_classes_are_balanced_by_the_surest():
  probabilities = np.array(
    [
      [0.9, 0.1, 0.0, 0.0],
      [0.4, 0.3, 0.3, 0.0],
      [0.2, 0.7, 0.1, 0.0],  # the only one of its class
      [0.6, 0.4, 0.0, 0.0],
      [0.3, 0.3, 0.35, 0.05],  # not sure enough
    ]
  )
  found = soft_labels.balanced(probabilities, 0.4, 0)
  assert found.tolist() == [0, 3, 1, 2, 2, 2]
  assert soft_labels.balanced(probabilities, 0.4, 2).tolist() == [0, 3, 2, 2]
  assert soft_labels.balanced(probabilities, 0.6, 4).tolist() == (
    [0, 3, 0, 3, 2, 2, 2, 2]
  )
  with pytest.raises(ValueError, match=r'threshold is 0.95, .* is 0.900'):
    soft_labels.balanced(probabilities, 0.95, 0)


def test_images_as_sure_as_others_keep_their_order():
  """Of two hundred, every second one a bit surer, and all of one class."""
  top_N = 0.75 + 0.125 * (np.arange(200) % 2)
  probabilities = np.stack([top_N, 1 - top_N], axis=1)
  found = soft_labels.balanced(probabilities, 0.5, 0)
  assert found.tolist() == [*range(1, 200, 2), *range(0, 200, 2)]


def test_the_file_has_what_the_teacher_says_of_each_image(
  tmp_path, monkeypatch
):
  """Of more images than are in a batch; and is read where it is there.

  The devices of a TPU's hosts are not in the order of the processes.
  """
  global_batch = sharding.global_batch
  monkeypatch.setattr(
    sharding,
    'global_batch',
    lambda batch, mesh: global_batch(
      {k: np.ascontiguousarray(x[::-1]) for k, x in batch.items()}, mesh
    ),
  )
  teacher = opening.open_checkpoint(test_every.teacher())
  source = sources.open_source('digits', 'train[:300]')
  path = str(tmp_path / 'new/folder/labels.npz')
  given = source, 'digits train[:300]', NAMES
  made = kept_in(path, teacher, *given)
  transform = teacher.transform()
  images = np.stack([transform(source[i])['image'] for i in range(300)])
  want = special.softmax(np.asarray(teacher.logits(images), np.float64), -1)
  assert made.dtype == np.float32
  np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-7)
  assert np.array_equal(kept_in(path, None, *given), made)
  others = sources.open_source('digits', 'train[:299]'), *given[1:]
  with pytest.raises(ValueError, match=r'of shape .300, 10. for digits train'):
    kept_in(path, None, *others)
  with pytest.raises(
    ValueError, match='images of other train .*different images'
  ):
    kept_in(path, None, source, 'other train', NAMES)
  with pytest.raises(ValueError, match='different split_seed.. Remo'):
    kept_in(path, None, *given, split_seed=1)
  other = dataclasses.replace(
    teacher, params=jax.tree.map(lambda x: 2 * x, teacher.params)
  )
  with pytest.raises(ValueError, match='different teacher.. Remove'):
    kept_in(path, other, *given)
  assert np.array_equal(kept_in(path, teacher, *given), made)


def test_each_class_has_as_many_images_as_are_asked_for(monkeypatch, caplog):
  caplog.set_level('INFO')
  objective = objective_of(
    **{'objective.images_a_class': 4, 'objective.unlabelled': 'train[:99]'}
  )
  labels = np.eye(10, dtype=np.float32)[np.arange(99) % 10]
  monkeypatch.setattr(soft_labels, 'kept', lambda *args: labels)
  objective.train_transform()
  assert 'soft labels of 40 of 99 images, in 10 classes' in caplog.text
  strangers = dataclasses.replace(objective, class_names=NAMES[::-1])
  with pytest.raises(ValueError, match='as class . and the data have'):
    strangers.train_transform()


def test_labels_follow_the_images_and_not_their_name(tmp_path, monkeypatch):
  teacher = opening.open_checkpoint(test_every.teacher())
  source = sources.open_source('digits', 'train[:3]')
  monkeypatch.setattr(type(source), 'identity', lambda self: 'these')
  path = str(tmp_path / 'labels.npz')
  made = kept_in(path, teacher, source, './photos all', NAMES)
  moved = kept_in(path, None, source, './moved all', NAMES)
  assert np.array_equal(made, moved)
  monkeypatch.setattr(type(source), 'identity', lambda self: 'others')
  with pytest.raises(ValueError, match='different identity'):
    kept_in(path, None, source, './photos all', NAMES)


def test_a_file_of_before_the_teachers_sums_is_read(tmp_path):
  """A file of other classes or another shape, or a damaged one, is refused."""
  teacher = opening.open_checkpoint(test_every.teacher())
  source = sources.open_source('digits', 'train[:3]')
  kept = np.random.default_rng(0).random((3, 10), np.float32)
  path = str(tmp_path / 'old.npz')
  whole = {'probabilities': kept, 'class_names': NAMES, 'images': 'mine all'}
  np.savez(path, **whole)
  found = kept_in(path, teacher, source, 'mine all', NAMES, split_seed=3)
  np.testing.assert_array_equal(found, kept)
  with pytest.raises(ValueError, match='for mine all; .*different class_names'):
    kept_in(path, None, source, 'mine all', NAMES[::-1])
  np.savez(path, **whole | {'probabilities': kept[0]})
  with pytest.raises(
    ValueError, match=r'soft labels of shape .10,. for mine all'
  ):
    kept_in(path, None, source, 'mine all', NAMES)
  pathlib.Path(path).write_bytes(pathlib.Path(path).read_bytes()[:200])
  with pytest.raises(ValueError, match='old.npz is not a file of .* Remove it'):
    kept_in(path, None, source, 'mine all', NAMES)


def test_a_batch_has_images_with_their_labels():
  """Drawn from those that are sure enough, each class as often."""
  objective = objective_of(
    **{'data.crop_min_area': 1.0, 'objective.unlabelled': 'train[:99]'}
  )
  transform = objective.train_transform()
  unlabelled = sources.open_source('digits', 'train[:99]')
  labels = kept_in(
    objective.labels, None, unlabelled, 'digits train[:99]', NAMES
  )
  digits, drawn = sources.open_source('digits', 'train'), []
  make = objective.images.train_transform()
  known = [make(x, None)['image'] for x in unlabelled]
  for seed in range(100):
    example = transform(digits[seed], np.random.default_rng(seed))
    assert example['label'] == digits[seed]['label']
    for image, soft in zip(example['unlabelled'], example['soft'], strict=True):
      (row,) = [i for i, x in enumerate(known) if np.array_equal(x, image)]
      assert np.array_equal(soft, labels[row])
      drawn.append(soft.argmax())
  counts = np.bincount(drawn)
  counts = counts[counts > 0]
  assert len(counts) == len(np.unique(labels.argmax(1))) > 1
  # 200 draws: five deviations of a binomial one.
  mean = 200 / len(counts)
  assert np.all(np.abs(counts - mean) < 5 * np.sqrt(mean))


def test_a_teacher_is_wanted_where_it_is_named_or_there_is_no_file(tmp_path):
  path = str(tmp_path / 'labels.npz')
  given = {'objective.labels': path}
  assert objective_of(**given).teacher
  (tmp_path / 'labels.npz').touch()
  # Its labels may be those of another.
  assert objective_of(**given).teacher
  assert objective_of(**given, teacher='').teacher is None


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'teacher': '', 'objective.labels': '/nowhere/x.npz'}, 'teacher is empty'),
    ({'objective.labels': ''}, 'objective.labels is empty'),
    ({'objective.threshold': 1.5}, 'objective.threshold is 1.5'),
    ({'objective.ratio': 0}, 'objective.ratio is 0'),
  ],
)
def test_what_cannot_work_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    CheckedConfig(test_every.config_of('pseudo_labels', **changes))
