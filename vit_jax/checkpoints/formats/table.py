"""Code that all foreign formats share.

A format has a table of entries. Each entry maps some arrays of a file to some
arrays of our model ("our arrays"), which have vit_jax's parameter names ("our
names"). Reading, writing and all checks use the same table.

A format is a module with `DTYPES`, the dtypes that `write` supports, and the
functions below. Formats that are only read lack `DTYPES` and `write`; `hf` and
`npz` lack `matches`.

- `matches(arrays)` returns whether the arrays are from a file of this format.
- `read(path, arrays)` returns a `File`. For a directory of timm, the call is
  `read(path, arrays, config)`, where `config` is the content of config.json.
  For a directory of transformers, it is `read(path, config)`. `read` raises
  ImportError if a library that the format needs is not installed. It raises
  ValueError if the model is not supported.
- `write(weights, target, dtype)` writes a new file or directory completely or
  not at all. It returns a note for each setting that is not stored, or that
  readers of the format interpret differently. It raises the errors of
  `atomic_files.new_file`, such as FileExistsError, and ValueError if the format
  cannot store the model.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.data.preprocessing import Preprocessing
from vit_jax.models import variants

# Fields that formats need not store. `head_bias` only initialises the head.
# `rope_side` matters only with `rope`, and `rope` is checked.
_NOT_STORED = {'head_bias', 'rope_side'}
# The last sentence of error messages about models that a format cannot store.
ELSEWHERE = (
  'Choose another --to: orbax and stablehlo store every model, and onnx stores '
  'models up to 2 GB.'
)

Flat = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
Reshape = Callable[[np.ndarray], np.ndarray]
# Functions that convert our array to the file's array and back; both return
# views.
Layout = tuple[Reshape, Reshape]


@dataclasses.dataclass(frozen=True)
class Weights:
  """A model in the layout of this package; the input of each format's `write`.

  The last three attributes are as in `opening.Checkpoint`.
  """

  arrays: Flat  # by '/'-joined name, float32, with layers unrolled
  fields: dict[str, Any]  # all arguments of `variants.build`
  preprocessing: Preprocessing = Preprocessing()
  class_names: tuple[str, ...] = ()
  loss: str = 'softmax'


@dataclasses.dataclass(frozen=True)
class Entry:
  """Maps some arrays of a file to some of our arrays and back.

  `to_file` and `to_ours` convert all arrays of the entry. They return views if
  possible, because copies would double the memory.
  """

  keys: tuple[str, ...]  # in the file
  ours: tuple[str, ...]  # our names
  to_file: Callable[..., tuple[np.ndarray, ...]] = lambda *arrays: arrays
  to_ours: Callable[..., tuple[np.ndarray, ...]] = lambda *arrays: arrays


# Layout of an array that is stored unchanged.
SAME: Layout = (lambda x: x, lambda x: x)


def one(key: str, name: str, layout: Layout = SAME) -> Entry:
  """Returns an entry that maps one array of a file to one of our arrays."""
  to_file, to_ours = layout
  return Entry(
    (key,), (name,), lambda x: (to_file(x),), lambda x: (to_ours(x),)
  )


def joined(
  key: str, names: tuple[str, ...], layout: Layout, axis: int = 0
) -> Entry:
  """Returns an entry for an array of a file that concatenates our arrays.

  Writing converts each of our arrays by `layout`, then joins them along `axis`.
  """
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
  """Returns a `File.table` for a file whose arrays match ours one to one.

  `key_of` maps our name to the file's key. `layout` maps our name and shape to
  a `Layout`.
  """
  return lambda shapes: [
    one(key_of(name), name, layout(name, shape))
    for name, shape in shapes.items()
  ]


@dataclasses.dataclass(frozen=True)
class File:
  """The contents of a foreign file or directory.

  Attributes without a comment are as in `opening.Checkpoint`.
  """

  path: str
  arrays: Flat  # by the file's keys
  fields: dict[str, Any]  # arguments of `variants.build`
  table: Callable[[Shapes], list[Entry]]  # from the shapes of our arrays
  preprocessing: Preprocessing = Preprocessing()
  class_names: tuple[str, ...] = ()
  warnings: tuple[str, ...] = ()  # sentences for the user
  loss: str = 'softmax'


@dataclasses.dataclass(frozen=True)
class Peer:
  """A model in any framework, for comparison with another model.

  `run` takes RGB images, uint8 [B, H, W, 3]. It returns the result of
  `compared`, float32 [B, ..., C]. DETR gives [B, Q, C + 5]: C classes, "no
  object" and a box.
  """

  framework: str  # name and version
  image_size: tuple[int, int]  # (H, W) in pixels
  run: Callable[[np.ndarray], np.ndarray]
  boxes: int = 0  # number of last channels that hold boxes: 4 for DETR


# Names of model outputs that `convert --check` compares.
COMPARED = ('logits', 'pre_logits', 'predictions', 'boxes')


def compared(outputs: Mapping[str, Any]) -> np.ndarray:
  """Concatenates the outputs in `COMPARED` along the last axis."""
  found = [np.asarray(outputs[name]) for name in COMPARED if name in outputs]
  return np.concatenate(found, -1)


def check_writable(
  fields: Mapping[str, Any], start: str, names: tuple[str, ...], holds: str
) -> None:
  """Raises ValueError if a format cannot store a model.

  Args:
    fields: arguments of `variants.build`.
    start: beginning of the error message, as in 'timm has no model with'.
    names: the architectures that the format stores.
    holds: fields that the format stores, separated by spaces. 'field' allows
      any value; 'field=value' allows this value and the default. Other fields
      that change the outputs must have their default.
  """

  def refuse(field: str, *values: Any) -> None:
    head = field == 'representation_size'
    raise ValueError(
      f'{start} {field} {fields[field]!r}, only '
      f'{" or ".join(map(repr, values))}. '
      f'{"Leave out the head with --head=drop. " * head}{ELSEWHERE}'
    )

  name, held = fields['name'], holds.split()
  if name not in names:
    refuse('name', *names)
  compute_fields = variants.ARCHITECTURES.load(name).compute_fields
  free = {*held, *_NOT_STORED, *compute_fields}
  for field, default in variants.defaults(name).items():
    if field in free or fields[field] == default:
      continue
    more = [x.partition('=')[2] for x in held if x.startswith(f'{field}=')]
    if str(fields[field]) not in more:
      refuse(field, default, *more)


def file_to_ours(file: File, shapes: Shapes) -> Flat:
  """Converts the arrays of a file to our arrays, float32.

  `shapes` are the shapes of our arrays. Raises ValueError if arrays are
  missing, unknown, of another shape or not finite.
  """
  entries = file.table(shapes)
  known = {key for entry in entries for key in entry.keys}
  wrong = [
    f'has the array {key!r}, which the model of the other arrays lacks'
    for key in sorted(file.arrays.keys() - known)
  ]
  ours: Flat = {}
  for entry in entries:
    # Broadcast zeros take no memory.
    zeros = (np.broadcast_to(np.float32(0), shapes[k]) for k in entry.ours)
    expected = entry.to_file(*zeros)
    stored = []
    for key, like in zip(entry.keys, expected, strict=True):
      x = file.arrays.get(key)
      if x is None:
        wrong.append(f'lacks the array {key!r}')
      elif x.shape != like.shape:
        wrong.append(
          f'has {key!r} of shape {x.shape}, but {like.shape} is expected'
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


# Maps patterns of keys to descriptions of unsupported files.
_LOOKS = {
  r'(^|\.)layers\.\d\.blocks\.': 'Swin',
  r'(^|\.)model\.\d+\.(conv|cv\d|m)\.': 'a YOLO of Ultralytics',
  r'relative_position|rel_pos': 'BEiT, data2vec or another model with relative '
  'positions',
  r'(^|\.)visual\.|resblocks': "open_clip's or OpenAI's CLIP: give the model "
  'as timm://NAME.TAG or hf://ORG/NAME',
  r'(^|\.)embeds\.': "timm's NaFlexViT",
  r'embeddings\.patch_embed': 'a file of transformers: give its folder with '
  'config.json',
  r'running_mean': "a network with BatchNorm; it must have torchvision's keys, "
  'bottleneck units and a classifier, like ResNet-50',
  r'dwconv|conv_dw': 'ConvNeXt',
  r'(^|\.)rope\.': 'a ViT with learned rotary frequencies',
}


def looks_like(keys: Iterable[str]) -> str:
  """Returns a sentence that names an unsupported model; '' for other keys."""
  all_keys = '\n'.join(keys)
  for pattern, model in _LOOKS.items():
    if re.search(pattern, all_keys, re.MULTILINE):
      return f' It looks like {model}.'
  return ''


def ours_to_file(arrays: Flat, table: Callable[[Shapes], list[Entry]]) -> Flat:
  """Converts our arrays to the arrays of a file; `table` is as in `File`."""
  flat: Flat = {}
  for entry in table({name: x.shape for name, x in arrays.items()}):
    stored = entry.to_file(*(arrays[name] for name in entry.ours))
    flat |= zip(entry.keys, stored, strict=True)
  return flat


def square_side(patches: int, path: str) -> int:
  """Returns the side of a square grid of patches, or raises ValueError."""
  side = math.isqrt(max(patches, 0))
  if side * side != patches or not side:
    raise ValueError(
      f'{path} has position embeddings for {patches} patches, which do not '
      'form a square.'
    )
  return side


def _finite_float32(x: np.ndarray, key: str, path: str) -> np.ndarray:
  with np.errstate(over='ignore'):
    x = x.astype(np.float32, copy=False)
  # A sum of squares would need less memory, but could overflow.
  bad = x.size - np.count_nonzero(np.isfinite(x))
  if bad:
    raise ValueError(
      f'{path}: {key!r} has {bad:,} values that are not finite in float32. '
      'The file is damaged, or its training diverged.'
    )
  return x
