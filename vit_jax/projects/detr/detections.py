"""Objects that DETR finds in photographs: boxes, masks, COCO's results.

And where it looks for them, and what each query is there for, after figures 3,
6 and 7 of "End-to-End Object Detection with Transformers" (2005.12872).
"""

import collections
import functools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont
from tqdm import tqdm

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import atomic_files, decode
from vit_jax.projects.detr import segments, set_losses
from vit_jax.projects.detr.box_transforms import BoxTransform
from vit_jax.projects.detr.model import predicted
from vit_jax.training import plots
from vit_jax.visualize import draw, photos
from vit_jax.visualize.sections import SHEET, Figure, Section

# Objects of an image, and queries, in one picture.
_OBJECTS, _QUERIES = 6, 20
# Pictures of smaller images are enlarged, so that names fit beside boxes.
_LEAST_SIDE = 480


class Detections(NamedTuple):
  """What is found in an image, the likeliest first.

  Attributes:
    labels_N: classes.
    scores_N: their probabilities.
    boxes_N4: (x0, y0, x1, y1) in pixels of the image, inside of it.
    masks_NHW: which pixels of the image each has, bool; None where the
      checkpoint finds no masks.
  """

  labels_N: np.ndarray
  scores_N: np.ndarray
  boxes_N4: np.ndarray
  masks_NHW: np.ndarray | None = None


class Said(NamedTuple):
  """What a model says of an image.

  Attributes:
    shown_HWC: the image as it is, uint8, upright.
    canvas: (height, width) of what the model sees.
    size: (height, width) of the part of it without padding.
    queries: by name an array for each query: `scores` Q, `labels` Q, `boxes`
      Q4 (corners as shares of the image), `mask_logits` Qhw where there are
      masks, and `attention` Qhw to places, if asked for.
  """

  shown_HWC: np.ndarray
  canvas: tuple[int, int]
  size: tuple[int, int]
  queries: dict[str, np.ndarray]


class Detector:
  """A checkpoint of DETR at work on one photograph after the other."""

  def __init__(
    self, checkpoint: Checkpoint, threshold: float, *, attention: bool = False
  ):
    """Takes a checkpoint, and the least probability of what is told.

    With `attention`, queries say where they look, too: the mean over the heads
    of the last decoder layer.
    """
    self._checkpoint, self._threshold = checkpoint, threshold
    self._attention = attention
    self._likeliest = jax.jit(self._outputs)

  def __call__(self, path: str) -> tuple[np.ndarray, Detections]:
    """Returns an image as it is, uint8 HWC upright, and what is in it.

    Raises:
      UnreadableImage: naming the file.
    """
    said = self.said_of(path)
    return said.shown_HWC, self.found(said)

  def said_of(self, path: str) -> Said:
    """Returns the outputs of all queries for an image.

    The model sees a copy whose short side is that of the checkpoint's size,
    and its long side no longer than the other.

    Raises:
      UnreadableImage: naming the file.
    """
    data = decode.read_file(path)
    shown_HWC = decode.open_image(data, path).read()
    height, width = shown_HWC.shape[:2]
    short, long = sorted(self._checkpoint.image_size)
    size = (long, short) if height > width else (short, long)
    nothing = {'boxes': np.zeros((0, 4)), 'labels': ()}
    transform = BoxTransform(size, max_objects=0, short_sides=(short,))
    example = transform({'image': data, 'name': path, **nothing})
    queries = jax.device_get(
      self._likeliest(
        self._checkpoint.on_device, example['image'], example['size']
      )
    )
    self._checkpoint.check_finite(queries['scores'], path)
    seen_height, seen_width = example['size'].tolist()
    return Said(shown_HWC, size, (seen_height, seen_width), queries)

  def order(self, said: Said) -> np.ndarray:
    """Returns the queries that are told of, the likeliest first."""
    scores_Q = said.queries['scores']
    order_N = np.argsort(-scores_Q, kind='stable')
    return order_N[scores_Q[order_N] >= self._threshold]

  def found(self, said: Said) -> Detections:
    """Returns the objects of these queries, in pixels of the image."""
    order_N = self.order(said)
    told = {name: x[order_N] for name, x in said.queries.items()}
    height, width, _ = said.shown_HWC.shape
    masks_NHW = None
    if 'mask_logits' in told:
      masks_NHW = np.zeros((len(order_N), height, width), bool)
      for i, logits_hw in enumerate(told['mask_logits']):
        masks_NHW[i] = 0 < segments.in_pixels(
          logits_hw, said.canvas, said.size, (height, width)
        )
    boxes_N4 = np.clip(told['boxes'], 0, 1) * ([width, height] * 2)
    return Detections(told['labels'], told['scores'], boxes_N4, masks_NHW)

  def _outputs(
    self, params: Any, image_HWC: jax.Array, size_2: jax.Array
  ) -> dict[str, jax.Array]:
    model = self._checkpoint.model
    logits_1QC, aux = predicted(
      model,
      params,
      self._checkpoint.normalize,
      image_HWC[None],
      size_2[None],
      capture=('attention',) if self._attention else (),
    )
    scores, labels, corners = set_losses.likeliest(logits_1QC, aux['boxes'][-1])
    said = {'scores': scores, 'labels': labels, 'boxes': corners}
    if 'mask_logits' in aux:
      said['mask_logits'] = aux['mask_logits']
    if self._attention:
      weights_1QL = jnp.mean(aux['decoder_attention'][-1], axis=1)
      H, W, _ = image_HWC.shape
      said['attention'] = weights_1QL.reshape(1, -1, *model.grid((H, W)))
    return {name: x[0] for name, x in said.items()}


def find(
  checkpoint: Checkpoint, paths: Sequence[str], threshold: float, out: str = ''
) -> Iterator[list[tuple[Any, ...]] | decode.UnreadableImage]:
  """Yields (class, probability, x0, y0, x1, y1) of each object, file by file.

  The likeliest objects come first, none below the threshold. An unreadable file
  yields its error. A folder `out` receives pictures and COCO's results.
  """
  C = checkpoint.model.num_classes
  names = tuple(map(checkpoint.class_name, range(C)))
  detector = Detector(checkpoint, threshold)
  results: list[dict[str, Any]] = []
  if out:
    if checkpoint.model.masks:
      segments.require_library(f'--out with the masks of {checkpoint.path}')
    os.makedirs(out, exist_ok=True)
  each = zip(paths, photos.unique_names(paths), coco_ids(paths), strict=True)
  try:
    for path, stem, image_id in each:
      try:
        shown_HWC, found = detector(path)
      except decode.UnreadableImage as e:
        yield e
        continue
      if out:
        results += coco_results(image_id, found)
        drawn = picture(shown_HWC, found, names)
        atomic_files.replace(os.path.join(out, f'objects-{stem}.png'), drawn)
      yield [
        (names[c], float(p), *(round(float(x), 1) for x in box_4))
        for c, p, box_4 in zip(*found[:3], strict=True)
      ]
  finally:
    # Results so far are written on Ctrl-C too.
    if out:
      text = json.dumps(results, indent=1)
      atomic_files.replace(os.path.join(out, 'coco.json'), text.encode())


def picture(
  shown_HWC: np.ndarray, found: Detections, names: tuple[str, ...]
) -> bytes:
  """Returns a PNG of an image with boxes, masks, names and probabilities."""
  if found.masks_NHW is not None:
    shown_HWC = shown_HWC.copy()
    for label, mask_HW in zip(found.labels_N, found.masks_NHW, strict=True):
      ink_C = np.array(ImageColor.getrgb(_colour(label)), np.uint8)
      shown_HWC[mask_HW] = shown_HWC[mask_HW] // 2 + ink_C // 2
  scale = max(1, _LEAST_SIDE // max(shown_HWC.shape[:2]))
  shown_HWC = shown_HWC.repeat(scale, axis=0).repeat(scale, axis=1)
  image = Image.fromarray(shown_HWC)
  pen = ImageDraw.Draw(image)
  short = min(image.size)
  letters = max(12, short // 40)
  font = ImageFont.load_default(letters)
  # The likeliest is drawn over the others.
  for label, score, box_4 in reversed(list(zip(*found[:3], strict=True))):
    colour = _colour(label)
    x0, y0, x1, y1 = (float(x) * scale for x in box_4)
    pen.rectangle((x0, y0, x1, y1), outline=colour, width=max(2, short // 200))
    text = f'{names[label]} {score:.0%}'
    above = max(0.0, y0 - letters - 4)
    pen.rectangle(pen.textbbox((x0 + 2, above), text, font), fill=colour)
    pen.text((x0 + 2, above), text, 'white', font)
  return draw.png(np.asarray(image))


def _colour(label: int) -> str:
  # Neighbouring classes differ by the golden angle.
  return f'hsl({label * 137.5 % 360:.0f}, 90%, 40%)'


def coco_ids(paths: Sequence[str]) -> list[int | str]:
  """Returns by what COCO's tools know images.

  An id is the file's name where that is a number, as COCO's are, and no other
  file's, and else its path.
  """
  stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
  numbers = [int(x) if x.isascii() and x.isdigit() else None for x in stems]
  counts = collections.Counter(numbers)
  return [
    path if number is None or counts[number] > 1 else number
    for path, number in zip(paths, numbers, strict=True)
  ]


def coco_results(
  image_id: int | str, found: Detections
) -> list[dict[str, Any]]:
  """Returns the objects of an image as COCO's tools read them.

  Masks are compressed RLE, which needs hotcoco.
  """
  results: list[dict[str, Any]] = [
    {
      'image_id': image_id,
      'category_id': int(label),
      'bbox': [round(float(x), 2) for x in (x0, y0, x1 - x0, y1 - y0)],
      'score': round(float(score), 5),
    }
    for label, score, (x0, y0, x1, y1) in zip(*found[:3], strict=True)
  ]
  if found.masks_NHW is not None:
    for result, mask_HW in zip(results, found.masks_NHW, strict=True):
      written = segments.run_lengths(mask_HW, mask_HW.shape)
      counts = written['counts'].decode()
      result['segmentation'] = written | {'counts': counts}
  return results


def section(
  checkpoint: Checkpoint, paths: Sequence[str], threshold: float
) -> Section:
  """What the queries of a detector look at, and where their boxes lie.

  The arrays are, of the objects of all images, `image` (the index of its file),
  `query`, `label`, `score`, `box` (x0, y0, x1, y1 as shares of the image) and
  `map` (hw, the attention to places, padded with zeros); of all queries
  `centres` (cx, cy, w, h, NQ4); and `files`.

  Args:
    checkpoint: of DETR.
    paths: of images, any number, as one is in memory at a time.
    threshold: the least probability of an object.

  Raises:
    ValueError: if it is not a DETR, or finds no object in any image.
  """
  model = checkpoint.model
  if model.task != 'objects' or not model.num_classes:
    raise ValueError(
      f'{checkpoint.path} finds no objects: give a checkpoint of DETR.'
    )
  detector = Detector(checkpoint, threshold, attention=True)
  side = max(model.grid(checkpoint.image_size))
  names = [checkpoint.class_name(i) for i in range(model.num_classes)]
  rows = collections.defaultdict(list)
  figures = []
  named = zip(paths, photos.unique_names(paths), strict=True)
  shown = tqdm(named, total=len(paths), unit=' images', delay=2, disable=None)
  for i, (path, stem) in enumerate(shown):
    said = detector.said_of(path)
    corners_Q4 = np.clip(said.queries['boxes'], 0, 1)
    low_Q2, high_Q2 = corners_Q4[:, :2], corners_Q4[:, 2:]
    order_N = detector.order(said)
    maps_Nhw = said.queries['attention'][order_N]
    h, w = maps_Nhw.shape[1:]
    for name, x in {
      'image': np.full(len(order_N), i),
      'query': order_N,
      'label': said.queries['labels'][order_N],
      'score': said.queries['scores'][order_N],
      'box': corners_Q4[order_N],
      'map': np.pad(maps_Nhw, ((0, 0), (0, side - h), (0, side - w))),
      'centres': np.hstack([(low_Q2 + high_Q2) / 2, high_Q2 - low_Q2])[None],
    }.items():
      rows[name].append(x)
    if i < SHEET and len(order_N):
      draw_it = functools.partial(_looks, detector, said, names)
      title = f'{stem}: where its objects are looked for'
      figures.append(Figure(f'{stem}-objects', title, draw_it))
  arrays = {name: np.concatenate(x) for name, x in rows.items()}
  if not len(arrays['query']):
    raise ValueError(
      f'{checkpoint.path} finds nothing of a probability of {threshold:.0%} or '
      'more in these images: lower --threshold.'
    )
  count, queries, _ = arrays['centres'].shape
  return Section(
    'Objects and queries',
    f'{len(arrays["query"])} objects in {count} images, each with what its '
    'query attends to in the last decoder layer; and the centres of the boxes '
    f'of {min(_QUERIES, queries)} queries in all images, green '
    'for small ones, red for wide and blue for high ones.',
    arrays | {'files': np.array(paths)},
    figures,
    Figure(
      'queries',
      'centres of the boxes of each query',
      functools.partial(_queries, arrays['centres']),
    ),
  )


def seen(said: Said, map_hw: np.ndarray) -> np.ndarray:
  """Returns a map of places at the size of the image, without the padding."""
  height, width = said.size
  on_canvas_HW = draw.enlarge(map_hw, said.canvas)[:height, :width]
  return draw.enlarge(on_canvas_HW, said.shown_HWC.shape[:2])


def _looks(detector: Detector, said: Said, names: Sequence[str]) -> bytes:
  """Draws an image with its boxes, and what is attended to for each object."""
  found = detector.found(said)
  shown = draw.pixels(picture(said.shown_HWC, found, tuple(names)))
  panels = {'found': shown}
  for i, query in enumerate(detector.order(said)[:_OBJECTS]):
    map_HW = seen(said, said.queries['attention'][query])
    title = f'{names[found.labels_N[i]]} {found.scores_N[i]:.0%}, query {query}'
    panels[title] = draw.overlay(said.shown_HWC, map_HW / map_HW.max())
  return draw.sheet([panels], [''])


def _queries(centres_NQ4: np.ndarray) -> bytes:
  """Draws a panel a query with the centres of its boxes."""
  shown = min(_QUERIES, centres_NQ4.shape[1])
  across = min(5, shown)
  down = -(-shown // across)
  figure = plots.figure(1.8 * across, 1.9 * down)
  panels = figure.subplots(down, across, squeeze=False).ravel()
  for query, axes in enumerate(panels):
    if query >= shown:
      axes.set_axis_off()
      continue
    x_N, y_N, w_N, h_N = np.clip(centres_NQ4[:, query].T, 0, 1)
    colours_N3 = np.stack([w_N, 1 - np.maximum(w_N, h_N), h_N], axis=-1)
    axes.scatter(x_N, y_N, s=6, c=colours_N3)
    axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect='equal')
    axes.set_title(f'query {query}', fontsize='small')
  return plots.png(figure, 110)
