"""Pictures and arrays of a checkpoint, as one `Section` per kind."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.visualize import distance as distance_lib
from vit_jax.visualize import draw, filters, similarity
from vit_jax.visualize import rollout as rollout_lib
from vit_jax.visualize.photos import Photograph, Subject

# Maximum number of photographs in one picture.
SHEET = 8


@dataclasses.dataclass(frozen=True)
class Figure:
  """A picture: a file name without extension, and a function that draws it."""

  name: str
  caption: str
  draw: Callable[[], bytes]  # returns a PNG


@dataclasses.dataclass(frozen=True)
class Section:
  """Arrays and pictures of one kind; the text says how to read them."""

  title: str
  text: str
  arrays: dict[str, np.ndarray]  # by their names in the .npz file
  figures: Sequence[Figure]


def sheets(
  name: str,
  caption: str,
  photographs: Sequence[Photograph],
  line: Callable[[int], dict[str, np.ndarray]],
) -> list[Figure]:
  """Returns pictures with one line per photograph, up to `SHEET` lines each.

  The names of pictures after the first get a number. `line` takes the index of
  a photograph and returns images by title.
  """

  def figure(start: int) -> Figure:
    part = range(start, min(start + SHEET, len(photographs)))
    names = [photographs[n].name for n in part]
    number = f'-{start // SHEET + 1}' if start else ''
    return Figure(
      f'{name}{number}',
      caption,
      lambda: draw.sheet([*map(line, part)], names),
    )

  return [*map(figure, range(0, len(photographs), SHEET))]


def rollout(
  subject: Subject,
  fusion: str = 'mean',
  discard: float = 0.0,
  classes: Sequence[str] = (),
) -> Section:
  """Attention rollout: how much of each patch reaches the output.

  Pictures: the map over the photograph, and the half of the photograph where
  the map is highest. Arrays: `maps` (class, image, h, w) from 0 to 1, `classes`
  ('' if no class was given), `files`.

  Raises:
    ValueError: if the model lacks attention between all tokens, a class is
      unknown or ambiguous, or a model that does not classify gets a class.
  """
  checkpoint, photographs = subject.checkpoint, subject.photographs
  indices = [*map(checkpoint.class_index, classes)]
  names = [*map(checkpoint.class_name, indices)] or ['']
  wanted: list[Any] = [np.full(len(photographs), index) for index in indices]
  maps = [rollout_maps(subject, fusion, discard, x) for x in wanted or [None]]

  def line(n: int) -> dict[str, np.ndarray]:
    shown_HWC = photographs[n].shown()
    images = {'image': shown_HWC}
    for name, maps_Nhw in zip(names, maps, strict=True):
      images |= over(shown_HWC, maps_Nhw[n], name)
    return images

  how = f'heads fused by their {fusion}'
  if discard:
    how += f', the lowest {discard:.0%} of the weights discarded'
  if classes:
    how += ', weighted by the gradients of the class'
  return Section(
    'Attention rollout',
    'How much of each patch reaches the output, over all layers '
    f'({how}). Brighter means more. The masked picture shows only the half of '
    'the pixels with the highest values.',
    {
      'maps': np.stack(maps),
      'classes': np.array(names),
      'files': subject.files,
    },
    sheets('rollout', 'attention rollout', photographs, line),
  )


def over(
  shown_HWC: np.ndarray, map_hw: np.ndarray, title: str
) -> dict[str, np.ndarray]:
  """Returns a photograph under a map, and its half where the map is highest."""
  title = f'{title}: ' if title else ''
  return {
    f'{title}rollout': draw.overlay(shown_HWC, map_hw),
    f'{title}highest half': draw.masked(shown_HWC, map_hw),
  }


def rollout_maps(
  subject: Subject,
  fusion: str = 'mean',
  discard: float = 0.0,
  class_N: np.ndarray | None = None,
) -> np.ndarray:
  """Returns the maps Nhw of all images, for the classes `class_N` if given."""
  found: list[np.ndarray] = []
  for layers, batch in subject.at_work('rollout'):
    class_B = None
    if class_N is not None:
      class_B = class_N[len(found) : len(found) + len(batch)]
      class_B = np.pad(class_B, (0, len(layers.logits_BC) - len(batch)))
    maps_Bhw = rollout_lib.rollout(layers, fusion, discard, class_B)
    found += [*np.asarray(maps_Bhw)[: len(batch)]]
  return np.stack(found)


def attention(
  subject: Subject, query: tuple[int, int] | None = None
) -> Section:
  """Attention of one token, in every layer and head.

  Arrays: `maps` (image, layer, head, h, w), softmax weights; `files`.

  Args:
    query: (row, column) of a patch; None for the class token, or for the middle
      patch if the model lacks a class token.

  Raises:
    ValueError: if the model lacks attention between all tokens, or the patch is
      outside of the grid.
  """
  tokens = subject.checkpoint.model.extra_tokens
  found: list[np.ndarray] = []
  for layers, batch in subject.at_work('attention'):
    h, w = layers.grid
    if query is None and 'cls' not in tokens:
      query = h // 2, w // 2
    if query and not (query[0] < h and query[1] < w):
      raise ValueError(
        f'Patch {query[0]},{query[1]} is outside of the grid. Give a row from '
        f'0 to {h - 1} and a column from 0 to {w - 1}.'
      )
    row = len(tokens) + query[0] * w + query[1] if query else 0
    maps_XBNL = np.stack(
      [x_BNLL[:, :, row, len(tokens) :] for x_BNLL in layers.attention()]
    )
    maps_XBNhw = maps_XBNL.reshape(*maps_XBNL.shape[:3], h, w)
    found += [*maps_XBNhw.swapaxes(0, 1)[: len(batch)]]
  token = f'patch {query[0]},{query[1]}' if query else 'the class token'

  def of(photograph: Photograph, maps_XNhw: np.ndarray) -> Figure:
    return Figure(
      f'attention-{photograph.name}',
      f'{photograph.name}: attention of {token}',
      lambda: draw.heads(photograph.shown(), maps_XNhw, query),
    )

  return Section(
    'Attention of every head',
    f'Attention from {token} to all patches. Each map has its own scale, from '
    '0 to its largest weight.',
    {'maps': np.stack(found), 'files': subject.files},
    [*map(of, subject.photographs, found)],
  )


def distance(subject: Subject) -> Section:
  """Mean attention distance in pixels (figures 7 and 11 of the ViT paper).

  Array: `all` (layer, head), averaged over the images.

  Raises:
    ValueError: if the model lacks attention between all tokens.
  """
  sum_XN: Any = 0
  for layers, batch in subject.at_work('distance'):
    pixels = subject.checkpoint.image_size[0] / layers.grid[0]
    mean_XN = distance_lib.mean_distances(layers, pixels, len(batch))
    sum_XN += len(batch) * mean_XN
  uniform = distance_lib.between(layers.grid).mean() * pixels
  n = len(subject.photographs)
  mean_XN = sum_XN / n
  drawn = functools.partial(draw.distances, mean_XN, uniform)
  return Section(
    'Mean attention distance',
    'Mean distance between a patch and the patches that it attends to, '
    'weighted by attention (figures 7 and 11 of the ViT paper). It is in '
    f'pixels and averaged over {n} {"image" if n == 1 else "images"}.',
    {'all': mean_XN},
    [Figure('distance', 'each dot is a head', drawn)],
  )


def first_filters(subject: Subject) -> Section:
  """Principal components of the patch embedding (figure 7 of the ViT paper).

  For a ResNet or hybrid, these are components of the first convolution. Array:
  `components` (count, P, P, RGB), each of length 1.

  Raises:
    ValueError: if the model has neither of these kernels.
  """
  name, kernel = filters.first_kernel(subject.checkpoint.params)
  components = filters.principal_components(kernel, filters.COMPONENTS)
  is_resnet = name == 'conv_root'
  what = "ResNet's first convolution" if is_resnet else 'patch embedding'
  caption = f'principal components of the {what}'
  return Section(
    'Filters',
    f'The leading {len(components)} principal components of the '
    f'{kernel.shape[-1]} filters of the {what} ({kernel.shape[0]}x'
    f'{kernel.shape[1]} pixels), gray where they are 0 (figure 7 of the '
    'ViT paper).',
    {'components': components},
    [Figure('filters', caption, lambda: draw.filters(components))],
  )


def posemb(subject: Subject) -> Section:
  """Similarity of position embeddings (figures 7 and 10 of the ViT paper).

  Array: `cosines` (table, h, w, h, w), with one table, or one per layer if
  every layer adds its own embeddings.

  Raises:
    ValueError: if the model is not a ViT that adds position embeddings.
  """
  checkpoint = subject.checkpoint
  model: Any = checkpoint.model
  grid = model.grid(checkpoint.image_size)
  tables = similarity.tables(checkpoint)
  cosines_Xhwhw = np.stack([similarity.cosine(x, grid) for x in tables])
  caption = f'cosine similarity, {model.posemb}'
  return Section(
    'Position embeddings',
    'Cosine similarity of the position embedding of each patch (a tile) to '
    'the embeddings of all patches (figures 7 and 10 of the ViT paper).',
    {'cosines': cosines_Xhwhw},
    [Figure('posemb', caption, lambda: draw.similarities(cosines_Xhwhw))],
  )
