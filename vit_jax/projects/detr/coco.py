"""Folders of images with objects, annotated in COCO's JSON or as Pascal VOC.

Two layouts of COCO's: `annotations/instances_train2017.json` with its images in
`train2017/` (or `images/train2017/`, or `images/`), and the same of val2017 and
others; or one `instances.json` with its images in `images/` or beside it. That
of VOC is in `voc`.
"""

import collections
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import decode, splits
from vit_jax.projects.detr import segments, voc

_LISTED = 20  # problems in a message
_HIGHEST_ID = 10_000
# Of a category id without a category, as published models call it.
NO_NAME = 'N/A'


def is_annotated(name: str) -> bool:
  """Whether a dataset name means a folder with annotated objects."""
  is_path = name.startswith(('.', '~')) or '/' in name
  return is_path and bool(_annotations(pathlib.Path(os.path.expanduser(name))))


def _annotations(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the files of annotations by split; 'all' for one of all images."""
  if (root / 'instances.json').is_file():
    return {'all': root / 'instances.json'}
  files = {
    path.stem.removeprefix('instances_'): path
    for path in sorted(root.glob('annotations/instances_*.json'))
  }
  without_year = {name: re.sub(r'\d+$', '', name) for name in files}
  times = collections.Counter(without_year.values())
  return {
    name if times[without_year[name]] > 1 else without_year[name]: path
    for name, path in files.items()
  } or voc.splits(root)


def _modified_ns(path: pathlib.Path) -> int:
  is_json = path.suffix == '.json'
  return path.stat().st_mtime_ns if is_json else voc.modified_ns(path)


class CocoFolder:
  """Images with objects of a folder, as a source.

  Classes are called by their category ids, from 0 to the highest one, as in
  DETR (2005.12872): COCO's 80 have ids up to 90, and a name for each that is
  missing.
  """

  def __init__(self, name: str, split: str, split_seed: int):
    """Reads the annotations of a split and checks them.

    Of one `instances.json` a fifth of the images becomes `test`; the splits of
    `annotations/` are called without the year, unless several differ in that.

    Raises:
      ValueError: Annotations are damaged, or wrong; each is named.
    """
    root = pathlib.Path(os.path.expanduser(name))
    files = _annotations(root)
    self._images: list[_Image] = []
    self.class_names: tuple[str, ...] = ()
    members: dict[str, list[int]] = {}
    for part, path in files.items():
      names, images = _read(path, _modified_ns(path))
      if members and names != self.class_names:
        raise ValueError(
          f'{path} has other categories than the files beside it: give all of '
          'them the same.'
        )
      self.class_names = names
      folder = _image_folder(root, path, images[0].file)
      first = len(self._images)
      self._images += [
        image._replace(file=str(folder / image.file)) for image in images
      ]
      members[part] = list(range(first, len(self._images)))
    if 'all' in files:
      members = splits.stratified_fifth([0] * len(self._images), split_seed)
    members = splits.permuted(members, split_seed)
    chosen = splits.select(split, members, f'folder {root}')
    self._images = [self._images[i] for i in chosen]
    self._state = ' '.join(
      f'{path} {_modified_ns(path)}' for path in files.values()
    )

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: int) -> dict[str, Any]:
    path = self._images[index].file
    record = {'image': decode.read_file(path), 'name': path}
    return record | dict(self.objects(index))

  def objects(self, index: int) -> Mapping[str, Any]:
    """Returns what a record has besides its image."""
    image = self._images[index]
    return {
      'boxes': image.boxes_N4,
      'labels': image.labels_N,
      'crowd': image.crowd_N,
      'area': image.area_N,
      'size': image.size,
      'masks': json.loads(image.masks),
    }

  def fingerprint(self) -> str:
    """A hash of the paths, sizes and modification times of the files."""
    files = (image.file for image in self._images)
    return f'coco {decode.state_of_files(files, self._state)}'


class _Image(NamedTuple):
  """An image with its objects, as `CocoFolder.objects` has them."""

  file: str
  size: tuple[int, int]
  boxes_N4: np.ndarray
  labels_N: np.ndarray
  crowd_N: np.ndarray
  area_N: np.ndarray
  # JSON of all its segmentations: lists of numbers would take five times as
  # much, in every worker.
  masks: bytes


@functools.lru_cache(maxsize=4)
def _read(
  path: pathlib.Path, modified_ns: int
) -> tuple[tuple[str, ...], list[_Image]]:
  """Returns the class names and images of a file, once for all its splits.

  Raises:
    ValueError: naming every annotation that is wrong.
  """
  del modified_ns
  found = voc.read(path) if path.suffix != '.json' else _json(path)
  lists = ('images', 'annotations', 'categories')
  if not isinstance(found, dict) or not all(
    isinstance(found.get(key), list) for key in lists
  ):
    raise ValueError(
      f"{path} has not COCO's lists {', '.join(lists)} in one object."
    )
  if not found['images']:
    raise ValueError(f'{path} has no images.')
  try:
    categories, entries = found['categories'], found['images']
    names = {x['id']: str(x['name']) for x in categories}
    images = {x['id']: x for x in entries}
    sizes = {i: (x['height'], x['width']) for i, x in images.items()}
    files = {i: x['file_name'] for i, x in images.items()}
  except (KeyError, TypeError) as e:
    wrong = f'{e} is missing'
    if isinstance(e, TypeError):
      wrong = f'one is no object with them, or its id no number ({e})'
    raise ValueError(
      f'{path}: an image needs id, file_name, width and height, a category id '
      f'and name; {wrong}.'
    ) from e
  for kind, given in (('images', entries), ('categories', categories)):
    ids = collections.Counter(x['id'] for x in given)
    ((most, times),) = ids.most_common(1) or ((None, 0),)
    if times > 1:
      raise ValueError(
        f'{path} has several {kind} of id {most!r}: give each an id of its own.'
      )
  for i, size in sizes.items():
    if not isinstance(files[i], str):
      raise ValueError(f'{path} has an image whose file_name is {files[i]!r}.')
    if not all(isinstance(side, int) and side > 0 for side in size):
      raise ValueError(
        f'{path} says that {files[i]} is {size[1]!r} pixels wide and '
        f'{size[0]!r} high: give whole numbers above 0.'
      )
  paths = collections.Counter(map(os.path.normpath, files.values()))
  ((most, times),) = paths.most_common(1)
  if times > 1:
    raise ValueError(
      f'{path} has the image {most} {times} times, which could be learned and '
      'tested both: give it one entry with all of its objects.'
    )
  if not names or not all(
    isinstance(i, int) and 0 <= i <= _HIGHEST_ID for i in names
  ):
    raise ValueError(
      f'{path} has category ids {sorted(map(str, names))[:5]}: give at least '
      f'one, whole numbers up to {_HIGHEST_ID:,}.'
    )
  problems, objects = [], collections.defaultdict(list)
  for x in found['annotations']:
    problem = _problem(x, sizes, names)
    if problem:
      problems.append(f'  annotation {_id_of(x)}: {problem}')
    else:
      objects[x['image_id']].append(x)
  if problems:
    _refuse(path, problems)
  class_names = tuple(names.get(i, NO_NAME) for i in range(max(names) + 1))
  return class_names, [
    _image(files[i], sizes[i], objects.get(i, ())) for i in images
  ]


def _json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text(encoding='utf-8-sig'))
  except (ValueError, RecursionError) as e:
    raise ValueError(
      f'{path} is no JSON, or was cut short: {e}. Fetch or write it anew.'
    ) from e


def _problem(
  annotation: Any, sizes: Mapping[Any, Any], names: Mapping[Any, str]
) -> str:
  """Returns what is wrong with an annotation; empty for nothing."""
  if not isinstance(annotation, dict):
    return 'is not an object with a name for each value'
  lacking = {'image_id', 'category_id', 'bbox'} - set(annotation)
  if lacking:
    return f'has no {min(lacking)}'
  for key in ('image_id', 'category_id'):
    if type(annotation[key]) not in (int, str):  # `true` is an int too
      return f'{key} {annotation[key]} is no number'
  size, box = sizes.get(annotation['image_id']), annotation['bbox']
  if size is None:
    return f'image_id {annotation["image_id"]} is none of the images'
  if annotation['category_id'] not in names:
    return f'category_id {annotation["category_id"]} is none of the categories'
  if (
    not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box))
  ):
    return f'bbox {box} is not x, y, width, height'
  x, y, width, height = box
  if min(width, height) < 0:
    return f'bbox {box} has a negative side'
  if x + width < 0 or y + height < 0 or x > size[1] or y > size[0]:
    return f'bbox {box} lies outside its image of {size[1]}x{size[0]}'
  area, crowd = annotation.get('area', 0), annotation.get('iscrowd', 0)
  if not _is_number(area) or area < 0:
    return f'area {area!r} is no number from 0'
  if crowd not in (0, 1):
    return f'iscrowd {crowd!r} is neither 0 nor 1'
  segmentation = annotation.get('segmentation')
  return '' if segmentation is None else segments.problem(segmentation, size)


def _is_number(x: Any) -> bool:
  # JSON has whole numbers that no float is as large as.
  return isinstance(x, int | float) and abs(x) < 1e300


def _id_of(annotation: Any) -> Any:
  return annotation.get('id') if isinstance(annotation, dict) else annotation


def _refuse(path: pathlib.Path, problems: list[str]) -> None:
  listed = '\n'.join(problems[:_LISTED])
  if len(problems) > _LISTED:
    listed += f'\n  and {len(problems) - _LISTED} more'
  raise ValueError(
    f'{path} has {len(problems)} wrong annotations:\n{listed}\nMend or remove '
    'them.'
  )


def _image(
  file: str, size: tuple[int, int], annotations: Iterable[Any]
) -> _Image:
  annotations = list(annotations)
  boxes_N4 = np.array([x['bbox'] for x in annotations], np.float32)
  boxes_N4 = boxes_N4.reshape(-1, 4)
  boxes_N4[:, 2:] += boxes_N4[:, :2]
  return _Image(
    file,
    size,
    boxes_N4,
    np.array([x['category_id'] for x in annotations], np.int32),
    np.array([bool(x.get('iscrowd', 0)) for x in annotations], bool),
    np.array(
      [x.get('area', x['bbox'][2] * x['bbox'][3]) for x in annotations],
      np.float64,
    ),
    json.dumps([x.get('segmentation') or None for x in annotations]).encode(),
  )


def _image_folder(
  root: pathlib.Path, path: pathlib.Path, file: str
) -> pathlib.Path:
  """Returns the folder that has the images of a file of annotations."""
  if path.suffix != '.json':
    return voc.image_folder(root)
  part = path.stem.removeprefix('instances_')
  folders = (root / part, root / 'images' / part, root / 'images', root)
  for folder in folders:
    if (folder / file).exists():
      return folder
  # The first image may be the one that is missing.
  return next(x for x in folders if x.is_dir())
