"""Folders annotated as Pascal VOC is: an XML file for each image.

`Annotations/NAME.xml`, `JPEGImages/NAME.jpg` and, where images are divided,
`ImageSets/Main/train.txt` and others with a name a line. What is read becomes
what COCO's JSON has, and is checked as that is.
"""

import pathlib
import xml.etree.ElementTree
from collections.abc import Iterable
from typing import Any

FOLDER = 'JPEGImages'
_Element = xml.etree.ElementTree.Element


def splits(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns by split what `read` takes; 'all' for the folder of all files.

  `trainval` is left out where its halves are there.
  """
  folder = root / 'Annotations'
  if not any(folder.glob('*.xml')):
    return {}
  names = ('train', 'val', 'test', 'trainval')
  files = {name: root / f'ImageSets/Main/{name}.txt' for name in names}
  found = {name: path for name, path in files.items() if path.is_file()}
  if {'train', 'val'} <= found.keys():
    found.pop('trainval', None)
  return found or {'all': folder}


def modified_ns(path: pathlib.Path) -> int:
  """Returns when the files that `read` reads were last written."""
  return max(x.stat().st_mtime_ns for x in [path, *_files(path)])


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns COCO's lists for the images of a split.

  Classes are those of all splits, by the alphabet. Pixels count from 1 in VOC,
  and the last ones are in their box. Objects called difficult are like COCO's
  crowds: neither learned, nor missed when they are not found.

  Raises:
    ValueError: naming a file that is missing or damaged.
  """
  names: set[str] = set()
  files = {file.stem: _parsed(file) for file in _files(path)}
  for tree in files.values():
    names |= {_text(x, 'name') for x in tree.iter('object')} - {''}
  stems = sorted(files)
  if path.is_file():
    text = path.read_text(encoding='utf-8-sig')
    lines = map(str.strip, text.splitlines())
    # Files of a class have a number behind each name.
    stems = [x if x in files else x.split()[0] for x in lines if x]
    lacking = [stem for stem in stems if stem not in files]
    if lacking:
      raise ValueError(
        f'{path} names {len(lacking)} images without annotations, '
        f'{", ".join(lacking[:5])} among them: add them, or remove the lines.'
      )
  categories = {name: i for i, name in enumerate(sorted(names))}
  return {
    'images': [
      {
        'id': stem,
        'file_name': _text(files[stem], 'filename') or f'{stem}.jpg',
        **{
          side: _number(files[stem], f'size/{side}')
          for side in ('width', 'height')
        },
      }
      for stem in stems
    ],
    'annotations': [
      {
        'id': f'{i} of {stem}.xml',
        'image_id': stem,
        'category_id': categories.get(_text(x, 'name'), 'without a name'),
        'iscrowd': int(_text(x, 'difficult') == '1'),
        'bbox': _box(x),
      }
      for stem in stems
      for i, x in enumerate(files[stem].iter('object'), 1)
    ],
    'categories': [{'id': i, 'name': name} for name, i in categories.items()],
  }


def _files(path: pathlib.Path) -> Iterable[pathlib.Path]:
  folder = path if path.is_dir() else path.parents[2] / 'Annotations'
  return sorted(folder.glob('*.xml'))


def _parsed(path: pathlib.Path) -> _Element:
  try:
    return xml.etree.ElementTree.parse(path).getroot()
  # What it says of encodings that it does not know are the other two.
  except (xml.etree.ElementTree.ParseError, ValueError, LookupError) as e:
    raise ValueError(
      f'{path} is no XML in UTF-8, or was cut short: {e}. Fetch or write it '
      'anew.'
    ) from e


def _text(x: _Element, path: str) -> str:
  return (x.findtext(path) or '').strip()


def _number(x: _Element, path: str) -> Any:
  """Returns a whole number, a fraction, or the text if it is neither."""
  text = _text(x, path)
  try:
    number = float(text)
  except ValueError:
    return text
  return int(number) if number.is_integer() else number


def _box(x: _Element) -> list[Any]:
  """Returns x, y, width and height; what is no number stays as it is."""
  corners = [
    _number(x, f'bndbox/{name}') for name in ('xmin', 'ymin', 'xmax', 'ymax')
  ]
  if not all(isinstance(side, int | float) for side in corners):
    return corners
  x0, y0, x1, y1 = corners
  return [x0 - 1, y0 - 1, x1 - x0 + 1, y1 - y0 + 1]
