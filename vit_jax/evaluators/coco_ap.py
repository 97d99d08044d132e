"""Average precision of boxes, as COCO measures it."""

import contextlib
import functools
import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.sources import BoxedSource
from vit_jax.evaluators import features
from vit_jax.evaluators.evaluator import Parts
from vit_jax.models import boxes
from vit_jax.models.model import Batch, Params
from vit_jax.objectives.detection import Detection
from vit_jax.objectives.objective import Best, Objective
from vit_jax.training import sharding

# What COCO's table has in its order: precision averaged over IoUs of .5 to .95,
# at .5 and .75, of objects by size (below 32^2 and 96^2 pixels, and above); and
# recall with so many boxes an image, and by size.
ROWS = (
  *('AP', 'AP50', 'AP75', 'AP_small', 'AP_medium', 'AP_large'),
  *('AR1', 'AR10', 'AR100', 'AR_small', 'AR_medium', 'AR_large'),
)
# A detection of an image: label, score and (x0, y0, x1, y1) in its pixels.
Found = tuple[np.ndarray, np.ndarray, np.ndarray]


class CocoEvaluator:
  """Measures the boxes of every image of a split.

  Attributes:
    name: prefix of the metrics.
  """

  def __init__(
    self,
    name: str,
    objects: Sequence[Mapping[str, Any]],
    detect: Callable[[Params, Batch], tuple[jax.Array, ...]],
    batches: Callable[[], Iterable[Batch]],
  ):
    """Takes the images' objects, and what finds some in a batch.

    Raises:
      ValueError: there is no object, or pycocotools is not installed.
    """
    if not importlib.util.find_spec('pycocotools'):
      raise ValueError(
        f'evaluators.{name} needs pycocotools, which is not installed: pip '
        "install -e '.[detection]', or switch it off."
      )
    if not any(np.any(~x['crowd']) for x in objects):
      raise ValueError(
        f'evaluators.{name}.split has no objects to be found: give another.'
      )
    self.name = name
    self._objects, self._detect, self._batches = objects, detect, batches

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns COCO's rows."""
    del entry, objective
    return dict.fromkeys(ROWS, 'highest')

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of a split.

    Raises:
      ValueError: the objective finds no objects, the data have none, or an
        image of it or of the training has more of them than there may be.
    """
    objective = parts.objective
    if not isinstance(objective, Detection):
      raise ValueError(
        f'evaluators.{name} measures boxes, which objective.name='
        f'{parts.config.objective.name} does not learn: switch it off.'
      )
    found = {}
    for split in (parts.config.data.split, entry.split):
      source = parts.source(split)
      found[split] = _objects_of(source, split, objective.max_objects)

    def detect(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
      logits_BQC, aux = objective.predict(params, batch)
      found = boxes.likeliest(logits_BQC, aux['boxes'][-1])
      return batch['index'], *found

    return cls(
      name,
      found[entry.split],
      jax.jit(detect, out_shardings=sharding.replicated(parts.mesh)),
      functools.partial(
        features.global_batches,
        source,
        objective.eval_transform(),
        **parts.batches,
      ),
    )

  def run(self, params: Params) -> dict[str, float]:
    """Returns COCO's rows under this evaluator's name.

    Those of sizes that no object has are left out.
    """
    found: dict[int, Found] = {}
    pending = [self._detect(params, batch) for batch in self._batches()]
    for index_B, scores_BQ, labels_BQ, boxes_BQ4 in jax.device_get(pending):
      for i in np.flatnonzero(index_B >= 0):
        height, width = self._objects[index_B[i]]['size']
        in_pixels_Q4 = boxes_BQ4[i] * np.array([width, height] * 2, np.float32)
        found[int(index_B[i])] = labels_BQ[i], scores_BQ[i], in_pixels_Q4
    rows = average_precision(self._objects, found)
    return {f'{self.name}/{row}': value for row, value in rows.items()}


def _objects_of(source: Any, split: str, most: int) -> list[Mapping[str, Any]]:
  """Returns the objects of each image.

  Raises:
    ValueError: an image has too many, or the source has none at all.
  """
  if not isinstance(source, BoxedSource):
    raise ValueError(
      f"{split} has images without boxes: give a folder with COCO's "
      'instances.json, or digits_canvas.'
    )
  objects = [source.objects(i) for i in range(len(source))]
  counts = [int(np.sum(~x['crowd'])) for x in objects]
  if max(counts) > most:
    raise ValueError(
      f'An image of {split} has {max(counts)} objects and '
      f'objective.max_objects is {most}: raise it; model.num_queries have to '
      'be as many.'
    )
  return objects


def average_precision(
  objects: Sequence[Mapping[str, Any]], found: Mapping[int, Found]
) -> dict[str, float]:
  """Returns COCO's rows for what was found in some of the images.

  Args:
    objects: of each image, as `BoxedSource.objects` has them.
    found: by the index of the image.
  """
  from pycocotools.coco import COCO
  from pycocotools.cocoeval import COCOeval

  wanted: list[dict[str, Any]] = [
    {
      'image_id': i,
      'category_id': int(x['labels'][j]),
      'bbox': _sides(x['boxes'][j]),
      'area': float(x['area'][j]),
      'iscrowd': int(x['crowd'][j]),
    }
    for i, x in enumerate(objects)
    for j in range(len(x['labels']))
  ]
  given: list[dict[str, Any]] = [
    {
      'image_id': i,
      'category_id': int(label),
      'bbox': (box := _sides(box_4)),
      'area': box[2] * box[3],
      'iscrowd': 0,
      'score': float(score),
    }
    for i, (labels_Q, scores_Q, boxes_Q4) in found.items()
    for label, score, box_4 in zip(labels_Q, scores_Q, boxes_Q4, strict=True)
  ]
  labels = sorted({x['category_id'] for x in (*wanted, *given)})

  def table(annotations: list[dict[str, Any]]) -> COCO:
    coco = COCO()
    coco.dataset = {
      'images': [{'id': i} for i in range(len(objects))],
      'categories': [{'id': label} for label in labels],
      # An id of 0 means no match there.
      'annotations': [{'id': i, **x} for i, x in enumerate(annotations, 1)],
    }
    coco.createIndex()
    return coco

  with contextlib.redirect_stdout(io.StringIO()):
    measured = COCOeval(table(wanted), table(given), 'bbox')
    measured.evaluate()
    measured.accumulate()
    measured.summarize()
  # -1 stands for no object of that size.
  rows = zip(ROWS, measured.stats, strict=True)
  return {row: float(value) for row, value in rows if value >= 0}


def _sides(box_4: np.ndarray) -> list[float]:
  """Returns x, y, width and height of corners."""
  x0, y0, x1, y1 = map(float, box_4)
  return [x0, y0, x1 - x0, y1 - y0]
