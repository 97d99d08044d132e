"""Where DETR looks for what it finds, and what each query is there for.

After figures 3, 6 and 7 of "End-to-End Object Detection with Transformers"
(2005.12872).
"""

import functools
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.projects.detr.detections import Detector, Said, picture
from vit_jax.training import plots
from vit_jax.visualize import draw, photos
from vit_jax.visualize.sections import SHEET, Figure, Section

# Objects of an image, and queries, in one picture.
_OBJECTS, _QUERIES = 6, 20


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
    ValueError: if it is none of DETR, or finds no object in any image.
  """
  model = checkpoint.model
  if model.task != 'objects' or not model.num_classes:
    raise ValueError(
      f'{checkpoint.path} finds no objects: give a checkpoint of DETR.'
    )
  detector = Detector(checkpoint, threshold, attention=True)
  side = max(model.grid(checkpoint.image_size))
  names = [checkpoint.class_name(i) for i in range(model.num_classes)]
  rows: dict[str, list[np.ndarray]] = {}
  centres, figures = [], []
  named = zip(paths, photos.unique_names(paths), strict=True)
  shown = tqdm(named, total=len(paths), unit=' images', delay=2, disable=None)
  for i, (path, stem) in enumerate(shown):
    said = detector.said_of(path)
    corners_Q4 = np.clip(said.queries['boxes'], 0, 1)
    low_Q2, high_Q2 = corners_Q4[:, :2], corners_Q4[:, 2:]
    centres.append(
      np.concatenate([(low_Q2 + high_Q2) / 2, high_Q2 - low_Q2], 1)
    )
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
    }.items():
      rows.setdefault(name, []).append(x)
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
  centres_NQ4 = np.stack(centres)
  count = len(centres_NQ4)
  return Section(
    'Objects and queries',
    f'{len(arrays["query"])} objects in {count} images, each with what its '
    'query attends to in the last decoder layer; and the centres of the boxes '
    f'of {min(_QUERIES, centres_NQ4.shape[1])} queries in all images, green '
    'for small ones, red for wide and blue for high ones.',
    arrays | {'centres': centres_NQ4, 'files': np.array(paths)},
    figures,
    Figure(
      'queries',
      'centres of the boxes of each query',
      functools.partial(_queries, centres_NQ4),
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
