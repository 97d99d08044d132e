"""Average precision of boxes and masks, as COCO measures it."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import cores
from vit_jax.data.sources import BoxedSource
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.models.model import Batch, Params
from vit_jax.objectives.objective import Best, Objective
from vit_jax.projects.detr import boxes, panoptic, segments
from vit_jax.projects.detr.box_transforms import masks_of
from vit_jax.projects.detr.objective import Detection
from vit_jax.training import features, sharding

# What COCO's table has in its order: precision averaged over IoUs of .5 to .95,
# at .5 and .75, of objects by size (below 32^2 and 96^2 pixels, and above); and
# recall with so many boxes an image, and by size.
ROWS = (
  *('AP', 'AP50', 'AP75', 'AP_small', 'AP_medium', 'AP_large'),
  *('AR1', 'AR10', 'AR100', 'AR_small', 'AR_medium', 'AR_large'),
)
# Pixels that objects of a size have.
_AREAS = {
  'small': (0, 32**2),
  'medium': (32**2, 96**2),
  'large': (96**2, 1e5**2),
}
# What stands before those of masks.
MASKS = 'mask_'
# What was found in an image: labels, scores and (x0, y0, x1, y1) in its pixels,
# and where masks are measured, those, as run lengths, and what counts for
# panoptic quality.
Found = tuple[
  np.ndarray,
  np.ndarray,
  np.ndarray,
  list[dict[str, Any]],
  panoptic.Tally | None,
]


class CocoEvaluator(Evaluator):
  """Measures the boxes of every image of a split, and with `masks` these.

  Attributes:
    name: prefix of the metrics.
  """

  def __init__(
    self,
    name: str,
    objects: Sequence[Mapping[str, Any]],
    detect: Callable[[Params, Batch], tuple[jax.Array, ...]],
    batches: Callable[[], Iterable[Batch]],
    canvas: tuple[int, int],
  ):
    """Takes the images' objects, and what finds some in a batch.

    `detect` gives indices B, scores BQ, classes BQ, corners BQ4 as shares of
    the image, sizes B2 in pixels of the canvas and, where masks are measured,
    their logits BQhw of the canvas.

    Raises:
      ValueError: there is no object, or pycocotools is not installed.
    """
    segments.require_library(f'evaluators.{name}')
    if not any(np.any(~x['crowd']) for x in objects):
      raise ValueError(
        f'evaluators.{name}.split has no objects to be found: give another.'
      )
    self.name = name
    self._objects, self._detect, self._batches = objects, detect, batches
    self._canvas = canvas

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Refuses an entry while pycocotools is missing."""
    del entry
    segments.require_library(f'evaluators.{name}')

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns COCO's rows, and with `masks` those of masks too."""
    del objective
    of_masks = (*(MASKS + row for row in ROWS), *panoptic.ROWS)
    return dict.fromkeys((*ROWS, *(of_masks if entry.masks else ())), 'highest')

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of a split.

    Raises:
      ValueError: the objective finds no objects, or no masks and the entry
        asks for these; the data have none, or an image of it or of the training
        has more of them than there may be; or the run is chosen by objects of a
        size that there is not.
    """
    objective = parts.objective
    if not isinstance(objective, Detection):
      raise ValueError(
        f'evaluators.{name} measures boxes, which objective.name='
        f'{parts.config.objective.name} does not learn: switch it off.'
      )
    if entry.masks and not objective.model.masks:
      raise ValueError(
        f'evaluators.{name}.masks is on and model.masks is off: switch that on '
        'too, or this off.'
      )
    masks = objective.model.masks
    if entry.split != (split := parts.config.data.split):
      of_training = _objects_of(
        parts.source(split), split, objective.max_objects, masks=masks
      )
      # Looked at, and not kept: there may be a hundred thousand images.
      for _ in of_training:
        pass
    source = parts.source(entry.split)
    objects = [
      x if entry.masks else {k: v for k, v in x.items() if k != 'masks'}
      for x in _objects_of(
        source, entry.split, objective.max_objects, masks=masks
      )
    ]
    _check_best(parts.config.best_metric, name, objects)

    def detect(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
      logits_BQC, aux = objective.predict(params, batch)
      found = boxes.likeliest(logits_BQC, aux['boxes'][-1])
      logits = (aux['mask_logits'],) if entry.masks else ()
      return batch['index'], *found, batch['size'], *logits

    return cls(
      name,
      objects,
      jax.jit(detect, out_shardings=sharding.replicated(parts.mesh)),
      functools.partial(
        features.global_batches,
        source,
        objective.eval_transform(),
        **parts.batches,
      ),
      objective.images.size,
    )

  def run(self, params: Params) -> dict[str, float]:
    """Returns COCO's rows under this evaluator's name.

    Those of sizes that no object has are left out.
    """
    found: dict[int, Found] = {}
    outputs = (self._detect(params, batch) for batch in self._batches())
    # Masks of a whole split would fill the memory.
    for fetched in features.fetched(outputs, ahead=1):
      found |= self._found_in(fetched)
    # Without images that cannot be read any more.
    kept = sorted(found)
    objects = [self._objects[i] for i in kept]
    found = {i: found[index] for i, index in enumerate(kept)}
    rows = average_precision(objects, found)
    tallies = [tally for *_, tally in found.values() if tally]
    if tallies:
      of_masks = average_precision(objects, found, 'segm')
      rows |= {MASKS + row: value for row, value in of_masks.items()}
      rows |= panoptic.quality(tallies)
    return {f'{self.name}/{row}': value for row, value in rows.items()}

  def _found_in(self, outputs: tuple[np.ndarray, ...]) -> dict[int, Found]:
    """Returns what was found in each image of a batch, by its index."""
    index_B, scores_BQ, labels_BQ, boxes_BQ4, size_B2, *masks = outputs

    def of(i: int) -> tuple[int, Found]:
      wanted = self._objects[index_B[i]]
      shown = wanted['size']
      in_pixels_Q4 = boxes_BQ4[i] * np.array([*shown[::-1]] * 2, np.float32)
      in_image, tally = [], None
      if masks:
        logits_Qhw = masks[0][i]

        def logits_of(query: int) -> np.ndarray:
          return segments.in_pixels(
            logits_Qhw[query], self._canvas, size_B2[i], shown
          )

        in_image = [
          segments.run_lengths(logits_of(q) > 0, shown)
          for q in range(len(logits_Qhw))
        ]
        tally = panoptic.tally(
          panoptic.wanted(wanted),
          panoptic.found(logits_of, scores_BQ[i], labels_BQ[i], shown),
        )
      found = labels_BQ[i], scores_BQ[i], in_pixels_Q4, in_image, tally
      return int(index_B[i]), found

    with futures.ThreadPoolExecutor(cores.usable_cores()) as pool:
      return dict(pool.map(of, np.flatnonzero(index_B >= 0)))


def _objects_of(
  source: Any, split: str, most: int, *, masks: bool
) -> Iterator[Mapping[str, Any]]:
  """Yields the objects of each image.

  Raises:
    ValueError: an image has too many, the source has none at all, or masks are
      wanted and an object has none.
  """
  if not isinstance(source, BoxedSource):
    raise ValueError(
      f"{split} has images without boxes: give a folder with COCO's "
      'instances.json, or digits_canvas.'
    )
  largest = 0
  for i in range(len(source)):
    x = source.objects(i)
    largest = max(largest, int(np.sum(~x['crowd'])))
    if masks:
      masks_of({'name': f'Image {i} of {split}', **x})
    yield x
  if largest > most:
    raise ValueError(
      f'An image of {split} has {largest} objects and '
      f'objective.max_objects is {most}: raise it; model.num_queries have to '
      'be as many.'
    )


def _check_best(
  best_metric: str, name: str, objects: Sequence[Mapping[str, Any]]
) -> None:
  """Refuses to choose by a row of a size that no object has.

  Raises:
    ValueError: naming the row.
  """
  size = best_metric.rpartition('_')[2]
  if not best_metric.startswith(f'{name}/') or size not in _AREAS:
    return
  least, most = _AREAS[size]
  if not any(
    np.any(~x['crowd'] & (least <= x['area']) & (x['area'] <= most))
    for x in objects
  ):
    raise ValueError(
      f'best_metric is {best_metric!r}, and evaluators.{name}.split has no '
      f'object of {least:,} to {most:,.0f} pixels: take {name}/AP.'
    )


def average_precision(
  objects: Sequence[Mapping[str, Any]],
  found: Mapping[int, Found],
  kind: str = 'bbox',
) -> dict[str, float]:
  """Returns COCO's rows for what was found in some of the images.

  Args:
    objects: of each image, as `BoxedSource.objects` has them.
    found: by the index of the image.
    kind: 'bbox' for boxes, 'segm' for masks. A crowd without a mask has all of
      its box.
  """
  from pycocotools.coco import COCO
  from pycocotools.cocoeval import COCOeval

  def shape(x: Mapping[str, Any], j: int) -> dict[str, Any]:
    if kind == 'bbox':
      return {}
    mask = x['masks'][j]
    if mask is None:
      x0, y0, x1, y1 = map(float, x['boxes'][j])
      mask = [[x0, y0, x0, y1, x1, y1, x1, y0]]
    return {'segmentation': segments.run_lengths(mask, x['size'])}

  wanted: list[dict[str, Any]] = [
    {
      'image_id': i,
      'category_id': int(x['labels'][j]),
      'bbox': _sides(x['boxes'][j]),
      'area': float(x['area'][j]),
      'iscrowd': int(x['crowd'][j]),
      **shape(x, j),
    }
    for i, x in enumerate(objects)
    for j in range(len(x['labels']))
  ]
  given: list[dict[str, Any]] = [
    {
      'image_id': i,
      'category_id': int(label),
      'score': float(score),
      **extent,
    }
    for i, x in found.items()
    for label, score, extent in zip(*x[:2], _extents(x, kind), strict=True)
  ]
  labels = sorted({x['category_id'] for x in (*wanted, *given)})

  def table(annotations: list[dict[str, Any]]) -> COCO:
    coco = COCO()
    coco.dataset = {
      'images': [
        {'id': i, 'height': x['size'][0], 'width': x['size'][1]}
        for i, x in enumerate(objects)
      ],
      'categories': [{'id': label} for label in labels],
      # An id of 0 means no match there.
      'annotations': [{'id': i, **x} for i, x in enumerate(annotations, 1)],
    }
    coco.createIndex()
    return coco

  with contextlib.redirect_stdout(io.StringIO()):
    measured = COCOeval(table(wanted), table(given), kind)
    measured.evaluate()
    measured.accumulate()
    measured.summarize()
  # -1 stands for no object of that size.
  rows = zip(ROWS, measured.stats, strict=True)
  return {row: float(value) for row, value in rows if value >= 0}


def _extents(found: Found, kind: str) -> list[dict[str, Any]]:
  """Returns where each of what was found lies, and its area."""
  if kind == 'bbox':
    sides = map(_sides, found[2])
    return [{'bbox': x, 'area': x[2] * x[3]} for x in sides]
  from pycocotools import mask as coco_mask

  return [
    {'segmentation': x, 'area': float(coco_mask.area(x))} for x in found[3]
  ]


def _sides(box_4: np.ndarray) -> list[float]:
  """Returns x, y, width and height of corners."""
  x0, y0, x1, y1 = map(float, box_4)
  return [x0, y0, x1 - x0, y1 - y0]
