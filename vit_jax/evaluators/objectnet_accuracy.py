"""Accuracy of an ImageNet model on ObjectNet.

An image is right when the prediction is any of the ImageNet classes that its
class maps to, and right in the top 5 when any of five predictions is. These are
the likeliest of all 1,000 classes: one outside of the 113 that overlap is
wrong, as in the evaluation of ObjectNet's authors. Others keep only the logits
of overlapping classes, which gives higher figures that are not comparable.

The paper's H/14, pre-trained on JFT-300M: 61.7 % top-1, 82.1 % top-5.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import bad_images, objectnet
from vit_jax.data.sources import LabelledSource, Source, labelled
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.objectives.objective import Best, Objective
from vit_jax.training import features

_NUM_IMAGENET_CLASSES = 1000


class ObjectNetEvaluator(Evaluator):
  """Measures top-1 and top-5 accuracy on the overlapping classes."""

  def __init__(
    self,
    name: str,
    top: Callable[[Any, Source], np.ndarray],
    source: LabelledSource,
    class_names: Sequence[str],
  ):
    """Takes a model of these classes, and ObjectNet or some of its images.

    `top` gives from parameters and a source the classes of each image, the
    likeliest first and at least five of them: int Nk.

    Raises:
      ValueError: if the classes are not ImageNet's in their order.
    """
    _check_imagenet(name, class_names)
    self.name = name
    self._top = top
    self._source = source

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns accuracies."""
    del entry, objective
    return {'accuracy': 'highest', 'top5_accuracy': 'highest'}

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of a folder of ObjectNet's images."""
    source = bad_images.checked(
      objectnet.ObjectNet(entry.data), parts.config.data.on_bad_image
    )
    return cls(
      name,
      parts.extractor(name, features.top_k(parts.objective.model, 5)),
      labelled(source, entry.data),
      parts.facts.class_names,
    )

  def run(self, params: Any) -> dict[str, float]:
    """Returns `accuracy`, `top5_accuracy` and `examples` under this name."""
    # Which of ImageNet's classes C are right for each of the source's Y.
    right_YC = np.zeros(
      (len(self._source.class_names), _NUM_IMAGENET_CLASSES), bool
    )
    for label, class_name in enumerate(self._source.class_names):
      right_YC[label, list(objectnet.IMAGENET_CLASSES[class_name])] = True
    top_Nk = self._top(params, self._source)[:, :5]
    right_Nk = right_YC[self._source.labels()[:, None], top_Nk]
    right_Nk = right_Nk[features.is_read(top_Nk)]
    return {
      f'{self.name}/accuracy': float(np.mean(right_Nk[:, 0])),
      f'{self.name}/top5_accuracy': float(np.mean(right_Nk.any(axis=1))),
      f'{self.name}/examples': float(len(right_Nk)),
    }


def _check_imagenet(name: str, class_names: Sequence[str]) -> None:
  if len(class_names) != _NUM_IMAGENET_CLASSES:
    raise ValueError(
      f"evaluators.{name} needs a model of ImageNet's {_NUM_IMAGENET_CLASSES} "
      f'classes; this one has {len(class_names)}.'
    )
  # Class folders that bear words, or numbers without leading zeros, sort
  # otherwise than WordNet ids, and every prediction would be another class.
  are_ids = all(re.fullmatch(r'n\d{8}|\d{3,}', n) for n in class_names)
  are_sorted = list(class_names) == sorted(class_names)
  if are_ids != are_sorted:
    raise ValueError(
      f"evaluators.{name} needs ImageNet's classes in ImageNet's order, sorted "
      f'by WordNet id; the classes of this model run from {class_names[0]!r} '
      f'to {class_names[-1]!r}.'
    )
