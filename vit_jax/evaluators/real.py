"""ImageNet accuracy with the reassessed labels, ReaL.

Beyer et al., "Are we done with ImageNet?", 2020 (arXiv:2006.07159). Each of the
50,000 validation images has a list of all classes that it shows. A prediction
is right if it is in the list. The 3,163 images with empty lists are not scored.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.data import cores
from vit_jax.data.sources import LabelledSource, labelled
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.training import features

_NUM_CLASSES = 1000
_CLASSES = set(range(_NUM_CLASSES))
_NUM_IMAGES = 50_000
_IMAGE_NAME = re.compile(r'(?:.*/)?ILSVRC2012_val_(\d{8})\.\w+')


class RealEvaluator(Evaluator):
  """Measures top-1 accuracy against ReaL's labels and the original labels."""

  fixed_metrics = {'accuracy': 'highest', 'original_accuracy': 'highest'}

  def __post_init__(self) -> None:
    """Reads each record once, to get the image's number from its name.

    The split has all or some ImageNet validation images, in any order.

    Raises the errors of `Parts.source`, `top_k` and `read_labels`, and
    ValueError if the split has other images or classes than ImageNet's.
    """
    parts, entry = self.parts, self.entry
    source = parts.source(entry.split)
    self._top = parts.extractor(features.top_k(parts.objective.model, 1))
    self._source = labelled(source, f'{parts.config.data.name} {entry.split}')
    check_imagenet(self.name, source.class_names)
    labels = read_labels(entry.labels)
    numbers, self._original_N = _numbers_and_labels(self.name, self._source)
    self._labels = [labels[number - 1] for number in numbers]

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    read_labels(entry.labels)

  def run(self, params: Any) -> dict[str, float]:
    """Returns `accuracy` by ReaL, `original_accuracy` and `examples`.

    `original_accuracy` covers all images and uses the labels of the source.
    `examples` is the number of images that ReaL scores.
    """
    top_N = self._top(params, self._source, self.name)[:, 0]
    accuracy, scored = real_accuracy(top_N, self._labels)
    right_N = top_N == self._original_N
    return {
      f'{self.name}/accuracy': accuracy,
      f'{self.name}/original_accuracy': float(np.mean(right_N)),
      f'{self.name}/examples': float(scored),
    }


def real_accuracy(
  predictions_N: np.ndarray, labels: Sequence[Sequence[int]]
) -> tuple[float, int]:
  """Returns the accuracy by ReaL's labels, and the number of scored images.

  Images with empty lists of labels are not scored. Raises ValueError if all
  lists are empty.
  """
  right = [
    int(prediction) in classes
    for prediction, classes in zip(predictions_N, labels, strict=True)
    if classes
  ]
  if not right:
    raise ValueError(
      f'ReaL scores none of these {len(labels):,} images. Use the whole '
      'validation split of ImageNet.'
    )
  return float(np.mean(right)), len(right)


def check_imagenet(name: str, class_names: Sequence[str]) -> None:
  """Raises ValueError if the names cannot be ImageNet's in its order.

  If the names are words, only their number and order are checked.
  """
  if len(class_names) != _NUM_CLASSES:
    raise ValueError(
      f"evaluators.{name} needs ImageNet's {_NUM_CLASSES} classes; the data "
      f'have {len(class_names)}. Set evaluators.{name}.on=False.'
    )
  # ImageNet's order is the order of WordNet ids. So ids, or numbers with
  # leading zeros, must be sorted as text. Other names, such as 'tench', must
  # not be sorted: alphabetical order is not ImageNet's order.
  are_ids = all(re.fullmatch(r'n\d{8}|\d{3,}', n) for n in class_names)
  are_sorted = list(class_names) == sorted(class_names)
  if are_ids != are_sorted:
    raise ValueError(
      f"evaluators.{name} needs ImageNet's classes in ImageNet's order, sorted "
      "by WordNet id (n01440764 and so on). The data's classes run from "
      f'{class_names[0]!r} to {class_names[-1]!r}. Use data with classes in '
      f"ImageNet's order, or set evaluators.{name}.on=False."
    )


def read_labels(path: str) -> list[list[int]]:
  """Returns the classes of the images 1 to 50,000 from real.json.

  Raises:
    FileNotFoundError: if the file is missing.
    ValueError: if the file is not ReaL's real.json.
  """
  file = epath.Path(path).expanduser()
  if not file.exists() or file.is_dir():
    raise FileNotFoundError(
      f"No file {path}. Get ReaL's labels, real.json, from "
      'https://github.com/google-research/reassessed-imagenet'
    )
  try:
    labels = json.loads(file.read_text())
    if len(labels) != _NUM_IMAGES:
      raise ValueError(f'{len(labels)} items')
    for number, classes in enumerate(labels, 1):
      if not set(classes) <= _CLASSES:
        raise ValueError(f'image {number} has {classes!r:.60}')
  except (ValueError, TypeError, RecursionError) as e:
    raise ValueError(
      f"{path} is not ReaL's real.json: {e}. The file must have {_NUM_IMAGES} "
      f'lists of classes from 0 to {_NUM_CLASSES - 1}.'
    ) from None
  return labels


def _numbers_and_labels(
  name: str, source: LabelledSource
) -> tuple[list[int], np.ndarray]:
  """Returns the number of each image, from 1, and its label in the source."""

  def read(index: int) -> tuple[int, int]:
    record = source[index]
    match = _IMAGE_NAME.fullmatch(record['name'])
    if not match or not 1 <= int(match[1]) <= _NUM_IMAGES:
      raise ValueError(
        f'evaluators.{name}: {record["name"]} is not the name of an ImageNet '
        'validation image. The evaluator needs names like '
        f'ILSVRC2012_val_00000001.JPEG, up to number {_NUM_IMAGES}.'
      )
    return int(match[1]), record['label']

  bar = cores.progress(
    'Reading names', len(source), 'records', shown=jax.process_index() == 0
  )
  pairs = cores.in_threads(read, range(len(source)), bar)
  numbers, labels = zip(*pairs, strict=True)
  return list(numbers), np.array(labels)
