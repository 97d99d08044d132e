"""Accuracy per class and the confusion matrix of any classifier."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.checkpoints import classes, opening
from vit_jax.data import bad_images, benchmarks, sources
from vit_jax.objectives import several_labels
from vit_jax.training import features, sharding

BATCH_PER_DEVICE = 64


class Measures(NamedTuple):
  """Measures of a classifier's predictions; accuracies are from 0 to 1."""

  accuracy: float
  top5: float
  balanced: float  # mean accuracy of the classes that have images
  confusion_CC: np.ndarray  # number of images, int64, rows are true classes
  class_names: tuple[str, ...]


class SeveralMeasures(NamedTuple):
  """Measures of a classifier whose images may have several classes."""

  class_names: tuple[str, ...]
  images: int  # number of images that were measured
  measures: several_labels.Measures


def measures(
  labels_N: np.ndarray, likeliest_Nk: np.ndarray, class_names: Sequence[str]
) -> Measures:
  """Compares true classes with the k likeliest classes, the likeliest first.

  k must be min(5, C).
  """
  C = len(class_names)
  confusion_CC = np.zeros((C, C), np.int64)
  np.add.at(confusion_CC, (labels_N, likeliest_Nk[:, 0]), 1)
  images_C = confusion_CC.sum(axis=1)
  there = images_C > 0
  right_C = np.diag(confusion_CC)
  return Measures(
    accuracy=float(right_C.sum() / len(labels_N)),
    top5=float(np.mean(np.any(likeliest_Nk == labels_N[:, None], axis=1))),
    balanced=float(np.mean(right_C[there] / images_C[there])),
    confusion_CC=confusion_CC,
    class_names=tuple(class_names),
  )


def most_confused(found: Measures) -> list[tuple[int, str]]:
  """Returns the most frequent confusions, at most five: count and description.

  A description is a text such as 'cat taken for dog, 3 times'.
  """
  names, confusion_CC = found.class_names, found.confusion_CC
  # Sorts only cells above 0: with 21,843 classes there are 477 million cells.
  pairs = [(i, j) for i, j in np.argwhere(confusion_CC) if i != j]
  pairs.sort(key=lambda pair: -confusion_CC[pair])
  counts = [(int(confusion_CC[i, j]), names[i], names[j]) for i, j in pairs[:5]]
  return [
    (n, f'{a} taken for {b}, {n:,} time{"s" if n > 1 else ""}')
    for n, a, b in counts
  ]


def evaluate(
  checkpoint: opening.Checkpoint | str,
  data: str | Mapping[str, Any],
  split: str = '',
) -> Measures | SeveralMeasures:
  """Measures a classifier on a split.

  If images have several classes, every class with a logit above 0 (a sigmoid
  above 0.5) is predicted.

  Args:
    checkpoint: an open checkpoint, or an argument of `open_checkpoint`.
    data: see `sources.data_config`.
    split: the split; by default `test`, or the test split that a benchmark such
      as `imagenet2012` defines.

  Raises:
    ValueError: if the checkpoint is not a classifier, if the data lack
      labels or have other classes, if logits are not finite, or if images are
      unreadable and `on_bad_image` of `data` is 'error', the default.
    OSError: if the checkpoint or data are missing.
    ImportError: if the checkpoint or data need a package that is not installed.
  """
  checkpoint = opening.open_checkpoint(checkpoint)
  config = sources.data_config(data)
  split = split or benchmarks.usual_splits(config.name)[1]
  source: Any = bad_images.open_checked(config, split)
  labels = sources.all_labels(source, f'{config.name} {split}')
  class_C = classes.same_classes(
    checkpoint, source.class_names, config.class_order
  )
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  names = checkpoint.class_names or source.class_names
  function = features.top_k(checkpoint.model, min(5, len(names)))
  if source.several_labels:
    function = features.layer(checkpoint.model, 'logits')
  a_device = min(BATCH_PER_DEVICE, -(-len(source) // mesh.size))
  extractor = features.Extractor(
    function, checkpoint.images, batch_size=a_device * mesh.size, mesh=mesh
  )
  params = jax.device_put(checkpoint.params, sharding.replicated(mesh))
  likeliest_Nk = extractor(params, source, f'{split} images')
  if source.several_labels:
    logits_NC = likeliest_Nk[:, class_C]
    checkpoint.check_finite(logits_NC, f'an image of {split}')
    found = several_labels.measures(labels, logits_NC, 0.0)
    return SeveralMeasures(source.class_names, len(source), found)
  for row in np.flatnonzero(likeliest_Nk[:, 0] == -2)[:1]:
    checkpoint.check_finite(np.array(np.nan), f'image {row:,} of {split}')
  return measures(class_C[labels], likeliest_Nk, names)
