"""Read folders in Pascal VOC's format: one XML file per image.

`read` returns the lists of COCO's JSON, and the module `coco` checks them.
"""

import logging
import pathlib
import xml.etree.ElementTree
from typing import Any

from vit_jax.data import image_files, text_files
from vit_jax.data import splits as split_names

_log = logging.getLogger(__name__)

_Element = xml.etree.ElementTree.Element


def splits(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns for each split the file that lists its image names.

  Without such files, the only key is 'all', with the folder of the XML files.
  The dict is empty if there are no XML files. `trainval` is left out if `train`
  and a validation split exist.
  """
  if not (files := _files(root)):
    return {}
  names = (*split_names.NAMES, 'trainval')
  lists = {name: root / f'ImageSets/Main/{name}.txt' for name in names}
  found = {name: path for name, path in lists.items() if path.is_file()}
  if 'train' in found and found.keys() & split_names.SAME[1]:
    found.pop('trainval', None)
  return found or {'all': next(iter(files.values())).parent}


def modified_ns(root: pathlib.Path, path: pathlib.Path) -> int:
  """Returns the newest modification time of a split's files.

  If `path` is COCO's JSON, only this file counts. If `path` is from `splits`,
  the XML files of all splits and the image folder count too.
  """
  read = [path]
  if path.suffix != '.json':
    read += [image_folder(root), *_files(root).values()]
  return max(x.stat().st_mtime_ns for x in read)


def image_folder(root: pathlib.Path) -> pathlib.Path:
  """Returns the folder of the images: JPEGImages, images, or `root` itself."""
  folders = (root / 'JPEGImages', root / 'images')
  return next((x for x in folders if x.is_dir()), root)


def _files(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the annotation files by stem, sorted.

  XML files in `root` itself count only if `root` has an image of the same stem;
  others may not be annotations.
  """
  for place in (root / 'Annotations', root / 'annotations', root):
    found = {
      image_files.nfc(entry.name[:-4]): pathlib.Path(entry.path)
      for entry in image_files.visible(place)
      if entry.name.lower().endswith('.xml')
    }
    if place == root and found:
      found = {x: found[x] for x in found.keys() & image_files.by_stem(root)}
    if found:
      return dict(sorted(found.items()))
  return {}


def read(root: pathlib.Path, path: pathlib.Path) -> dict[str, Any]:
  """Returns COCO's lists for the images of a split; see `splits` for `path`.

  Classes are collected from all splits and sorted by name. Objects marked
  difficult become COCO's crowds, which are neither learned nor measured.

  Raises ValueError if an XML file is invalid, missing, or fits several images,
  or if the list of image names is not in UTF-8.
  """
  files = {stem: _parsed(file) for stem, file in _files(root).items()}
  stems = list(files)
  if path.is_file():
    text = image_files.nfc(text_files.decoded(path.read_bytes(), path))
    lines = map(str.strip, text.splitlines())
    # VOC's lists of one class, such as car_train.txt, have a number after each
    # name. A user may have renamed such a list to train.txt.
    stems = [x if x in files else x.split()[0] for x in lines if x]
    if lacking := [stem for stem in stems if stem not in files]:
      raise ValueError(
        f'{path} lists {len(lacking)} images without annotations, such as '
        f'{", ".join(lacking[:5])}. Add their XML files, or remove the lines.'
      )
  images = _image_names(root, {x: _text(files[x], 'filename') for x in stems})
  names = {_text(x, 'name') for t in files.values() for x in t.iter('object')}
  categories = {name: i for i, name in enumerate(sorted(names - {''}))}
  return {
    'images': [
      {
        'id': stem,
        'file_name': str(image_folder(root).absolute() / images[stem]),
        **{
          side: text
          for side in ('width', 'height')
          # Some tools leave the size out or write 0.
          if (text := _text(files[stem], f'size/{side}')) not in ('', '0')
        },
      }
      for stem in stems
    ],
    'annotations': [
      {
        'id': f'{i} of {stem}.xml',
        'image_id': stem,
        'category_id': categories.get(_text(x, 'name'), 'missing (no <name>)'),
        'iscrowd': int(_text(x, 'difficult') == '1'),
        'bbox': _box(x),
      }
      for stem in stems
      for i, x in enumerate(files[stem].iter('object'), 1)
    ],
    'categories': [{'id': i, 'name': name} for name, i in categories.items()],
  }


def _image_names(root: pathlib.Path, said: dict[str, str]) -> dict[str, str]:
  """Returns the file name of the image of each annotation file, by stem.

  `said` has the `<filename>` of each annotation file. It decides only if no
  image or several images have the annotation file's stem.
  """
  of_stem = image_files.by_stem(image_folder(root))
  images = {}
  for stem, name in said.items():
    names = of_stem.get(stem, [])
    if len(names) > 1 and name not in names:
      raise ValueError(
        f'{" and ".join(names)} have the same stem, and <filename> in '
        f'{stem}.xml names none of them. Remove all but one of these images.'
      )
    images[stem] = names[0] if len(names) == 1 else name or f'{stem}.jpg'
  there = {name for names in of_stem.values() for name in names}
  # Some tools rename files without updating `<filename>`.
  others = [x for x in said if said[x] in there and said[x] != images[x]]
  if others:
    _log.warning(
      f'{root}: in {len(others)} of {len(said)} XML files, <filename> names '
      f"another file's image, such as {said[others[0]]} in {others[0]}.xml. "
      'The image with the name of the XML file is used instead.'
    )
  return images


def _parsed(path: pathlib.Path) -> _Element:
  try:
    return xml.etree.ElementTree.parse(path).getroot()
  # An unknown encoding raises ValueError or LookupError.
  except (xml.etree.ElementTree.ParseError, ValueError, LookupError) as e:
    raise ValueError(
      f'{path} cannot be read as XML: {e}. Save it in UTF-8, or download or '
      'export it again.'
    ) from e


def _text(x: _Element, path: str) -> str:
  return (x.findtext(path) or '').strip()


def _box(x: _Element) -> list[Any]:
  """Returns x, y, width and height of an object's box.

  VOC counts pixels from 1, and a box includes its last pixels. `coco` reports
  sides that are not numbers.
  """
  names = ('xmin', 'ymin', 'xmax', 'ymax')
  sides = [_text(x, f'bndbox/{name}') for name in names]
  try:
    x0, y0, x1, y1 = map(float, sides)
  except ValueError:
    return sides
  return [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1]
