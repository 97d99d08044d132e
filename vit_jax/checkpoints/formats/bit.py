"""The .npz checkpoints of BiT (1912.11370): ResNets of version 2.

Flat keys joined by '/', float32, as TensorFlow named its variables: a unit's
convolutions are a, b and c, and each comes after a GroupNorm of the same
letter. The head is a convolution of one pixel.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from vit_jax.checkpoints.formats import archive, npz_peer
from vit_jax.checkpoints.formats.table import (
  Entry,
  File,
  Flat,
  Peer,
  Shapes,
  Weights,
  ours_to_file,
  shapes_of,
)

DTYPES = ('float32',)
PREFIX = 'resnet/'
# The arrays do not say. It was pre-trained at this size, and takes any.
IMAGE_SIZE = (224, 224)

_CONV = 'standardized_conv2d/kernel'
_NAMES = {
  'conv_root/kernel': f'root_block/{_CONV}',
  'gn_final/scale': 'group_norm/gamma',
  'gn_final/bias': 'group_norm/beta',
  'head/kernel': 'head/conv2d/kernel',
  'head/bias': 'head/conv2d/bias',
}
_NAMES_IN_UNIT = {'conv_proj/kernel': f'a/proj/{_CONV}'}
for _number, _letter in enumerate('abc', 1):
  _NAMES_IN_UNIT |= {
    f'conv{_number}/kernel': f'{_letter}/{_CONV}',
    f'gn{_number}/scale': f'{_letter}/group_norm/gamma',
    f'gn{_number}/bias': f'{_letter}/group_norm/beta',
  }


def matches(arrays: Iterable[str]) -> bool:
  """Tells whether keys are those of a BiT file."""
  return any(key.startswith(PREFIX) for key in arrays)


def read(path: str, arrays: Flat) -> File:
  """Reads off what a checkpoint's shapes say of its model.

  Args:
    path: of the file, for messages.
    arrays: from `archive.load`.

  Raises:
    ValueError: if it is no BiT; names the file and key.
  """
  arrays = {k: x for k, x in arrays.items() if k.startswith(PREFIX)}
  # TensorFlow numbered the convolutions of some files.
  stored = {re.sub(r'(standardized_conv2d)_\d+/', r'\1/', k): k for k in arrays}

  def key_of(name: str) -> str:
    key = _key(name)
    return stored.get(key, key)

  lookup = archive.Lookup(path, arrays, key_of, 'BiT')
  return File(
    path=path,
    arrays=arrays,
    fields=_infer_fields(lookup),
    table=lambda shapes: _table(shapes, key_of),
    warnings=(
      f'{path} does not say how large its images are: '
      f'{IMAGE_SIZE[0]}x{IMAGE_SIZE[1]} pixels are assumed.',
    ),
  )


def write(weights: Weights, target: str, dtype: str) -> list[str]:
  """Writes a checkpoint that timm and the code of BiT read.

  Args:
    weights: of a ResNet, version 2.
    target: the new file.
    dtype: one of `DTYPES`.

  Returns:
    What the format could not hold, a sentence each.

  Raises:
    ValueError: if BiT has no such model.
    FileExistsError: if something is there already.
  """
  fields = weights.fields
  for field, value in {'name': 'resnet', 'version': 2, 'axial': False}.items():
    if fields[field] != value:
      raise ValueError(
        f'A BiT .npz file cannot hold a model with {field} {fields[field]!r}, '
        f'only {value!r}: use --to=orbax, onnx or stablehlo.'
      )
  entries = _table(shapes_of(weights.arrays), _key)
  archive.save(target, ours_to_file(weights.arrays, entries), dtype)
  lines = archive.not_held(weights)
  if fields['image_size'] != IMAGE_SIZE:
    H, W = fields['image_size']
    lines.append(
      f'The image size {H}x{W}: its readers assume '
      f'{IMAGE_SIZE[0]}x{IMAGE_SIZE[1]} unless they are told.'
    )
  return lines


def open_peer(path: str) -> Peer:
  """Opens a file with timm.

  Raises:
    ImportError: if timm is not installed.
    ValueError: if timm cannot read it.
  """
  return npz_peer.open_resnet(path, read(path, archive.load(path)).fields)


def count_units(keys: Iterable[str], prefix: str) -> tuple[int, ...]:
  """Returns the units of each stage, by keys such as block1/unit01/..."""
  pattern = re.compile(rf'{re.escape(prefix)}block(\d)/(unit\d+)/')
  units = {match.groups() for key in keys if (match := pattern.match(key))}
  stages = [stage for stage, _ in units]
  return tuple(stages.count(stage) for stage in sorted(set(stages)))


def _infer_fields(lookup: archive.Lookup) -> dict[str, Any]:
  *_, width = lookup.shape('conv_root/kernel', 4)
  layers = count_units(lookup.arrays, PREFIX)
  lookup.check_layers(sum(layers))
  return {
    'name': 'resnet',
    'version': 2,
    'layers': layers,
    'width': width,
    'num_classes': (
      lookup.shape('head/kernel', 4)[3] if lookup.has('head/kernel') else 0
    ),
    'image_size': IMAGE_SIZE,
  }


def _key(name: str) -> str:
  """Returns the published key of one of our names."""
  if name in _NAMES:
    return PREFIX + _NAMES[name]
  block, unit, rest = name.split('/', 2)
  number = int(unit.removeprefix('unit'))
  return f'{PREFIX}{block}/unit{number:02d}/{_NAMES_IN_UNIT[rest]}'


def _table(shapes: Shapes, key_of: Callable[[str], str]) -> list[Entry]:
  """Returns the entries of our arrays under the keys that `key_of` gives."""
  return [
    Entry(
      (key_of(name),),
      (name,),
      to_file=lambda x: (x[None, None],),
      to_ours=lambda x: (x[0, 0],),
    )
    if name == 'head/kernel'
    else Entry((key_of(name),), (name,))
    for name in shapes
  ]
