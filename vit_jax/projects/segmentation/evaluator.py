"""Mean intersection over union (IoU) of the classes of pixels."""

from collections.abc import Sequence

import numpy as np

from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.models.model import Params
from vit_jax.projects.segmentation.objective import Segmentation
from vit_jax.training import features


class SegmentationEvaluator(Evaluator):
  """Compares the predicted classes of a split's pixels with the masks.

  Masks are resized to the model's image size. Ignored pixels do not count.

  Attributes:
    confusion: maps (params, batch) to pixel counts, int32 CC: rows are classes,
      columns are predictions.
    batches: returns one pass over the split, as global device arrays.
  """

  fixed_metrics = {
    'mean_iou': 'highest',
    'pixel_accuracy': 'highest',
  }

  def __post_init__(self) -> None:
    """Opens the split.

    Raises ValueError if the objective is not segmentation, and the errors of
    `Parts.source`.
    """
    parts, name = self.parts, self.name
    objective = parts.objective
    if not isinstance(objective, Segmentation):
      raise ValueError(
        f'evaluators.{name} measures classes of pixels, and objective.name='
        f'{parts.config.objective.name} does not predict them. Set '
        f'evaluators.{name}.on=False, or use objective.name=segmentation.'
      )
    self.confusion = parts.compiled(objective.confusion)
    self.batches = parts.passes(parts.source(self.entry.split))

  def run(self, params: Params) -> dict[str, float]:
    """Returns the metrics of `measures`, each named `{name}/{metric}`."""
    counts = (self.confusion(params, batch) for batch in self.batches())
    names = self.parts.objective.class_names
    # int64, since a split can have more pixels than int32 can count.
    zeros_CC = np.zeros((len(names), len(names)), np.int64)
    found = measures(sum(features.fetched(counts, ahead=2), zeros_CC), names)
    return {f'{self.name}/{key}': value for key, value in found.items()}


def measures(
  confusion_CC: np.ndarray, class_names: Sequence[str]
) -> dict[str, float]:
  """Computes metrics from pixel counts; rows are classes, columns predictions.

  Returns:
    iou_{class}: the IoU of each class that occurs in masks or predictions.
    mean_iou: the mean of these IoUs.
    pixel_accuracy: the share of pixels whose class is predicted correctly.
  """
  right_C = np.diag(confusion_CC)
  union_C = confusion_CC.sum(axis=0) + confusion_CC.sum(axis=1) - right_C
  occurs_C = union_C > 0
  names = np.array([*class_names])[occurs_C]
  ious = right_C[occurs_C] / union_C[occurs_C]
  return {
    'mean_iou': float(np.mean(ious)),
    'pixel_accuracy': float(right_C.sum() / confusion_CC.sum()),
  } | {f'iou_{name}': float(x) for name, x in zip(names, ious, strict=True)}
