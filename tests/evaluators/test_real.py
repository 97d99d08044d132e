"""ReaL accuracy against published figures and a slow loop."""

import csv
import json

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits
from tests.conftest import ROOT
from tests.evaluators.small import mesh_of, model_of, parts_of
from vit_jax.data import bad_images, images
from vit_jax.data.source import Source
from vit_jax.evaluators import real
from vit_jax.evaluators.evaluator import Parts
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts
from vit_jax.training import sharding

# 300 images of ImageNet's validation set, chosen at random: number, original
# label, ReaL's labels (github.com/google-research/reassessed-imagenet, Apache
# 2.0) and the predictions of torchvision's ResNets.
SAMPLE = ROOT / 'tests/evaluators/real_sample.csv'
# Labels and predictions of all 50,000 images, which not everyone has.
SHARED = ROOT.parent / 'shared' / 'data'

IDS = tuple(f'n{i:08}' for i in range(1000))


class Images(Source):
  """A source of named images; records count how often they are read."""

  def __init__(self, numbers, labels, class_names=IDS, images=None):
    self.class_names = class_names
    self.names = [f'val/ILSVRC2012_val_{n:08}.JPEG' for n in numbers]
    self._labels = labels
    self._images = images
    self.read = 0

  def __len__(self):
    return len(self.names)

  def __getitem__(self, index):
    self.read += 1
    image = b'nobody decodes' if self._images is None else self._images[index]
    return {
      'image': image,
      'label': int(self._labels[index]),
      'name': self.names[index],
    }

  def labels(self):
    return np.array(self._labels, np.int32)


@pytest.fixture(scope='module')
def sample():
  with open(SAMPLE) as file:
    return list(csv.DictReader(file))


@pytest.fixture(scope='module')
def labels_path(sample, tmp_path_factory):
  """A real.json with labels for the images of the sample only."""
  labels = [[] for _ in range(50_000)]
  for row in sample:
    labels[int(row['number']) - 1] = [int(c) for c in row['real'].split()]
  path = tmp_path_factory.mktemp('real') / 'real.json'
  path.write_text(json.dumps(labels))
  return path


def evaluator_of(source, top_Nk, labels_path):
  entry = ConfigDict({'split': 'val', 'labels': str(labels_path)})
  parts = parts_of(source, lambda *args: top_Nk)
  return real.RealEvaluator(parts, 'r', entry)


def numbers_and_labels(rows):
  return [int(r['number']) for r in rows], [int(r['label']) for r in rows]


@pytest.mark.fast('resnet18-69.76-77.29')
@pytest.mark.parametrize(
  ('model', 'original', 'reassessed'),
  [('resnet50', 76.13, 82.96), ('resnet18', 69.76, 77.29)],
)
def test_known_figures(model, original, reassessed):
  file = SHARED / 'imagenet_val_predictions.npz'
  if not file.exists():
    pytest.skip(f'needs the predictions of ResNets in {SHARED}')
  predictions = np.load(file)
  source = Images(range(1, 50_001), predictions['labels'])
  evaluator = evaluator_of(source, predictions[model], SHARED / 'real.json')
  metrics = evaluator.run(None)
  # The figures have two digits.
  assert abs(100 * metrics['r/accuracy'] - reassessed) <= 0.005
  assert abs(100 * metrics['r/original_accuracy'] - original) <= 0.005
  assert metrics['r/examples'] == 50_000 - 3_163


def test_equals_a_slow_loop(sample, labels_path):
  model, rows = 'resnet18', sample
  right, original, scored = 0, 0, 0
  for row in rows:
    original += row[model] == row['label']
    if row['real']:
      scored += 1
      for label in row['real'].split():
        right += row[model] == label
  assert 0 < right < scored < len(rows) and right != original
  top_Nk = np.array([[int(r[model]), 1, 2, 3, 4] for r in rows], np.int32)
  source = Images(*numbers_and_labels(rows))
  evaluator = evaluator_of(source, top_Nk, labels_path)
  assert evaluator.run(None) == {
    'r/accuracy': right / scored,
    'r/original_accuracy': original / len(rows),
    'r/examples': scored,
  }


def test_by_hand():
  labels = [[3], [], [1, 2], [1, 2], [], [7]]
  accuracy, scored = real.real_accuracy(np.array([3, 3, 2, 0, 7, 8]), labels)
  assert (accuracy, scored) == (2 / 4, 4)
  with pytest.raises(ValueError, match='scores none of these'):
    real.real_accuracy(np.array([1, 2]), [[], []])
  with pytest.raises(ValueError, match='shorter'):
    real.real_accuracy(np.array([1, 2, 3]), [[1], [2]])


def test_records_are_read_once_and_images_stay_encoded(sample, labels_path):
  source = Images(*numbers_and_labels(sample))
  top_Nk = np.zeros((300, 1), np.int32)
  evaluator = evaluator_of(source, top_Nk, labels_path)
  evaluator.run(None)
  evaluator.run(None)
  assert source.read == 300


def test_eight_devices_equal_a_plain_pass(sample, labels_path, monkeypatch):
  # Ten images of each of two classes, and three without ReaL labels.
  rows = [r for r in sample if r['real'] == r['label']][:2] * 10
  rows += [r for r in sample if not r['real']][:3]
  pixels = np.random.default_rng(0).integers(0, 256, (23, 8, 8, 3), np.uint8)
  source = Images(*numbers_and_labels(rows), images=pixels)
  model, params = model_of(1000)
  # The model knows only these two classes, so that it is sometimes right.
  kernel = np.zeros(params['head']['kernel'].shape, np.float32)
  known = [int(row['label']) for row in rows[:2]]
  kernel[:, known] = np.random.default_rng(0).normal(size=(16, 2))
  params['head']['kernel'] = kernel
  logits = model.apply({'params': params}, pixels / np.float32(127.5) - 1)[0]
  right = [
    str(int(c)) in row['real'].split()
    for c, row in zip(np.argmax(logits, axis=1), rows, strict=True)
    if row['real']
  ]
  assert 0 < sum(right) < len(right) == 20  # or the test shows nothing
  mesh = mesh_of(8)
  config = digits.get_config()
  config.data.image_size, config.batch_size = '8', 8
  parts = Parts(
    config,
    Classification(model, images.Images((8, 8)), IDS),
    mesh,
    Facts(IDS, 23),
  )
  opened = []
  monkeypatch.setattr(
    bad_images,
    'open_checked',
    lambda data, split: opened.append(split) or source,
  )
  entry = ConfigDict({'split': 'mine', 'labels': str(labels_path)})
  params = jax.device_put(params, sharding.replicated(mesh))
  got = real.RealEvaluator(parts, 'r', entry).run(params)
  assert opened == ['mine']
  assert got['r/accuracy'] == sum(right) / len(right)
  assert got['r/examples'] == len(right)


def refuse(source, path, message, error=ValueError):
  with pytest.raises(error, match=message):
    evaluator_of(source, None, path)


def test_refuses_other_data(sample, labels_path):
  numbers, labels = numbers_and_labels(sample)
  refuse(
    Images(numbers, labels, IDS[:10]),
    labels_path,
    r"evaluators\.r needs ImageNet's 1000 classes; the data have 10\.",
  )
  for name in (
    'ILSVRC2012_val_123.JPEG',
    'ILSVRC2012_val_00000001.JPEG/cat.png',
    'copy_of_ILSVRC2012_val_00000001.JPEG',
  ):
    source = Images(numbers, labels)
    source.names[200] = name
    refuse(
      source,
      labels_path,
      f'{name} is not the name of an ImageNet .* like .*val_00000001.JPEG',
    )
  for number in (0, 50_001):
    refuse(
      Images([number, *numbers], [0, *labels]),
      labels_path,
      f'val_{number:08}.JPEG is not the name of an ImageNet validation image',
    )


def test_refuses_classes_in_another_order(sample, labels_path):
  words = sorted(f'class {i}' for i in range(1000))
  source = Images(*numbers_and_labels(sample), tuple(words))
  refuse(
    source, labels_path, "ImageNet's classes in ImageNet's order, sorted by"
  )


def changed(path, tmp_path, number, classes):
  labels = json.loads(path.read_text())
  labels[number - 1] = classes
  new = tmp_path / 'changed.json'
  new.write_text(json.dumps(labels))
  return new


@pytest.mark.parametrize('classes', [7, [1000]])
def test_refuses_invalid_classes(sample, labels_path, tmp_path, classes):
  path = changed(labels_path, tmp_path, 41, classes)
  refuse(
    Images(*numbers_and_labels(sample)),
    path,
    r'changed\.json is not .* lists of classes from 0 to 999',
  )


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    (b'', 'Expecting value'),
    (json.dumps([[1]] * 49_999).encode(), '49999 items'),
  ],
)
def test_refuses_damaged_files(sample, tmp_path, data, message):
  path = tmp_path / 'damaged.json'
  path.write_bytes(data)
  refuse(
    Images(*numbers_and_labels(sample)),
    path,
    rf"damaged\.json is not ReaL's real\.json: .*({message}).* 50000 lists",
  )
