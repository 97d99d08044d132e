"""What there is to see of a checkpoint, one kind a function.

Each gives a `Section`: arrays for those who plot themselves, figures for those
who look, and a few words about both.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.visualize import distance as distance_lib
from vit_jax.visualize import draw, filters, similarity
from vit_jax.visualize import rollout as rollout_lib
from vit_jax.visualize.photos import Photograph
from vit_jax.visualize.subject import Subject

# Photographs in one picture.
SHEET = 8


@dataclasses.dataclass(frozen=True)
class Figure:
  """A picture.

  Attributes:
    name: of its file, without extension.
    caption: what it shows.
    draw: gives the PNG.
  """

  name: str
  caption: str
  draw: Callable[[], bytes]


@dataclasses.dataclass(frozen=True)
class Section:
  """Arrays and pictures of one kind.

  Attributes:
    title: for people.
    text: what the figures show, and how to read them.
    arrays: by name, as they go into an .npz.
    figures: the pictures.
    sheet: many of them in one, for the folder; None if there is but one.
  """

  title: str
  text: str
  arrays: dict[str, np.ndarray]
  figures: Sequence[Figure]
  sheet: Figure | None = None


def rollout(
  subjects: Sequence[Subject],
  fusions: Sequence[str] = ('mean',),
  discard: float = 0.0,
  classes: Sequence[str] = (),
) -> Section:
  """What of each image reaches the output, as a whole or for classes.

  The arrays are `maps` (KNhw: one for every fusion and class, or the image as a
  whole), `fusions` and `classes` (of the K maps, '' for the whole) and `files`.
  Those of the second model, but `files`, start with `beside_1_`, and so on.

  Args:
    subjects: models side by side, on the same images.
    fusions: of the heads.
    discard: as in `rollout.rollout`.
    classes: names or indices.

  Raises:
    ValueError: if a model has no attention, or not such a class.
  """
  arrays = {'files': subjects[0].files}
  panels: dict[str, tuple[Subject, np.ndarray]] = {}
  for i, subject in enumerate(subjects):
    checkpoint = subject.checkpoint
    indices: list[Any] = [checkpoint.class_index(text) for text in classes]
    ways = list(itertools.product(fusions, indices or [None]))
    names = ['' if c is None else checkpoint.class_name(c) for _, c in ways]
    maps_KNhw = []
    for (fusion, index), name in zip(ways, names, strict=True):
      class_N = index if index is None else np.full(len(subject.files), index)
      maps_KNhw.append(rollout_maps(subject, fusion, discard, class_N))
      model = f'{i + 1}: {pathlib.PurePath(subject.label).name}'
      title = [model] * (len(subjects) > 1) + [fusion] * (len(fusions) > 1)
      panels['\n'.join(filter(None, [*title, name]))] = subject, maps_KNhw[-1]
    prefix = f'beside_{i}_' if i else ''
    arrays |= {
      f'{prefix}maps': np.stack(maps_KNhw),
      f'{prefix}fusions': np.array([fusion for fusion, _ in ways]),
      f'{prefix}classes': np.array(names),
    }
  figures = [
    figure
    for n in range(len(subjects[0].photographs))
    for title, (subject, maps_Nhw) in panels.items()
    for figure in _of_map(subject.photographs[n], maps_Nhw[n], title)
  ]

  def sheet() -> bytes:
    shown = subjects[0].photographs[:SHEET]
    lines = [{'image': photograph.shown()} for photograph in shown]
    for title, (subject, maps_Nhw) in panels.items():
      for n, line in enumerate(lines):
        line |= over(subject.photographs[n].shown(), maps_Nhw[n], title)
    return draw.sheet(lines, [photograph.name for photograph in shown])

  how = f'heads fused by their {", ".join(fusions)}'
  if discard:
    how += f', the lowest {discard:.0%} of the weights discarded'
  if classes:
    how += ', weighted by the gradients of the class'
  return Section(
    'Attention rollout',
    'How much of each patch reaches the output, over all layers '
    f'({how}). Brighter is more; the masked picture keeps the half of the '
    'pixels with the most.',
    arrays,
    figures,
    Figure('rollout', 'attention rollout', sheet),
  )


def over(
  shown_HWC: np.ndarray, map_hw: np.ndarray, title: str
) -> dict[str, np.ndarray]:
  """Returns a map over a photograph, and its highest half, by their titles."""
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
  """Returns a map Nhw of each image, for a class of its own if given."""
  found = []
  at = 0
  for layers, batch in subject.at_work('rollout'):
    class_B = None
    if class_N is not None:
      class_B = np.zeros(len(layers.logits_BC), np.int32)
      class_B[: len(batch)] = class_N[at : at + len(batch)]
    maps_Bhw = rollout_lib.rollout(layers, fusion, discard, class_B)
    found.append(np.asarray(maps_Bhw)[: len(batch)])
    at += len(batch)
  return np.concatenate(found)


def _of_map(
  photograph: Photograph, map_hw: np.ndarray, title: str
) -> Iterator[Figure]:
  parts = [photograph.name, *title.splitlines()]
  caption = ', '.join(parts)
  name = '-'.join([photograph.name, *map(_safe, parts[1:])])
  for kind in ('overlay', 'heat', 'masked'):

    def make(kind: str = kind) -> bytes:
      return draw.png(getattr(draw, kind)(photograph.shown(), map_hw))

    yield Figure(f'rollout-{name}-{kind}', f'{caption}: {kind}', make)


def _safe(text: str) -> str:
  """Returns a text as a part of a file's name."""
  return ''.join(c if c.isalnum() or c in '-_' else '_' for c in text)


def attention(
  subject: Subject, query: tuple[int, int] | None = None
) -> Section:
  """What a token attends to, in every layer and head.

  The arrays are `maps` (BXNhw) and `files`.

  The token is the patch at (row, column) `query`; without one, the class token
  or, where there is none, the patch in the middle.

  Raises:
    ValueError: if there is no such patch.
  """
  class_token = 'cls' in subject.checkpoint.model.extra_tokens
  found = []
  for layers, batch in subject.at_work('attention'):
    h, w = layers.grid
    if query is None and not class_token:
      query = h // 2, w // 2
    if query and not (query[0] < h and query[1] < w):
      raise ValueError(
        f'There is no patch {query[0]},{query[1]}: the model has {h} rows and '
        f'{w} columns of patches, counted from 0.'
      )
    maps = []
    for weights_BNLL in layers.attention():
      B, N, L, _ = weights_BNLL.shape
      extra = L - h * w
      row = extra + query[0] * w + query[1] if query else 0
      to_patches_BNL = np.asarray(weights_BNLL[:, :, row, extra:])
      maps.append(to_patches_BNL.reshape(B, N, h, w))
    found.append(np.stack(maps, axis=1)[: len(batch)])
  maps_BXNhw = np.concatenate(found)
  token = f'patch {query[0]},{query[1]}' if query else 'the class token'

  def of(photograph: Photograph, maps_XNhw: np.ndarray) -> Figure:
    return Figure(
      f'attention-{photograph.name}',
      f'{photograph.name}: attention of {token}',
      lambda: draw.heads(photograph.shown(), maps_XNhw, query),
    )

  return Section(
    'Attention of every head',
    f'What {token} attends to. Each map has its own scale, from 0 to its '
    'largest weight.',
    {'maps': maps_BXNhw, 'files': subject.files},
    [*map(of, subject.photographs, maps_BXNhw)],
  )


def distance(subjects: Sequence[Subject]) -> Section:
  """How far heads look, for one model or several side by side.

  The arrays are the distances XN in pixels, averaged over the images: `all`,
  `beside_1_all` for the second model, and so on.
  """
  arrays: dict[str, np.ndarray] = {}
  panels = []
  for i, subject in enumerate(subjects):
    sum_XN: Any = 0
    for layers, batch in subject.at_work(f'distance {subject.label}'.strip()):
      pixels = subject.checkpoint.image_size[0] / layers.grid[0]
      mean_XN = distance_lib.mean_distances(layers, pixels, len(batch))
      sum_XN += len(batch) * mean_XN
    uniform = distance_lib.uniform(layers.grid) * pixels
    mean_XN = sum_XN / len(subject.photographs)
    panels.append((subject.label, mean_XN, uniform))
    arrays[f'beside_{i}_all' if i else 'all'] = mean_XN
  n = len(subjects[0].photographs)
  return Section(
    'Mean attention distance',
    'How far from a patch the patches that it attends to are, in pixels '
    'of the image, weighted by the attention and averaged over '
    f'{n} {"image" if n == 1 else "images"} (figures 7 and 11 of the paper).',
    arrays,
    [Figure('distance', 'a dot is a head', lambda: draw.distances(panels))],
  )


def first_filters(subject: Subject) -> Section:
  """The filters that see the image itself: `components` XPPC."""
  name, kernel = filters.first_kernel(subject.checkpoint.params)
  components = filters.principal_components(kernel, filters.COMPONENTS)
  what = 'patch embedding'
  if name == 'conv_root':
    what = "ResNet's first convolution"
  caption = f'principal components of the {what}'
  return Section(
    'Filters',
    f'The leading {len(components)} principal components of the '
    f'{kernel.shape[-1]} filters of the {what} ({kernel.shape[0]}x'
    f'{kernel.shape[1]} pixels), gray where they are 0 (figure 7 of the '
    'paper).',
    {'components': components},
    [Figure('filters', caption, lambda: draw.filters(components))],
  )


def posemb(subject: Subject) -> Section:
  """How alike position embeddings are, by their cosine.

  The array `cosines` is Xhwhw, X tables of embeddings; or XOO for relative
  embeddings, X tables of O offsets, with their `names`.

  Raises:
    ValueError: if the model has none.
  """
  checkpoint = subject.checkpoint
  kind = similarity.kind_of(checkpoint)
  if kind == 'relative':
    panels = similarity.of_offsets(checkpoint)
    text = (
      'Cosine similarity of the embeddings of every two offsets between query '
      'and key, counted in patches along the raster, or along a row or column.'
    )
  else:
    tables = similarity.tables(checkpoint)
    grid = checkpoint.model.grid(checkpoint.image_size)
    panels = {
      f'layer {i + 1}' if len(tables) > 1 else '': similarity.cosine(x, grid)
      for i, x in enumerate(tables)
    }
    text = (
      'Cosine similarity of the position embedding of each patch (a tile) to '
      'those of all patches (figures 7 and 10 of the paper).'
    )
  arrays = {_safe(name): x for name, x in panels.items()}
  # Tables of rows and of columns may differ in length.
  if len({x.shape for x in panels.values()}) == 1:
    arrays = {'cosines': np.array([*panels.values()])}
  caption = f'cosine similarity, {kind}'
  return Section(
    'Position embeddings',
    text,
    arrays | {'names': np.array([*panels])},
    [Figure('posemb', caption, lambda: draw.similarities(panels))],
  )
