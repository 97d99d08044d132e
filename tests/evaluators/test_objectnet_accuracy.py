"""ObjectNet's figures by hand, and over devices."""

from unittest import mock

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from configs import digits
from tests.evaluators.small import mesh_of, model_of, parts_of
from vit_jax.data import objectnet
from vit_jax.data.images import Images
from vit_jax.evaluators.evaluator import Parts
from vit_jax.evaluators.objectnet_accuracy import ObjectNetEvaluator
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts
from vit_jax.training import sharding

WORDNET_IDS = tuple(f'n{i:08}' for i in range(1000))

# ImageNet's classes of alarm clocks are 409 (analog) and 530 (digital), of
# chairs 423, 559 and 765, of woks 909.
CLASSES = ('alarm_clock', 'alarm_clock', 'chair', 'chair', 'wok', 'wok', 'wok')
TOP = np.array(
  [
    [530, 1, 2, 3, 4],  # right
    [1, 2, 3, 4, 409],  # right in the top 5
    [765, 423, 559, 0, 1],  # right, once though all three are its classes
    [409, 530, 1, 2, 3],  # an alarm clock is no chair
    [0, 1, 2, 3, 4],  # outside of the 113 classes: wrong
    [0, 1, 909, 3, 4],  # right in the top 5
    [909, 0, 1, 2, 3],  # right
  ]
)


@pytest.fixture
def source(tmp_path):
  rng = np.random.default_rng(0)
  for i, class_name in enumerate(CLASSES):
    folder = tmp_path / 'images' / class_name
    folder.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (12, 12, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f'{i}.png')
  return objectnet.ObjectNet(str(tmp_path))


def evaluator(source, top_Nk, names=WORDNET_IDS):
  parts = parts_of(None, lambda *args: top_Nk, names)
  with mock.patch.object(objectnet, 'ObjectNet', lambda path: source):
    return ObjectNetEvaluator(parts, 'objectnet', ConfigDict({'data': 'x/'}))


def test_figures_by_hand(source):
  assert evaluator(source, TOP).run(None) == {
    'objectnet/accuracy': 3 / 7,
    'objectnet/top5_accuracy': 5 / 7,
    'objectnet/examples': 7,
  }


def test_eight_devices_equal_a_plain_loop_over_cropped_images(source, tmp_path):
  model, params = model_of(1000)
  # The model knows few classes, some of which are right.
  kernel = np.zeros(params['head']['kernel'].shape, np.float32)
  known = [409, 559, 909, *range(6)]
  kernel[:, known] = np.random.default_rng(0).normal(size=(16, len(known)))
  params['head']['kernel'] = kernel

  accuracy, top5 = 0, 0
  paths = sorted(source[i]['name'] for i in range(len(source)))
  for path in paths:
    with Image.open(path) as image:
      small = image.crop((2, 2, 10, 10))  # leaves 8 x 8, which is not resized
    x_BHWC = np.asarray(small)[None] / np.float32(127.5) - 1
    logits_C = model.apply({'params': params}, x_BHWC)[0][0]
    order = np.argsort(-np.asarray(logits_C))
    classes = objectnet.IMAGENET_CLASSES[path.split('/')[-2]]
    accuracy += int(order[0] in classes)
    top5 += int(bool(set(order[:5].tolist()) & set(classes)))
  assert 0 < accuracy < top5 < len(CLASSES)  # or the test shows nothing

  mesh = mesh_of(8)
  config = digits.get_config()
  config.data.image_size, config.batch_size = '8', 8
  parts = Parts(
    config,
    Classification(model, Images((8, 8)), WORDNET_IDS),
    mesh,
    Facts(WORDNET_IDS, 7),
  )
  entry = ConfigDict({'data': str(tmp_path)})
  params = jax.device_put(params, sharding.replicated(mesh))
  got = ObjectNetEvaluator(parts, 'o', entry).run(params)
  assert got == {
    'o/accuracy': accuracy / 7,
    'o/top5_accuracy': top5 / 7,
    'o/examples': 7,
  }


@pytest.mark.parametrize(
  'names',
  [
    WORDNET_IDS,
    tuple(map(str, range(1000))),  # the names in a checkpoint without names
    ('tench', 'goldfish', *(f'x{i}' for i in range(998))),
  ],
)
def test_classes_in_the_order_of_imagenet(source, names):
  evaluator(source, TOP, names)


def test_classes_in_another_order_are_refused(source):
  with pytest.raises(ValueError, match="from 'n00000999' to 'n00000000'"):
    evaluator(source, TOP, WORDNET_IDS[::-1])
