"""Folders of images with objects, annotated in COCO's JSON or as Pascal VOC.

Three layouts of COCO's: `annotations/instances_train2017.json` with its images
in `train2017/` (or `images/train2017/`, or `images/`), and the same of val2017
and others; one `instances.json` with its images in `images/` or beside it,
which Label Studio calls `result.json` and CVAT
`annotations/instances_default.json`; or Roboflow's
`train/_annotations.coco.json` with its images beside it, and the same of
`valid/`. Pascal VOC's layout is in `voc`.
"""

import collections
import functools
import json
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import decode, image_files, splits
from vit_jax.data.source import Source
from vit_jax.projects.detr import segments, voc

_log = logging.getLogger(__name__)

_LISTED = 20  # problems in a message
_HIGHEST_ID = 10_000
_ROBOFLOW = '_annotations.coco.json'
# Of a category id without a category, as published models call it.
NO_NAME = 'N/A'


def open_annotated(
  name: str, split: str, split_seed: int
) -> 'CocoFolder | None':
  """Opens a split of a folder; None if it has no annotated objects."""
  if not _annotations(pathlib.Path(os.path.expanduser(name))):
    return None
  return CocoFolder(name, split, split_seed)


def _annotations(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the files of annotations by split; 'all' for one of all images."""
  for name in ('instances.json', _ROBOFLOW, 'result.json'):
    # Label Studio's folder has images; elsewhere the name may mean anything.
    if (root / name).is_file() and (
      name[0] != 'r' or (root / 'images').is_dir()
    ):
      return {'all': root / name}
  files = {name: root / name / _ROBOFLOW for name in splits.NAMES}
  if files := {name: path for name, path in files.items() if path.is_file()}:
    return files
  files = {
    path.stem.removeprefix('instances_'): path
    for path in sorted(root.glob('annotations/instances_*.json'))
  }
  if [*files] == ['default']:
    return {'all': files['default']}
  without_year = {name: re.sub(r'\d+$', '', name) for name in files}
  times = collections.Counter(without_year.values())
  return {
    name if times[without_year[name]] > 1 else without_year[name]: path
    for name, path in files.items()
  } or voc.splits(root)


def _modified_ns(root: pathlib.Path, path: pathlib.Path) -> int:
  is_json = path.suffix == '.json'
  return path.stat().st_mtime_ns if is_json else voc.modified_ns(root, path)


class CocoFolder(Source):
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
    needed = {'all'}
    if 'all' not in files:
      needed = splits.needed(split, files, f'folder {root}')
    self._images: list[_Image] = []
    names: dict[int, str] = {}
    members: dict[str, list[int]] = {}
    for part, path in files.items():
      try:
        own, images = _read(root, path, _modified_ns(root, path))
      except ValueError as e:
        if part in needed:
          raise
        _log.warning('Split %s is left out. %s', part, e)
        continue
      for i, category in own.items():
        if (other := names.setdefault(i, category)) != category:
          raise ValueError(
            f'{path} calls the category of id {i} {category!r}, and a file '
            f'beside it {other!r}: give all files the same categories.'
          )
      first = len(self._images)
      self._images += images
      members[part] = list(range(first, len(self._images)))
    self.class_names = tuple(
      names.get(i, NO_NAME) for i in range(max(names) + 1)
    )
    if 'all' in files:
      members = splits.stratified_fifth([0] * len(self._images), split_seed)
    members = splits.permuted(members, split_seed)
    chosen = splits.select(split, members, f'folder {root}')
    self._images = [self._images[i] for i in chosen]
    if split.startswith('train'):
      self._say_what_there_is(f'{root} {split}')
    self._state = ' '.join(
      f'{path} {_modified_ns(root, path)}' for path in files.values()
    )

  def _say_what_there_is(self, name: str) -> None:
    crowd_N = np.concatenate([image.crowd_N for image in self._images])
    labels_N = np.concatenate([image.labels_N for image in self._images])
    boxes_N4 = np.concatenate([image.boxes_N4 for image in self._images])
    objects, counts = np.sum(~crowd_N), [len(x.crowd_N) for x in self._images]
    classes = len(set(labels_N[~crowd_N]))
    named = len(set(self.class_names) - {NO_NAME})
    _log.info(
      '%s: %d images, %d without objects; %d objects of %d of %d classes, %d '
      'crowds; %.1f an image, %d at most',
      *(name, len(counts), counts.count(0), objects, classes, named),
      *(len(crowd_N) - objects, np.mean(counts), max(counts)),
    )
    tiny = np.sum(np.min(boxes_N4[:, 2:] - boxes_N4[:, :2], axis=1) < 1)
    for count, what in (
      (len(crowd_N) - objects, 'are crowds, which are not learned'),
      (tiny, 'are less than a pixel wide or high'),
    ):
      if count > len(crowd_N) / 4:
        _log.warning('%s: %d of %d objects %s', name, count, len(crowd_N), what)

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
  root: pathlib.Path, path: pathlib.Path, modified_ns: int
) -> tuple[dict[int, str], list[_Image]]:
  """Returns the categories and images of a file, once for all its splits.

  Raises:
    ValueError: naming every annotation that is wrong.
  """
  del modified_ns
  found = voc.read(root, path) if path.suffix != '.json' else _json(path)
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
    found |= {key: [_plain(x) for x in found[key]] for key in lists}
    categories, entries = found['categories'], found['images']
    names = {x['id']: str(x['name']) for x in categories}
    images = {x['id']: x for x in entries}
    files = {i: x['file_name'] for i, x in images.items()}
  except (KeyError, TypeError) as e:
    wrong = f'{e} is missing'
    if isinstance(e, TypeError):
      wrong = f'one is no object with them, or its id no number ({e})'
    raise ValueError(
      f'{path}: an image needs id and file_name, a category id and name; '
      f'{wrong}.'
    ) from e
  for kind, given in (('images', entries), ('categories', categories)):
    ids = collections.Counter(x['id'] for x in given)
    ((most, times),) = ids.most_common(1) or ((None, 0),)
    if times > 1:
      raise ValueError(
        f'{path} has several {kind} of id {most!r}: give each an id of its own.'
      )
  for file in files.values():
    if not isinstance(file, str):
      raise ValueError(f'{path} has an image whose file_name is {file!r}.')
  place = _image_folder(root, path, files[entries[0]['id']])
  paths = {i: str(image_files.find(place, file)) for i, file in files.items()}
  ((most, times),) = collections.Counter(
    map(os.path.normpath, paths.values())
  ).most_common(1)
  if times > 1:
    raise ValueError(
      f'{path} has the image {most} {times} times, which could be learned and '
      'tested both: give it one entry with all of its objects.'
    )
  sizes = {i: _size(x, paths[i], path) for i, x in images.items()}
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
  _refuse_improbable(path, found['annotations'], sizes)
  return names, [_image(paths[i], sizes[i], objects.get(i, ())) for i in images]


def _plain(entry: Any) -> Any:
  """Returns an entry without nulls, and with numbers of one kind.

  Tools write ids and sizes as 1, 1.0 or '1', and polygons of two points, which
  cover nothing.
  """
  if not isinstance(entry, dict):
    return entry
  entry = {key: value for key, value in entry.items() if value is not None}
  for key in ('id', 'image_id', 'category_id', 'width', 'height', 'iscrowd'):
    # Not of text such as 007, which may be another id than 7.
    if re.fullmatch(r'(0|[1-9]\d{0,14})(\.0)?', str(entry.get(key))):
      entry[key] = int(float(entry[key]))
  if isinstance(polygons := entry.get('segmentation'), list):
    entry['segmentation'] = [
      x for x in polygons if not isinstance(x, list) or len(x) > 4
    ]
  return entry


def _size(
  entry: Mapping[str, Any], file: str, path: pathlib.Path
) -> tuple[int, int]:
  """Returns (height, width) as annotated, or of the file if it is missing."""
  if not {'height', 'width'} <= entry.keys():
    image = decode.open_image(decode.read_file(file), file)
    return image.height, image.width
  size = entry['height'], entry['width']
  if not all(isinstance(side, int) and side > 0 for side in size):
    raise ValueError(
      f'{path} says that {entry["file_name"]} is {size[1]!r} pixels wide and '
      f'{size[0]!r} high: give whole numbers above 0.'
    )
  return size


def _refuse_improbable(
  path: pathlib.Path,
  annotations: Sequence[Mapping[str, Any]],
  sizes: Mapping[Any, tuple[int, int]],
) -> None:
  """Refuses boxes of another format, and objects of which none is learned."""
  if not annotations:
    return
  if all(x.get('iscrowd') for x in annotations):
    raise ValueError(
      f'{path}: all of its {len(annotations)} objects are crowds, which are '
      'neither learned nor measured: set iscrowd (VOC: difficult) to 0.'
    )
  boxes_N4 = np.array([x['bbox'] for x in annotations], np.float64)
  first_N2, last_N2 = boxes_N4[:, :2], boxes_N4[:, 2:]
  sizes_N2 = np.array([sizes[x['image_id']][::-1] for x in annotations])
  outside_N = np.any(first_N2 + last_N2 > sizes_N2 + 1, axis=1)
  are_corners = np.all((first_N2 < last_N2) & (last_N2 <= sizes_N2 + 1))
  if boxes_N4.max() <= 1:
    kind = 'shares of the image'
  elif are_corners and np.mean(outside_N) > 1 / 3:
    kind = 'two corners'
  else:
    return
  example = annotations[int(np.argmax(outside_N))]
  width, height = sizes_N2[np.argmax(outside_N)]
  raise ValueError(
    f'{path}: its boxes seem to be {kind}, such as {example["bbox"]} of '
    f'annotation {_id_of(example)} in an image of {width}x{height}. Write x, '
    'y, width and height in pixels.'
  )


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
  return segments.problem(segmentation, size) if segmentation else ''


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
  if path.name == _ROBOFLOW:
    part = path.parent.name
  places = (root / part, root / 'images' / part, root / 'images', root)
  for place in places:
    if image_files.find(place, file).exists():
      return place
  # The first image may be the one that is missing.
  return next(x for x in places if x.is_dir())
