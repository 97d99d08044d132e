"""Shared parts of all foreign formats.

A format is a table of entries; each maps some arrays of a file to some arrays
of ours. Reading, writing and the check of a file's arrays and shapes use the
same table, so that they cannot disagree.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from vit_jax.data.preprocessing import Preprocessing
from vit_jax.models import variants

# Fields that formats do not store: they do not change the output, or only with
# `rope`, which is checked separately.
_NOT_STORED = {'head_bias', 'rope_side'}
# Formats that can store every model.
ELSEWHERE = '--to=orbax, onnx or stablehlo.'

Flat = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
Reshape = Callable[[np.ndarray], np.ndarray]
# Functions from our array to the file's and back; both return views.
Layout = tuple[Reshape, Reshape]


@dataclasses.dataclass(frozen=True)
class Weights:
  """A model in this package's layout, the input of all writers.

  Attributes:
    arrays: parameters by '/'-joined name, layers unrolled, float32.
    fields: arguments of `variants.build`, with `image_size` and `num_classes`.
    preprocessing: image preprocessing.
    class_names: C names; empty if they are unknown.
    loss: training loss of the head, 'softmax' or 'sigmoid'.
  """

  arrays: Flat
  fields: dict[str, Any]
  preprocessing: Preprocessing = Preprocessing()
  class_names: tuple[str, ...] = ()
  loss: str = 'softmax'


@dataclasses.dataclass(frozen=True)
class Entry:
  """Maps arrays of a file to arrays of ours and back.

  Attributes:
    keys: keys in the file.
    ours: our names.
    to_file: converts a tuple of our arrays to the file's. Returns views if
      possible, because copies would double the memory.
    to_ours: the inverse.
  """

  keys: tuple[str, ...]
  ours: tuple[str, ...]
  to_file: Callable[..., tuple[np.ndarray, ...]] = lambda *arrays: arrays
  to_ours: Callable[..., tuple[np.ndarray, ...]] = lambda *arrays: arrays


# Layout of an array that is stored unchanged.
SAME: Layout = (lambda x: x, lambda x: x)


def one(key: str, name: str, layout: Layout = SAME) -> Entry:
  """Returns an entry that maps one array of a file to one of ours."""
  to_file, to_ours = layout
  return Entry(
    (key,), (name,), lambda x: (to_file(x),), lambda x: (to_ours(x),)
  )


def joined(
  key: str, names: tuple[str, ...], layout: Layout, axis: int = 0
) -> Entry:
  """Returns an entry that maps one array of a file to several of ours."""
  to_file, to_ours = layout
  return Entry(
    (key,),
    names,
    lambda *parts: (np.concatenate([to_file(x) for x in parts], axis),),
    lambda x: tuple(to_ours(part) for part in np.split(x, len(names), axis)),
  )


def renamed(
  key_of: Callable[[str], str],
  layout: Callable[[str, tuple[int, ...]], Layout],
) -> Callable[[Shapes], list[Entry]]:
  """Returns the table, as of a `File`, whose every entry is of one array.

  Args:
    key_of: from our name to the key.
    layout: from our name and shape to that of the file, and the inverse.
  """
  return lambda shapes: [
    one(key_of(name), name, layout(name, shape))
    for name, shape in shapes.items()
  ]


@dataclasses.dataclass(frozen=True)
class File:
  """The contents of a foreign file or directory.

  Attributes:
    path: path of the file or directory.
    arrays: the stored arrays by the file's keys.
    fields: arguments of `variants.build`, inferred from shapes and config.json.
    table: function from the shapes of our arrays by name to the entries.
    preprocessing: image preprocessing.
    class_names: C names; empty if the file has none.
    warnings: warnings for the user, one sentence each.
    loss: training loss of the head, 'softmax' or 'sigmoid'.
  """

  path: str
  arrays: Flat
  fields: dict[str, Any]
  table: Callable[[Shapes], list[Entry]]
  preprocessing: Preprocessing = Preprocessing()
  class_names: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()
  loss: str = 'softmax'


@dataclasses.dataclass(frozen=True)
class Peer:
  """A converted model as another framework runs it.

  Attributes:
    framework: its name and version.
    image_size: (H, W) in pixels it takes.
    run: from uint8 images BHWC of that size, RGB, to float32 logits BC. Scales
      images as the file says, and does not resize them. Of DETR BQC, and
      behind the logits the boxes.
    boxes: how many of the last of C are of a box.
  """

  framework: str
  image_size: tuple[int, int]
  run: Callable[[np.ndarray], np.ndarray]
  boxes: int = 0


# Names of the model outputs to compare.
COMPARED = ('logits', 'pre_logits', 'predictions', 'boxes')


def compared(outputs: Mapping[str, Any]) -> np.ndarray:
  """Concatenates a model's `COMPARED` outputs."""
  found = [np.asarray(outputs[name]) for name in COMPARED if name in outputs]
  return np.concatenate(found, -1)


class Format(Protocol):
  """Interface of the module of a foreign format."""

  DTYPES: tuple[str, ...]  # that it writes

  def matches(self, arrays: Flat, /) -> bool:
    """Whether these are the arrays of a file of this format."""

  def read(
    self, path: str, arrays: Flat, /, *config: Mapping[str, Any]
  ) -> File:
    """Reads a model off its arrays, and off config.json in a directory.

    Raises ImportError if it takes a library that is not installed, and
    ValueError, which names file and key, if no model here is like that.
    """

  def write(self, weights: Weights, target: str, dtype: str, /) -> list[str]:
    """Writes a new file or directory, whole or not at all.

    Returns a sentence on each thing that the format cannot hold or its readers
    compute otherwise. Raises ValueError if the format has no such model.
    """


def check_writable(
  fields: Mapping[str, Any],
  what: str,
  names: tuple[str, ...],
  holds: str,
  ways_out: Mapping[str, str] | None = None,
) -> None:
  """Refuses a model that a format cannot hold.

  Args:
    fields: of `variants.build`.
    what: the beginning of a sentence about the models it can.
    names: of the architectures that the format holds.
    holds: fields that it holds at any value, or, as 'field=value', at one value
      besides the default; between spaces. It holds no other value of any field
      than the default.
    ways_out: by field, where it is not `ELSEWHERE`.

  Raises:
    ValueError: naming the field, its value and the way out.
  """

  def refuse(field: str, *values: Any) -> None:
    way_out = (ways_out or {}).get(field, f'use {ELSEWHERE}')
    raise ValueError(
      f'{what} {field} {fields[field]!r}, only '
      f'{" or ".join(map(repr, values))}: {way_out}'
    )

  name, held = fields['name'], holds.split()
  if name not in names:
    refuse('name', *names)
  free = {
    *held,
    *_NOT_STORED,
    *variants.ARCHITECTURES.load(name).compute_fields,
  }
  for field, default in variants.defaults(name).items():
    more = [x.partition('=')[2] for x in held if x.startswith(f'{field}=')]
    if field in free or fields[field] == default:
      continue
    if str(fields[field]) not in more:
      refuse(field, default, *more)


def file_to_ours(file: File, shapes: Shapes) -> Flat:
  """Returns the arrays of a file as ours, float32.

  Args:
    file: from one of the formats.
    shapes: of our arrays, by name.

  Raises:
    ValueError: naming the keys that are missing, left over, of another shape or
      not finite.
  """
  entries = file.table(shapes)
  known = {key for entry in entries for key in entry.keys}
  wrong = [
    f'has the array {key!r}, for which a model of this shape has no place'
    for key in sorted(file.arrays.keys() - known)
  ]
  ours: Flat = {}
  for entry in entries:
    # Zeros that take no memory.
    zeros = (np.broadcast_to(np.float32(0), shapes[k]) for k in entry.ours)
    expected = entry.to_file(*zeros)
    stored = []
    for key, like in zip(entry.keys, expected, strict=True):
      x = file.arrays.get(key)
      if x is None:
        wrong.append(f'lacks the array {key!r}')
      elif x.shape != like.shape:
        wrong.append(
          f'has {key!r} of shape {x.shape} where {like.shape} is expected'
        )
      elif not wrong:
        stored.append(_finite_float32(x, key, file.path))
    if not wrong:
      ours |= zip(entry.ours, entry.to_ours(*stored), strict=True)
  if wrong:
    more = f', and {len(wrong) - 5} more' if len(wrong) > 5 else ''
    kind = looks_like(file.arrays.keys() - known)
    raise ValueError(f'{file.path} {"; ".join(wrong[:5])}{more}.{kind}')
  return ours


# Descriptions of unsupported files, by patterns of their keys.
_LOOKS = {
  r'(^|\.)layers\.\d\.blocks\.': 'Swin',
  r'(^|\.)model\.\d+\.(conv|cv\d|m)\.': 'a YOLO of Ultralytics',
  r'relative_position|rel_pos': 'BEiT, data2vec or another model with relative '
  'positions',
  r'(^|\.)visual\.|resblocks': "open_clip's or OpenAI's CLIP: convert it with "
  'transformers',
  r'(^|\.)embeds\.': "timm's NaFlexViT",
  r'embeddings\.patch_embed': 'a file of transformers: give its folder with '
  'config.json',
  r'running_mean': 'a network with BatchNorm, other than ResNet-50, 101 or 152 '
  'with the classifier and the names of torchvision',
  r'dwconv|conv_dw': 'ConvNeXt',
  r'(^|\.)rope\.': 'a ViT with learned rotary frequencies',
}


def looks_like(keys: Iterable[str]) -> str:
  """Returns a sentence on the model that has such keys; empty if unknown."""
  all_keys = '\n'.join(keys)
  for pattern, what in _LOOKS.items():
    if re.search(pattern, all_keys, re.MULTILINE):
      return f' It looks like {what}.'
  return ''


def ours_to_file(arrays: Flat, table: Callable[[Shapes], list[Entry]]) -> Flat:
  """Returns our arrays as those of a file, by its keys; see `File.table`."""
  flat: Flat = {}
  for entry in table({name: x.shape for name, x in arrays.items()}):
    stored = entry.to_file(*(arrays[name] for name in entry.ours))
    flat |= zip(entry.keys, stored, strict=True)
  return flat


def square_side(patches: int, path: str) -> int:
  """Returns the side of a square grid of patches.

  Raises:
    ValueError: if there is none.
  """
  side = math.isqrt(max(patches, 0))
  if side * side != patches or not side:
    raise ValueError(
      f'{path} has position embeddings for {patches} patches, which is no '
      'square grid.'
    )
  return side


def _finite_float32(x: np.ndarray, key: str, path: str) -> np.ndarray:
  with np.errstate(over='ignore'):
    x = x.astype(np.float32, copy=False)
  # A sum of squares would need less memory, but overflows.
  bad = x.size - np.count_nonzero(np.isfinite(x))
  if bad:
    raise ValueError(
      f'{path}: {key!r} has {bad:,} values that are no finite float32 numbers: '
      'the file is damaged, or its training diverged.'
    )
  return x
