"""ImageNet accuracy by the reassessed labels, ReaL.

Beyer et al., "Are we done with ImageNet?", 2020 (arXiv:2006.07159). Each of the
50,000 validation images has a list of all the classes it shows, and a
prediction is right when it is one of them. The 3,163 images whose lists are
empty are not scored.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from vit_jax.data import cores
from vit_jax.data.sources import LabelledSource, Source, labelled
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.objectives.objective import Best, Objective
from vit_jax.training import features

_NUM_CLASSES = 1000
_NUM_IMAGES = 50_000
_IMAGE_NAME = re.compile(r'(?:.*/)?ILSVRC2012_val_(\d{8})\.\w+')


class RealEvaluator(Evaluator):
  """Measures top-1 accuracy against ReaL's labels and the original ones."""

  def __init__(
    self,
    name: str,
    top: Callable[[Any, Source], np.ndarray],
    source: LabelledSource,
    labels_path: str,
  ):
    """Reads every record of a source once, for the image's number.

    `top` gives from parameters and a source the classes of each image, the
    likeliest first: int Nk. The source has validation images of ImageNet, all
    or some, in any order; `labels_path` is that of real.json.

    Raises:
      FileNotFoundError: if there is no file at `labels_path`.
      ValueError: if it is not ReaL's, or the source not ImageNet's validation
        images with its 1,000 classes in their order.
    """
    if len(source.class_names) != _NUM_CLASSES:
      raise ValueError(
        f"evaluators.{name} needs data with ImageNet's {_NUM_CLASSES} classes; "
        f'this has {len(source.class_names)}.'
      )
    labels = read_labels(labels_path)
    numbers, self._original_N = _numbers_and_labels(name, source)
    self._labels = [labels[number - 1] for number in numbers]
    _check_order(name, self._original_N, self._labels)
    self.name = name
    self._top = top
    self._source = source

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Refuses a file of labels that is missing or damaged."""
    del name
    read_labels(entry.labels)

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns accuracies."""
    del entry, objective
    return {'accuracy': 'highest', 'original_accuracy': 'highest'}

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of a split of the run's data."""
    model = parts.objective.model
    source = parts.source(entry.split)
    return cls(
      name,
      parts.extractor(name, features.top_k(model, 1)),
      labelled(source, f'{parts.config.data.name} {entry.split}'),
      entry.labels,
    )

  def run(self, params: Any) -> dict[str, float]:
    """Returns metrics under this evaluator's name.

    Those are `accuracy` by ReaL, `original_accuracy` (of all images) by the
    labels of the source, and `examples`, the number of images that ReaL scores.
    """
    top_Nk = self._top(params, self._source)
    top_N, is_read_N = top_Nk[:, 0], features.is_read(top_Nk)
    labels = [
      classes if is_read else []
      for classes, is_read in zip(self._labels, is_read_N, strict=True)
    ]
    accuracy, scored = real_accuracy(top_N, labels)
    return {
      f'{self.name}/accuracy': accuracy,
      f'{self.name}/original_accuracy': float(
        np.mean((top_N == self._original_N)[is_read_N])
      ),
      f'{self.name}/examples': float(scored),
    }


def real_accuracy(
  predictions_N: np.ndarray, labels: Sequence[Sequence[int]]
) -> tuple[float, int]:
  """Returns the accuracy by ReaL and how many images it is the share of.

  Images without labels are left out.

  Raises:
    ValueError: if no image has a label, or the lengths differ.
  """
  right = [
    int(prediction) in classes
    for prediction, classes in zip(predictions_N, labels, strict=True)
    if classes
  ]
  if not right:
    raise ValueError('ReaL has no labels for any of these images.')
  return float(np.mean(right)), len(right)


def read_labels(path: str) -> list[list[int]]:
  """Returns the classes of the images 1 to 50,000 from real.json.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is damaged or something else.
  """
  file = epath.Path(path).expanduser()
  if not file.exists() or file.is_dir():
    raise FileNotFoundError(
      f"no file {path}; get ReaL's labels, real.json, from "
      'https://github.com/google-research/reassessed-imagenet'
    )
  try:
    labels = json.loads(file.read_text())
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{path} is not ReaL's real.json: {e}") from None
  if not isinstance(labels, list) or len(labels) != _NUM_IMAGES:
    found = f'{len(labels)} items' if isinstance(labels, list) else 'no list'
    raise ValueError(
      f"{path} is not ReaL's real.json: it has {found} in place of "
      f'{_NUM_IMAGES} lists of classes.'
    )
  for number, classes in enumerate(labels, 1):
    if not isinstance(classes, list) or not all(
      type(c) is int and 0 <= c < _NUM_CLASSES for c in classes
    ):
      raise ValueError(
        f"{path} is not ReaL's real.json: for image {number} it has "
        f'{classes!r:.60} in place of a list of classes from 0 to '
        f'{_NUM_CLASSES - 1}.'
      )
  return labels


def _numbers_and_labels(
  name: str, source: Source
) -> tuple[list[int], np.ndarray]:
  """The number of each image, from 1, and its original class."""

  def read(index: int) -> tuple[int, int]:
    record = source[index]
    match = _IMAGE_NAME.fullmatch(record['name'])
    if not match:
      raise ValueError(
        f'evaluators.{name} cannot tell which validation image of ImageNet '
        f'{record["name"]} is; it needs names like '
        'ILSVRC2012_val_00000001.JPEG.'
      )
    number = int(match[1])
    if not 1 <= number <= _NUM_IMAGES:
      raise ValueError(
        f'{record["name"]}: the validation images of ImageNet have numbers '
        f'from 1 to {_NUM_IMAGES}.'
      )
    return number, record['label']

  bar = cores.progress(
    'Reading names', len(source), 'records', shown=jax.process_index() == 0
  )
  pairs = cores.in_threads(read, range(len(source)), bar)
  numbers, labels = zip(*pairs, strict=True)
  return list(numbers), np.array(labels)


def _check_order(
  name: str, original_N: np.ndarray, labels: list[list[int]]
) -> None:
  """Refuses classes in another order than ImageNet's, such as by their words.

  About nine in ten of the original labels are among ReaL's, one in a thousand
  when classes are mixed up.
  """
  agreement, _ = real_accuracy(original_N, labels)
  if agreement < 0.5:
    raise ValueError(
      f'evaluators.{name}: only {agreement:.1%} of the labels are among '
      "ReaL's, so the classes of the data are not in ImageNet's order; name "
      'their folders by WordNet id, n01440764 and so on.'
    )
