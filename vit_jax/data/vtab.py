"""VTAB-1k: 19 tasks of 1,000 training images each, on datasets of TFDS.

Splits and labels are those of google-research/task_adaptation, which defines
the benchmark (arXiv 1910.04867): 800 images from the start of the training
split, 200 from the start of the validation split, and the whole test split.
Where TFDS has no validation split, it is cut from another at a percentage.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # Importing TFDS takes a second.
  from vit_jax.data.tfds_source import Label, TfdsSource

_log = logging.getLogger(__name__)

# Of the name of a task, and not of a dataset or a folder.
PREFIX = 'vtab/'
SPLITS = ('train800', 'val200', 'train800val200', 'test')

# A split of TFDS, and the percentage at which a part of it begins.
_Start = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class FromObjects:
  """Classes that follow from the objects in an image; see `tfds_source.Label`.

  `classify` goes from the fields of each object that are read, each of one row
  an object, to the class.
  """

  of_object: tuple[str, ...]
  classify: Callable[[Mapping[str, Any]], int]
  class_names: tuple[str, ...]

  @property
  def fields(self) -> dict[str, tuple[str, ...]]:
    return {'objects': self.of_object}

  def __call__(self, record: Mapping[str, Any]) -> int:
    return self.classify(record['objects'])


@dataclasses.dataclass(frozen=True)
class Task:
  """One task.

  Attributes:
    title: as in table 9 of the ViT paper.
    group: 'natural', 'specialised' or 'structured'.
    tfds: name of the dataset.
    num_classes: C.
    test_examples: in its test split.
    label: the field of TFDS with the class, or how it follows from the objects.
    values: of that field, where there are more than C and neighbours share one.
    val: where its validation split begins.
    test: where its test split begins, which goes on to the end.
    scale: what pixels are multiplied by to be in 0..255.
  """

  title: str
  group: str
  tfds: str
  num_classes: int
  test_examples: int
  label: str | FromObjects = 'label'
  values: int = 0
  val: _Start = ('validation', 0)
  test: _Start = ('test', 0)
  scale: int = 1


def _count(objects: Mapping[str, Any]) -> int:
  """CLEVR's images have 3 to 10 objects."""
  return len(objects['size']) - 3


def _nearest_object(objects: Mapping[str, Any]) -> int:
  """Distance of CLEVR's nearest object, in its own unit; edges to the left."""
  distance = np.asarray(objects['pixel_coords'])[:, 2].min()
  return int(np.searchsorted((8.0, 8.5, 9.0, 9.5, 10.0), distance))


def _nearest_vehicle(objects: Mapping[str, Any]) -> int:
  """Distance of KITTI's nearest car, van or truck, in metres ahead."""
  is_vehicle = np.asarray(objects['type']) < 3
  metres = np.asarray(objects['location']).reshape(-1, 3)[is_vehicle, 2]
  return int(np.searchsorted((8.0, 20.0, 999.0), metres.min(initial=1000.0)))


# In the order of table 9.
# fmt: off
TASKS: dict[str, Task] = {
  'caltech101': Task(
    'Caltech101', 'natural', 'caltech101', 102, 6_084, val=('train', 90)),
  'cifar100': Task(
    'CIFAR-100', 'natural', 'cifar100', 100, 10_000, val=('train', 90)),
  'dtd': Task(
    'DTD', 'natural', 'dtd', 47, 1_880),
  'oxford_flowers102': Task(
    'Flowers102', 'natural', 'oxford_flowers102', 102, 6_149),
  'oxford_iiit_pet': Task(
    'Pets', 'natural', 'oxford_iiit_pet', 37, 3_669, val=('train', 80)),
  'sun397': Task(
    'Sun397', 'natural', 'sun397/tfds', 397, 21_750),
  'svhn': Task(
    'SVHN', 'natural', 'svhn_cropped', 10, 26_032, val=('train', 90)),
  'patch_camelyon': Task(
    'Camelyon', 'specialised', 'patch_camelyon', 2, 32_768),
  'eurosat': Task(
    'EuroSAT', 'specialised', 'eurosat/rgb', 10, 5_400,
    val=('train', 60), test=('train', 80)),
  'resisc45': Task(
    'Resisc45', 'specialised', 'resisc45', 45, 6_300,
    val=('train', 60), test=('train', 80)),
  'diabetic_retinopathy': Task(
    'Retinopathy', 'specialised', 'diabetic_retinopathy_detection/btgraham-300',
    5, 42_670),
  # CLEVR's own test split comes without objects.
  'clevr_count': Task(
    'Clevr-Count', 'structured', 'clevr', 8, 15_000,
    FromObjects(
      ('size',), _count, tuple(f'{n} objects' for n in range(3, 11))),
    val=('train', 90), test=('validation', 0)),
  'clevr_distance': Task(
    'Clevr-Dist', 'structured', 'clevr', 6, 15_000,
    FromObjects(
      ('pixel_coords',), _nearest_object,
      ('to 8', '8 to 8.5', '8.5 to 9', '9 to 9.5', '9.5 to 10', 'over 10')),
    val=('train', 90), test=('validation', 0)),
  'dmlab': Task(
    'DMLab', 'structured', 'dmlab', 6, 22_735),
  'dsprites_location': Task(
    'dSpr-Loc', 'structured', 'dsprites', 16, 73_728,
    'label_x_position', 32, val=('train', 80), test=('train', 90), scale=255),
  'dsprites_orientation': Task(
    'dSpr-Ori', 'structured', 'dsprites', 16, 73_728,
    'label_orientation', 40, val=('train', 80), test=('train', 90), scale=255),
  'kitti': Task(
    'KITTI-Dist', 'structured', 'kitti', 4, 711,
    FromObjects(
      ('type', 'location'), _nearest_vehicle,
      ('to 8 m', '8 to 20 m', 'over 20 m', 'no vehicle'))),
  'smallnorb_azimuth': Task(
    'sNORB-Azim', 'structured', 'smallnorb', 18, 12_150,
    'label_azimuth', val=('test', 0), test=('test', 50)),
  'smallnorb_elevation': Task(
    'sNORB-Elev', 'structured', 'smallnorb', 9, 12_150,
    'label_elevation', val=('test', 0), test=('test', 50)),
}
# fmt: on


def open_task(name: str, split: str, data_dir: str | None) -> TfdsSource:
  """Opens one of `SPLITS` of a task such as 'vtab/caltech101'.

  Raises:
    ValueError: There is no such task or split, or the dataset is another one.
    FileNotFoundError: The dataset is not prepared.
  """
  from vit_jax.data import tfds_source

  task = _task(name)
  if split not in SPLITS:
    raise ValueError(
      f'split {split!r} of {name} is unknown; VTAB has the splits '
      f'{", ".join(SPLITS)}'
    )
  builder = tfds_source.prepared_builder(task.tfds, data_dir)
  label = _label(task, builder.info.features)
  source = tfds_source.TfdsSource(
    task.tfds,
    builder,
    tfds_split(task, split, builder.info.splits),
    label=label,
    title=f'{name}/{split}',
    scale=task.scale,
  )
  if split == 'test' and len(source) != task.test_examples:
    _log.warning(
      'The test split of %s has %d images where the benchmark has %d: '
      'accuracies will not compare with published ones',
      name,
      len(source),
      task.test_examples,
    )
  return source


def tfds_split(task: Task, split: str, sizes: Mapping[str, Any]) -> str:
  """Returns the split string of TFDS for one of `SPLITS`.

  TFDS' own splits have their sizes as `num_examples` of each.
  """

  def start(part: _Start) -> int:
    name, percent = part
    if name not in sizes:
      raise ValueError(
        f'dataset {task.tfds} has no split {name!r} but {", ".join(sizes)}, '
        f'and is not the one that {task.title} of VTAB is made from'
      )
    return sizes[name].num_examples * percent // 100

  val = start(task.val)
  parts = {
    'train800': 'train[:800]',
    'val200': f'{task.val[0]}[{val}:{val + 200}]',
    'test': f'{task.test[0]}[{start(task.test)}:]',
  }
  parts['train800val200'] = f'{parts["train800"]}+{parts["val200"]}'
  return parts[split]


def _task(name: str) -> Task:
  key = name.removeprefix(PREFIX)
  if key not in TASKS:
    near = difflib.get_close_matches(key, TASKS, n=3, cutoff=0.5)
    hint = f' Did you mean {" or ".join(PREFIX + n for n in near)}?'
    raise ValueError(
      f'unknown task {name!r}.{hint if near else ""} VTAB has '
      f'{", ".join(TASKS)}; a folder is given as ./{name}'
    )
  return TASKS[key]


def _label(task: Task, features: Mapping[str, Any]) -> Label:
  """How records get their class; checks that the dataset is the right one."""
  from vit_jax.data import tfds_source

  field = 'objects' if isinstance(task.label, FromObjects) else task.label
  if field not in features:
    raise ValueError(
      f'dataset {task.tfds} has no {field!r}, so it is not the one that '
      f'{task.title} of VTAB is made from; its features are '
      f'{", ".join(sorted(features))}'
    )
  if isinstance(task.label, FromObjects):
    return task.label
  values = getattr(features[field], 'num_classes', 0)
  if values != (task.values or task.num_classes):
    raise ValueError(
      f'dataset {task.tfds} has {values} classes, so it is not the one that '
      f'{task.title} of VTAB is made from, which has '
      f'{task.values or task.num_classes}'
    )
  names = features[field].names if not task.values else range(task.num_classes)
  return tfds_source.ClassField(field, values, tuple(map(str, names)))
