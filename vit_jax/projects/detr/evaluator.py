"""COCO's average precision of boxes and masks, and panoptic quality."""

import contextlib
import importlib
import io
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import cores
from vit_jax.data.sources import BoxedSource
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.models.model import Batch, Params
from vit_jax.objectives.objective import Best, Objective
from vit_jax.projects.detr import segments, set_losses
from vit_jax.projects.detr.objective import Detection
from vit_jax.training import features

# The rows of COCO's table, in COCO's order. AP, average precision, is averaged
# over IoU thresholds of .5 to .95; AP50 and AP75 use the threshold .5 or .75.
# Small objects have up to 32^2 pixels, medium objects up to 96^2. AR1, AR10 and
# AR100 are average recall with at most 1, 10 and 100 detections per image.
ROWS = (
  *('AP', 'AP50', 'AP75', 'AP_small', 'AP_medium', 'AP_large'),
  *('AR1', 'AR10', 'AR100', 'AR_small', 'AR_medium', 'AR_large'),
)
# Prefix of the rows for masks.
MASKS = 'mask_'
# The objects of an image: `boxes` (x0, y0, x1, y1) in pixels, `labels` and, if
# measured, `masks`. Annotated objects also have `area`, `crowd` and `size`,
# detected objects `scores`.
Objects = Mapping[str, Any]


class CocoEvaluator(Evaluator):
  """Measures the detections of a model in every image of a split.

  Attributes:
    objects: the annotated objects of each image.
    detect: maps (params, batch) to the dict of `set_losses.likeliest`, plus the
      batch's `index` B (-1 for rows without an image) and `size` B2. The dict
      has `mask_logits` only if masks are measured.
    canvas: (H, W) of the padded images.
  """

  @classmethod
  def check(cls, name: str, entry: ConfigDict) -> None:
    """Raises ImportError if hotcoco is not installed."""
    importlib.import_module('hotcoco')

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    """Maps each row of COCO's table for boxes to 'highest'.

    With masks, adds COCO's rows for masks and `segments.ROWS`.
    """
    of_masks = (*(MASKS + row for row in ROWS), *segments.ROWS)
    return dict.fromkeys((*ROWS, *(of_masks if entry.masks else ())), 'highest')

  def __post_init__(self) -> None:
    """Reads the objects of the split.

    Raises ValueError if the model does not predict what the entry measures, or
    if the split has no boxes, only crowds, or no object of the size that
    `best_metric` names. Also raises the errors of `Parts.source`.
    """
    parts, name, entry = self.parts, self.name, self.entry
    objective = parts.objective
    if not isinstance(objective, Detection):
      raise ValueError(
        f'evaluators.{name} measures boxes, and objective.name='
        f'{parts.config.objective.name} does not predict them. Set '
        f'evaluators.{name}.on=False, or use objective.name=detection.'
      )
    if entry.masks and not objective.model.masks:
      raise ValueError(
        f'evaluators.{name}.masks is True and model.masks is False. Set both '
        'to the same value.'
      )
    source = parts.source(entry.split)
    if not isinstance(source, BoxedSource):
      raise ValueError(
        f'The images of {entry.split} have no boxes. Set data.name to a folder '
        'with COCO or VOC annotations, or to digits_canvas. If the folder has '
        'masks, python -m vit_jax.data FOLDER --class=NAME writes annotations.'
      )
    # To save memory, masks are kept only if they are measured.
    objects = []
    for i in range(len(source)):
      objects.append(dict(source.objects(i)))
      if not entry.masks:
        objects[-1].pop('masks', None)
    best = parts.config.best_metric.removeprefix(f'{name}/')
    rows = average_precision(dict(enumerate(objects)), {})
    if not rows:
      raise ValueError(
        f'evaluators.{name}.split={entry.split} has no objects to measure. '
        'Choose a split with objects that are not crowds.'
      )
    if best.removeprefix(MASKS) in {*ROWS} - rows.keys():
      raise ValueError(
        f'best_metric is {name}/{best}, but evaluators.{name}.split has no '
        'object of that size. Choose another metric or split.'
      )

    def detect(params: Params, batch: Batch) -> Batch:
      found = set_losses.likeliest(*objective.predict(params, batch))
      if not entry.masks:
        found.pop('mask_logits', None)
      return found | {name: batch[name] for name in ('index', 'size')}

    self.objects = objects
    self.detect = parts.compiled(detect)
    self.batches = parts.passes(source)
    self.canvas = objective.images.size

  def run(self, params: Params) -> dict[str, float]:
    """Returns metrics `{name}/{row}`.

    Leaves out unreadable images, and object sizes that do not occur.
    """
    found: dict[int, dict[str, Any]] = {}
    outputs = (self.detect(params, batch) for batch in self.batches())
    # Computes only one batch ahead, because the mask logits of more batches
    # would fill the memory.
    for fetched in features.fetched(outputs, ahead=1):
      found |= self._found_in(fetched)
    # The loader skips unreadable images. They are left out here too, because
    # their objects would count as not detected.
    found = dict(sorted(found.items()))
    objects = {i: self.objects[i] for i in found}
    rows = average_precision(objects, found)
    pairs = [x['segments'] for x in found.values() if 'segments' in x]
    if pairs:
      of_masks = average_precision(objects, found, 'segm')
      rows |= {MASKS + row: value for row, value in of_masks.items()}
      rows |= segments.quality(pairs)
    return {f'{self.name}/{row}': value for row, value in rows.items()}

  def _found_in(
    self, outputs: Mapping[str, np.ndarray]
  ) -> dict[int, dict[str, Any]]:
    """Returns the objects detected in each image of a batch, by image index.

    With masks, the entry `segments` is a pair: annotated and detected segments.
    """

    def of(row: int) -> tuple[int, dict[str, Any]]:
      found: dict[str, Any] = {name: x[row] for name, x in outputs.items()}
      index, seen = int(found.pop('index')), found.pop('size')
      wanted = self.objects[index]
      shown = wanted['size']
      scale_4 = np.array([*shown[::-1]] * 2, np.float32)
      found['boxes'] = found['boxes'] * scale_4
      logits_Qhw = found.pop('mask_logits', None)
      if logits_Qhw is not None:

        def logits_of(query: int) -> np.ndarray:
          return segments.in_pixels(logits_Qhw[query], self.canvas, seen, shown)

        found['masks'] = [
          segments.run_lengths(logits_of(q) > 0, shown)
          for q in range(len(logits_Qhw))
        ]
        detected = segments.found(
          logits_of, found['scores'], found['labels'], shown
        )
        found['segments'] = (
          segments.written(segments.wanted(wanted), background=True),
          segments.written(detected),
        )
      return index, found

    with futures.ThreadPoolExecutor(cores.usable_cores()) as pool:
      return dict(pool.map(of, np.flatnonzero(outputs['index'] >= 0)))


def average_precision(
  objects: Mapping[int, Objects],
  found: Mapping[int, Objects],
  kind: str = 'bbox',
) -> dict[str, float]:
  """Computes COCO's rows from annotated and detected objects by image.

  `found` may lack images. The kind is 'bbox' for boxes or 'segm' for masks. The
  mask of a crowd may be None, which means its whole box. Rows of object sizes
  that do not occur are left out; without objects, or with crowds only, the
  result is empty.
  """
  from hotcoco import COCO, COCOeval

  def listed(images: Mapping[int, Objects], **more: str) -> list[Any]:
    """Returns COCO's annotations; `more` maps further COCO keys to our keys."""
    return [
      {'image_id': i, 'category_id': int(x['labels'][j])}
      | {key: float(x[ours][j]) for key, ours in more.items()}
      | extent(x, j, objects[i]['size'])
      for i, x in images.items()
      for j in range(len(x['boxes']))
    ]

  def extent(x: Objects, j: int, size: tuple[int, int]) -> dict[str, Any]:
    x0, y0, x1, y1 = map(float, x['boxes'][j])
    if kind == 'bbox':
      return {'bbox': [x0, y0, x1 - x0, y1 - y0]}
    mask = x['masks'][j]
    if mask is None:
      mask = [[x0, y0, x0, y1, x1, y1, x1, y0]]
    return {'segmentation': segments.run_lengths(mask, size)}

  wanted = listed(objects, area='area', iscrowd='crowd')
  given = listed(found, score='scores')
  labels = sorted({x['category_id'] for x in (*wanted, *given)})
  truth = COCO(
    {
      'images': [
        {'id': i, 'height': x['size'][0], 'width': x['size'][1]}
        for i, x in objects.items()
      ],
      'categories': [{'id': label, 'name': str(label)} for label in labels],
      # Ids start at 1, because 0 means "not matched" in COCO's code.
      'annotations': [{'id': i} | x for i, x in enumerate(wanted, 1)],
    }
  )
  measured = COCOeval(truth, truth.loadRes(given), kind)
  # COCOeval prints a table.
  with contextlib.redirect_stdout(io.StringIO()):
    measured.run()
  # -1 means that there are no objects of that size.
  rows = zip(ROWS, measured.stats, strict=True)
  return {row: float(value) for row, value in rows if value >= 0}
