"""Accuracy of an ImageNet model on ObjectNet.

A prediction is right if it is one of the ImageNet classes that the image's
class maps to. As in the evaluation of ObjectNet's authors, the model chooses
among all 1,000 classes, so a prediction outside of the 113 overlapping classes
is wrong. Some other evaluations keep only the logits of overlapping classes.
Their accuracies are higher and not comparable.

The paper's H/14, pre-trained on JFT-300M, has a top-1 accuracy of 61.7 % and a
top-5 accuracy of 82.1 %.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import bad_images, objectnet
from vit_jax.data.sources import LabelledSource, Source, labelled
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.evaluators.real import check_imagenet
from vit_jax.training import features


@dataclasses.dataclass(frozen=True)
class ObjectNetEvaluator(Evaluator):
  """Measures top-1 and top-5 accuracy on the overlapping classes.

  `top` maps (params, source) to the k >= 5 likeliest classes of each image,
  int Nk, the likeliest first.
  """

  fixed_metrics = {'accuracy': 'highest', 'top5_accuracy': 'highest'}

  name: str
  top: Callable[[Any, Source], np.ndarray]
  source: LabelledSource
  class_names: Sequence[str]

  def __post_init__(self) -> None:
    """Raises ValueError unless the classes are ImageNet's, in its order."""
    check_imagenet(self.name, self.class_names)

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
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
    top_Nk = self.top(params, self.source)[:, :5]
    right = [objectnet.IMAGENET_CLASSES[x] for x in self.source.class_names]
    labelled_N = zip(top_Nk, self.source.labels(), strict=True)
    right_Nk = np.array([np.isin(top_k, right[y]) for top_k, y in labelled_N])
    right_Nk = right_Nk[features.is_read(top_Nk)]
    return {
      f'{self.name}/accuracy': float(np.mean(right_Nk[:, 0])),
      f'{self.name}/top5_accuracy': float(np.mean(right_Nk.any(axis=1))),
      f'{self.name}/examples': float(len(right_Nk)),
    }
