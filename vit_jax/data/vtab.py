"""VTAB-1k: 19 tasks of 1,000 training images each, on TFDS datasets.

Splits and labels follow google-research/task_adaptation, which defines the
benchmark (arXiv 1910.04867). Each task uses the first 800 images of its
training split, the first 200 of its validation split, and its whole test split.
In some tasks, validation or test images come from another TFDS split, beginning
at a percentage of it.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.source import Label, Source
from vit_jax.register import nearest

_log = logging.getLogger(__name__)

PREFIX = 'vtab/'  # begins the name of a task
SPLITS = ('train800', 'val200', 'train800val200', 'test')

# A TFDS split, and the percentage of it at which a VTAB split begins.
_Start = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Task:
  title: str  # in table 9 of the ViT paper
  group: str  # 'natural', 'specialised' or 'structured'
  tfds: str  # the name of the TFDS dataset
  num_classes: int
  test_examples: int
  label: str | Label = 'label'  # the TFDS field of the class, or a rule
  values: int = 0  # number of values, if adjacent values share a class
  val: _Start = ('validation', 0)
  test: _Start = ('test', 0)  # ends where the TFDS split ends
  scale: int = 1  # factor that scales pixels to 0..255


def _count(record: Mapping[str, Any]) -> int:
  """The class of a CLEVR image, by its number of objects, 3 to 10."""
  return len(record['objects']['size']) - 3


def _nearest_object(record: Mapping[str, Any]) -> int:
  """The class of a CLEVR image, by the distance to the nearest object."""
  distance = np.asarray(record['objects']['pixel_coords'])[:, 2].min()
  return int(np.searchsorted((8.0, 8.5, 9.0, 9.5, 10.0), distance))


def _nearest_vehicle(record: Mapping[str, Any]) -> int:
  """The class of a KITTI image, by the distance to the nearest vehicle."""
  objects = record['objects']
  is_vehicle = np.asarray(objects['type']) < 3
  metres = np.asarray(objects['location']).reshape(-1, 3)[is_vehicle, 2]
  return int(np.searchsorted((8.0, 20.0, 999.0), metres.min(initial=1000.0)))


# The tasks in the order of table 9.
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
  # CLEVR's test split has no annotated objects.
  'clevr_count': Task(
    'Clevr-Count', 'structured', 'clevr', 8, 15_000,
    Label(
      tuple(f'{n} objects' for n in range(3, 11)), ('objects',), _count),
    val=('train', 90), test=('validation', 0)),
  'clevr_distance': Task(
    'Clevr-Dist', 'structured', 'clevr', 6, 15_000,
    Label(
      ('to 8', '8 to 8.5', '8.5 to 9', '9 to 9.5', '9.5 to 10', 'over 10'),
      ('objects',), _nearest_object),
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
    Label(
      ('to 8 m', '8 to 20 m', 'over 20 m', 'no vehicle'),
      ('objects',), _nearest_vehicle)),
  'smallnorb_azimuth': Task(
    'sNORB-Azim', 'structured', 'smallnorb', 18, 12_150,
    'label_azimuth', val=('test', 0), test=('test', 50)),
  'smallnorb_elevation': Task(
    'sNORB-Elev', 'structured', 'smallnorb', 9, 12_150,
    'label_elevation', val=('test', 0), test=('test', 50)),
}
# fmt: on


def open_task(name: str, split: str, data_dir: str | None) -> Source:
  """Opens one of `SPLITS` of a task such as 'vtab/caltech101'."""
  # TFDS takes a second to import.
  from vit_jax.data import tfds_source

  key = name.removeprefix(PREFIX)
  if key not in TASKS:
    raise ValueError(
      f'unknown task {name!r}. {nearest(key, TASKS)} For a folder, give '
      f'./{name}'
    )
  task = TASKS[key]
  if split not in SPLITS:
    raise ValueError(
      f'split {split!r} of {name} is unknown; VTAB has the splits '
      f'{", ".join(SPLITS)}'
    )
  builder = tfds_source.prepared_builder(task.tfds, data_dir)
  label = task.label
  if not isinstance(label, Label):
    names = tuple(map(str, range(task.num_classes)))
    if not task.values:
      names = tuple(builder.info.features[label].names)
    label = tfds_source.class_field(label, task.values or len(names), names)
  source = tfds_source.TfdsSource(
    builder,
    tfds_split(task, split, builder.info.splits),
    label,
    f'{name}/{split}',
    scale=task.scale,
  )
  if split == 'test' and len(source) != task.test_examples:
    _log.warning(
      f'The test split of {name} has {len(source)} images, but the benchmark '
      f'has {task.test_examples}: accuracies are not comparable'
    )
  return source


def tfds_split(task: Task, split: str, sizes: Mapping[str, Any]) -> str:
  """Returns the TFDS split string for one of `SPLITS`.

  `sizes` maps the names of TFDS splits to infos with `num_examples`.
  """
  val, test = (
    sizes[name].num_examples * percent // 100 if name in sizes else 0
    for name, percent in (task.val, task.test)
  )
  parts = {
    'train800': 'train[:800]',
    'val200': f'{task.val[0]}[{val}:{val + 200}]',
    'test': f'{task.test[0]}[{test}:]',
  }
  parts['train800val200'] = f'{parts["train800"]}+{parts["val200"]}'
  return parts[split]
