"""Accuracy of an ImageNet model on ObjectNet.

A prediction is right if it is one of the ImageNet classes that the image's
class maps to. As in the evaluation of ObjectNet's authors, the model chooses
among all 1,000 classes, so a class that ObjectNet lacks is always wrong. Some
other evaluations keep only the logits of overlapping classes. Their accuracies
are higher and not comparable.

The paper's H/14, pre-trained on JFT-300M, has a top-1 accuracy of 61.7 % and a
top-5 accuracy of 82.1 %.
"""

from typing import Any

import numpy as np

from vit_jax.data import bad_images, objectnet
from vit_jax.data.sources import labelled
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.evaluators.real import check_imagenet
from vit_jax.training import features


class ObjectNetEvaluator(Evaluator):
  """Measures top-1 and top-5 accuracy on the overlapping classes."""

  fixed_metrics = {'accuracy': 'highest', 'top5_accuracy': 'highest'}

  def __post_init__(self) -> None:
    """Raises errors of `ObjectNet`, `checked`, `top_k` and `check_imagenet`."""
    parts, data = self.parts, self.entry.data
    source = bad_images.checked(
      objectnet.ObjectNet(data), parts.config.data.on_bad_image
    )
    self._source = labelled(source, data)
    self._top = parts.extractor(features.top_k(parts.objective.model, 5))
    check_imagenet(self.name, parts.facts.class_names)

  def run(self, params: Any) -> dict[str, float]:
    top_Nk = self._top(params, self._source, self.name)
    right = [objectnet.IMAGENET_CLASSES[x] for x in self._source.class_names]
    labelled_N = zip(top_Nk, self._source.labels(), strict=True)
    right_Nk = np.array([np.isin(top_k, right[y]) for top_k, y in labelled_N])
    return {
      f'{self.name}/accuracy': float(np.mean(right_Nk[:, 0])),
      f'{self.name}/top5_accuracy': float(np.mean(right_Nk.any(axis=1))),
      f'{self.name}/examples': float(len(right_Nk)),
    }
