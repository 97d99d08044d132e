"""Reads folders of images with objects, annotated as COCO or as Pascal VOC.

docs/guides/data.md lists the layouts; `voc` reads Pascal VOC.
"""

import collections
import functools
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import decode, folder, image_files, splits
from vit_jax.data.source import Source
from vit_jax.projects.detr import segments, voc

_log = logging.getLogger(__name__)

_LISTED = 20  # maximum number of problems that a message lists
_HIGHEST_ID = 10_000
# Checks of ids use type(x), because isinstance(True, int) is true.
_IDS = (int, str)
_ROBOFLOW = '_annotations.coco.json'
# The class name of unused category ids, as in published DETR models.
NO_NAME = 'N/A'


def open_annotated(
  name: str, split: str, split_seed: int
) -> 'CocoFolder | None':
  """Opens a split of a folder; returns None if it has no annotation files."""
  root = pathlib.Path(name).expanduser()
  files = _annotations(root)
  return CocoFolder(root, files, split, split_seed) if files else None


def _annotations(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns annotation files by split; a file of all images has the key 'all'.

  Names of splits in `annotations/` lose their last digits (the year), unless
  two names differ only in them.
  """
  for name in ('instances.json', _ROBOFLOW, 'result.json'):
    # Other programs write result.json too, so images/ must exist beside it.
    if (root / name).is_file() and (
      name != 'result.json' or (root / 'images').is_dir()
    ):
      return {'all': root / name}
  files = {
    name: path
    for name in splits.NAMES
    if (path := root / name / _ROBOFLOW).is_file()
  }
  if files:
    return files
  files = {
    path.stem.removeprefix('instances_'): path
    for path in sorted(root.glob('annotations/instances_*.json'))
  }
  if [*files] == ['default']:
    return {'all': files['default']}
  without_year = {re.sub(r'(?<=\D)\d+$', '', k): x for k, x in files.items()}
  if len(without_year) == len(files):
    files = without_year
  # The images of `all` would be in the other splits too.
  if 'train' in files:
    files.pop('all', None)
  elif 'all' in files:
    files = {'all': files['all']}
  return files or voc.splits(root)


class CocoFolder(Source):
  """A source of images with objects, from a folder.

  As in DETR (2005.12872), a label is a category id, and there is a class for
  each id from 0 to the highest one. Unused ids get the class name `NO_NAME`:
  COCO's 80 categories have ids up to 90.
  """

  def __init__(
    self,
    root: pathlib.Path,
    files: Mapping[str, pathlib.Path],
    split: str,
    split_seed: int,
  ):
    """Reads and checks the annotations of all splits.

    If `files` has only 'all', a fifth of its images becomes the split `test`.
    `split_seed` draws the fifth and shuffles every split. A split that `split`
    does not need is skipped with a warning if its annotations are wrong. Other
    problems, and invalid XML in any split, raise ValueError. Annotation files
    that cannot be read raise OSError.
    """
    needed = {'all'}
    if 'all' not in files:
      needed = splits.needed(split, files, f'folder {root}')
    every: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    members: dict[str, list[int]] = {}
    for part, path in files.items():
      try:
        own, images = _read(root, path, voc.modified_ns(root, path))
      except ValueError as e:
        if part in needed:
          raise
        _log.warning('Split %s is left out. %s', part, e)
        continue
      for i, category in own.items():
        if (other := names.setdefault(i, category)) != category:
          raise ValueError(
            f'{path} names category {i} {category!r}, and another annotation '
            f'file names it {other!r}. Use one name in all files.'
          )
      members[part] = list(range(len(every), len(every) + len(images)))
      every += images
    self.class_names = tuple(
      names.get(i, NO_NAME) for i in range(max(names) + 1)
    )
    if 'all' in files:
      members = splits.stratified_fifth([0] * len(every), split_seed)
    members = splits.permuted(members, split_seed)
    chosen = splits.select(split, members, f'folder {root}')
    self._images = [every[i] for i in chosen]
    if split.startswith('train'):
      _log_counts(f'{root} {split}', self._images, names)

  def __len__(self) -> int:
    return len(self._images)

  def __getitem__(self, index: int) -> dict[str, Any]:
    objects = self.objects(index)
    return {'image': decode.read_file(objects['name']), **objects}

  def objects(self, index: int) -> Mapping[str, Any]:
    image = self._images[index]
    return image | {'masks': json.loads(image['masks'])}

  def identity(self) -> str:
    columns = [x[key] for key in ('boxes', 'labels') for x in self._images]
    names = [x['name'] for x in self._images]
    return folder.identity(names, np.concatenate(columns, None).tobytes(), 2)

  def states(self, indices: Sequence[int]) -> Iterable[str]:
    # The image check compares the size of an image with its annotation.
    images = (self._images[i] for i in indices)
    return (f'coco {decode.state_of(x["name"])} {x["size"]}' for x in images)


def _log_counts(
  name: str, images: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> None:
  """Logs the numbers of images and objects, and warns of suspicious data."""
  crowds = sum(int(np.sum(image['crowd'])) for image in images)
  boxes_N4 = np.concatenate([image['boxes'] for image in images])
  count = len(boxes_N4)
  _log.info(
    f'{name}: {len(images)} images, {count - crowds} objects and {crowds} '
    f'crowds, {len(set(names.values()))} classes, {count / len(images):.1f} '
    'boxes per image'
  )
  tiny = np.sum(np.min(boxes_N4[:, 2:] - boxes_N4[:, :2], axis=1) < 1)
  for some, what in (
    (crowds, 'are crowds, which are not learned'),
    (tiny, 'are less than a pixel wide or high'),
  ):
    if some > count / 4:
      _log.warning(f'{name}: {some} of {count} objects {what}.')


@functools.lru_cache(maxsize=4)
def _read(
  root: pathlib.Path, path: pathlib.Path, modified_ns: int
) -> tuple[dict[int, str], list[dict[str, Any]]]:
  """Returns category names by id, and images as `_image` makes them.

  `path` is JSON or from `voc.splits`. The cache lets all splits of a file share
  one read; `modified_ns` makes it read a changed file again.
  """
  found = voc.read(root, path) if path.suffix != '.json' else _json(path)
  keys = ('images', 'categories', 'annotations')
  lists: list[Any] = [
    found.get(x) if isinstance(found, dict) else None for x in keys
  ]
  if not all(isinstance(x, list) for x in lists) or not all(lists[:2]):
    raise ValueError(
      f'{path} is incomplete: COCO needs a JSON object with the lists images, '
      'categories and annotations, and at least one image and one category. '
      'VOC needs at least one <object> with a <name>.'
    )
  images, categories, annotations = ([*map(_plain, x)] for x in lists)
  _refuse(path, 'image', images, _image_problem)
  _refuse(path, 'category', categories, _category_problem)
  place = _image_folder(root, path, images[0]['file_name'])
  names = {x['id']: str(x['name']) for x in categories}
  files = {
    x['id']: str(image_files.find(place, x['file_name'])) for x in images
  }
  for what, values in (
    ('image id', [x['id'] for x in images]),
    ('category id', [x['id'] for x in categories]),
    ('image', map(os.path.normpath, files.values())),
  ):
    ((most, times),) = collections.Counter(values).most_common(1)
    if times > 1:
      raise ValueError(
        f'{path} has {times} entries with the {what} {most}. Keep one of them.'
      )
  sizes = {x['id']: _size(x, files[x['id']]) for x in images}
  check = functools.partial(_annotation_problem, sizes=sizes, names=names)
  _refuse(path, 'annotation', annotations, check)
  if problem := _implausible(annotations, sizes):
    raise ValueError(f'{path}: {problem}')
  objects = collections.defaultdict(list)
  for x in annotations:
    objects[x['image_id']].append(x)
  return names, [_image(files[i], sizes[i], objects[i]) for i in sizes]


def _json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text(encoding='utf-8-sig'))
  except (ValueError, RecursionError) as e:
    raise ValueError(
      f'{path} is not valid JSON: {e}. Download or export it again.'
    ) from e


def _plain(entry: Any) -> Any:
  """Normalises an entry of a list.

  Drops nulls. Converts ids, sizes and `iscrowd` to int, because some tools
  write 1.0 or '1'. Drops polygons of at most two points, which have no area.
  """
  if not isinstance(entry, dict):
    return entry
  entry = {key: value for key, value in entry.items() if value is not None}
  for key in ('id', 'image_id', 'category_id', 'width', 'height', 'iscrowd'):
    # '007' stays text, because it may be a different id from 7.
    if re.fullmatch(r'(0|[1-9]\d{0,14})(\.0)?', str(entry.get(key))):
      entry[key] = int(float(entry[key]))
  if isinstance(polygons := entry.get('segmentation'), list):
    entry['segmentation'] = [
      x for x in polygons if not isinstance(x, list) or len(x) > 4
    ]
  return entry


def _refuse(
  path: pathlib.Path,
  kind: str,
  entries: Sequence[Any],
  check: Callable[[dict[str, Any]], str],
) -> None:
  """Raises ValueError with the entries for which `check` returns a problem."""
  problems = []
  for x in entries:
    if not isinstance(x, dict):
      problems.append(f'  {kind} {x!r} is not an object with named values')
    elif problem := check(x):
      problems.append(f'  {kind} {x.get("id")}: {problem}')
  if problems:
    raise ValueError(
      f'{path} has {len(problems)} wrong entries. Correct or remove them:\n'
      + '\n'.join(problems[:_LISTED])
      + '\n  ...' * (len(problems) > _LISTED)
    )


def _image_problem(x: dict[str, Any]) -> str:
  if type(x.get('id')) not in _IDS or not isinstance(x.get('file_name'), str):
    return 'needs an id and a file_name'
  sides = x.get('width', 1), x.get('height', 1)
  if not all(isinstance(side, int) and side > 0 for side in sides):
    return f'is {sides[0]!r} wide and {sides[1]!r} high; use integers above 0'
  return ''


def _category_problem(x: dict[str, Any]) -> str:
  i = x.get('id')
  if type(i) is int and 0 <= i <= _HIGHEST_ID and 'name' in x:
    return ''
  return f'needs a name and, as id, a whole number from 0 to {_HIGHEST_ID:,}'


def _annotation_problem(
  x: dict[str, Any],
  sizes: Mapping[Any, tuple[int, int]],
  names: Mapping[int, str],
) -> str:
  for key, known in (('image_id', sizes), ('category_id', names)):
    if type(x.get(key)) not in _IDS or x[key] not in known:
      return f'{key} is {x.get(key)}, which is not in the file'
  box, area, crowd = x.get('bbox'), x.get('area', 0), x.get('iscrowd', 0)
  if not segments.are_numbers(box) or len(box) != 4 or min(box[2:]) < 0:
    return f'bbox {box} is not x, y, width, height with sides of 0 or more'
  H, W = size = sizes[x['image_id']]
  left, top, width, height = box
  if left + width < 0 or top + height < 0 or left > W or top > H:
    return f'bbox {box} lies outside its image of {W}x{H}'
  if not segments.are_numbers([area]) or area < 0:
    return f'area is {area!r}; it must be a number of 0 or more'
  if crowd not in (0, 1):
    return f'iscrowd is {crowd!r}; it must be 0 or 1'
  return segments.problem(x.get('segmentation') or [], size)


def _implausible(
  annotations: Sequence[Mapping[str, Any]],
  sizes: Mapping[Any, tuple[int, int]],
) -> str:
  """Returns why the annotations as a whole look wrong; '' if they do not."""
  if not annotations:
    return ''
  if all(x.get('iscrowd') for x in annotations):
    return (
      'all objects are crowds, which are neither learned nor measured: set '
      'iscrowd (VOC: difficult) to 0.'
    )
  boxes_N4 = np.array([x['bbox'] for x in annotations], np.float64)
  first_N2, last_N2 = boxes_N4[:, :2], boxes_N4[:, 2:]
  sizes_N2 = np.array([sizes[x['image_id']][::-1] for x in annotations]) + 1
  outside_N = np.any(first_N2 + last_N2 > sizes_N2, axis=1)
  are_corners = np.all((first_N2 < last_N2) & (last_N2 <= sizes_N2))
  if boxes_N4.max() <= 1:
    kind = 'shares of the image'
  elif are_corners and np.mean(outside_N) > 1 / 3:
    kind = 'two corners'
  else:
    return ''
  example = annotations[int(np.argmax(outside_N))]
  return (
    f'its boxes seem to be {kind}, such as {example["bbox"]} of annotation '
    f'{example.get("id")}. Write x, y, width and height in pixels.'
  )


def _size(entry: Mapping[str, Any], file: str) -> tuple[int, int]:
  """Returns (height, width) as annotated, or else from the image file."""
  if {'height', 'width'} <= entry.keys():
    return entry['height'], entry['width']
  image = decode.open_image(decode.read_file(file), file)
  return image.height, image.width


def _image(
  file: str, size: tuple[int, int], annotations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns `name` and the entries of `BoxedSource.objects`; `masks` is JSON.

  Python lists would take five times the memory of JSON in each worker process.
  """
  boxes_N4 = np.array([x['bbox'] for x in annotations], np.float32)
  boxes_N4 = boxes_N4.reshape(-1, 4)
  boxes_N4[:, 2:] += boxes_N4[:, :2]
  areas = [x.get('area', x['bbox'][2] * x['bbox'][3]) for x in annotations]
  masks = [x.get('segmentation') or None for x in annotations]
  return {
    'name': file,
    'size': size,
    'boxes': boxes_N4,
    'labels': np.array([x['category_id'] for x in annotations], np.int32),
    'crowd': np.array([x.get('iscrowd', 0) for x in annotations], bool),
    'area': np.array(areas, np.float64),
    'masks': json.dumps(masks).encode(),
  }


def _image_folder(
  root: pathlib.Path, path: pathlib.Path, file: str
) -> pathlib.Path:
  part = path.stem.removeprefix('instances_')
  if path.name == _ROBOFLOW:
    part = path.parent.name
  places = (root / part, root / 'images' / part, root / 'images', root)
  for place in places:
    if image_files.find(place, file).exists():
      return place
  # The first image is missing, which a later check reports.
  return next(x for x in places if x.is_dir())
