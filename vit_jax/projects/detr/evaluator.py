"""Average precision of boxes and masks, as COCO measures it."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from vit_jax.projects.detr import segments, set_losses
from vit_jax.projects.detr.objective import Detection
from vit_jax.training import features, sharding

# What COCO's table has in its order: precision averaged over IoUs of .5 to .95,
# at .5 and .75, of objects by size (below 32^2 and 96^2 pixels, and above); and
# recall with so many boxes an image, and by size.
ROWS = (
  *('AP', 'AP50', 'AP75', 'AP_small', 'AP_medium', 'AP_large'),
  *('AR1', 'AR10', 'AR100', 'AR_small', 'AR_medium', 'AR_large'),
)
# What stands before those of masks.
MASKS = 'mask_'
# What was found in an image: labels, scores and (x0, y0, x1, y1) in its pixels,
# and where masks are measured, those as RLE, and for panoptic quality the
# annotated and the found segments.
Found = tuple[
  np.ndarray,
  np.ndarray,
  np.ndarray,
  list[dict[str, Any]],
  tuple[segments.Written, segments.Written] | None,
]


@dataclasses.dataclass
class CocoEvaluator(Evaluator):
  """Measures the boxes of every image of a split, and with `masks` these.

  Attributes:
    name: prefix of the metrics.
    objects: of each image.
    detect: gives of a batch indices B, scores BQ, classes BQ, corners BQ4 as
      shares of the image, sizes B2 in pixels of the canvas and, where masks are
      measured, their logits BQhw of the canvas.
    batches: gives the batches of the split.
    canvas: (H, W).
  """

  name: str
  objects: Sequence[Mapping[str, Any]]
  detect: Callable[[Params, Batch], tuple[jax.Array, ...]]
  batches: Callable[[], Iterable[Batch]]
  canvas: tuple[int, int]

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Refuses an entry while hotcoco is missing."""
    del entry
    segments.require_library(f'evaluators.{name}')

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Returns COCO's rows, and with `masks` those of masks too."""
    del objective
    of_masks = (*(MASKS + row for row in ROWS), *segments.ROWS)
    return dict.fromkeys((*ROWS, *(of_masks if entry.masks else ())), 'highest')

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Returns the evaluator of a split.

    Raises:
      ValueError: the objective finds no objects, or no masks and the entry
        asks for these; the data have none; or the run is chosen by objects of a
        size that the split lacks.
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
    source = parts.source(entry.split)
    if not isinstance(source, BoxedSource):
      raise ValueError(
        f"{entry.split} has images without boxes: give a folder with COCO's "
        'instances.json, or digits_canvas.'
      )
    # Masks would fill the memory.
    objects = [
      {
        k: x
        for k, x in source.objects(i).items()
        if entry.masks or k != 'masks'
      }
      for i in range(len(source))
    ]
    best = parts.config.best_metric.removeprefix(f'{name}/')
    rows = average_precision(objects, {})
    if not rows or best.removeprefix(MASKS) in {*ROWS} - rows.keys():
      raise ValueError(
        f'best_metric is {name}/{best}, and evaluators.{name}.split has no '
        f'object of that size{"" if rows else ", nor any other"}: give another.'
      )

    def detect(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
      logits_BQC, aux = objective.predict(params, batch)
      found = set_losses.likeliest(logits_BQC, aux['boxes'][-1])
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
    outputs = (self.detect(params, batch) for batch in self.batches())
    # Masks of a whole split would fill the memory.
    for fetched in features.fetched(outputs, ahead=1):
      found |= self._found_in(fetched)
    # Without images that cannot be read any more.
    kept = sorted(found)
    objects = [self.objects[i] for i in kept]
    found = {i: found[index] for i, index in enumerate(kept)}
    rows = average_precision(objects, found)
    pairs = [pair for *_, pair in found.values() if pair]
    if pairs:
      of_masks = average_precision(objects, found, 'segm')
      rows |= {MASKS + row: value for row, value in of_masks.items()}
      rows |= segments.quality(pairs)
    return {f'{self.name}/{row}': value for row, value in rows.items()}

  def _found_in(self, outputs: tuple[np.ndarray, ...]) -> dict[int, Found]:
    """Returns what was found in each image of a batch, by its index."""
    index_B, scores_BQ, labels_BQ, boxes_BQ4, size_B2, *masks = outputs

    def of(i: int) -> tuple[int, Found]:
      wanted = self.objects[index_B[i]]
      shown = wanted['size']
      in_pixels_Q4 = boxes_BQ4[i] * np.array([*shown[::-1]] * 2, np.float32)
      in_image, pair = [], None
      if masks:
        logits_Qhw = masks[0][i]

        def logits_of(query: int) -> np.ndarray:
          return segments.in_pixels(
            logits_Qhw[query], self.canvas, size_B2[i], shown
          )

        in_image = [
          segments.run_lengths(logits_of(q) > 0, shown)
          for q in range(len(logits_Qhw))
        ]
        found = segments.found(logits_of, scores_BQ[i], labels_BQ[i], shown)
        pair = (
          segments.written(segments.wanted(wanted), background=True),
          segments.written(found),
        )
      return int(index_B[i]), (
        labels_BQ[i],
        scores_BQ[i],
        in_pixels_Q4,
        in_image,
        pair,
      )

    with futures.ThreadPoolExecutor(cores.usable_cores()) as pool:
      return dict(pool.map(of, np.flatnonzero(index_B >= 0)))


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
  from hotcoco import COCO, COCOeval

  def extent(box_4: np.ndarray, mask: Any, size: Any) -> dict[str, Any]:
    x0, y0, x1, y1 = map(float, box_4)
    if kind == 'bbox':
      return {'bbox': [x0, y0, x1 - x0, y1 - y0]}
    if mask is None:
      mask = [[x0, y0, x0, y1, x1, y1, x1, y0]]
    return {'segmentation': segments.run_lengths(mask, size)}

  wanted = [
    {
      'image_id': i,
      'category_id': int(x['labels'][j]),
      'area': float(x['area'][j]),
      'iscrowd': int(x['crowd'][j]),
    }
    | extent(box_4, x['masks'][j] if kind == 'segm' else None, x['size'])
    for i, x in enumerate(objects)
    for j, box_4 in enumerate(x['boxes'])
  ]
  given = [
    {'image_id': i, 'category_id': int(labels[j]), 'score': float(scores[j])}
    | extent(box_4, masks[j] if kind == 'segm' else None, objects[i]['size'])
    for i, (labels, scores, boxes_N4, masks, *_) in found.items()
    for j, box_4 in enumerate(boxes_N4)
  ]
  labels = sorted({x['category_id'] for x in (*wanted, *given)})
  truth = COCO(
    {
      'images': [
        {'id': i, 'height': x['size'][0], 'width': x['size'][1]}
        for i, x in enumerate(objects)
      ],
      'categories': [{'id': label, 'name': str(label)} for label in labels],
      # An id of 0 means no match there.
      'annotations': [{'id': i} | x for i, x in enumerate(wanted, 1)],
    }
  )
  measured = COCOeval(truth, truth.loadRes(given), kind)
  # It prints a table.
  with contextlib.redirect_stdout(io.StringIO()):
    measured.run()
  # -1 stands for no object of that size.
  rows = zip(ROWS, measured.stats, strict=True)
  return {row: float(value) for row, value in rows if value >= 0}
