"""Finds image files in folders."""

import collections
import functools
import os
import pathlib
import re
import unicodedata

from PIL import Image

from vit_jax.data import decode

Counter = collections.Counter[str]

# The first bytes of JPEG, PNG, GIF, WebP and AVIF. TIFF is missing, because raw
# files of cameras begin with the same bytes.
_BEGINNINGS = re.compile(
  rb'\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8|RIFF....WEBP|....ftypavif', re.DOTALL
)
_COPIES = ('~', '.bak', '.orig', '.part', '.tmp')
_HEIC = ('.heic', '.heif')


def visible(folder: pathlib.Path) -> list[os.DirEntry[str]]:
  """Lists a folder in the order of names, without hidden and system files."""
  if not folder.is_dir():
    return []
  entries = (x for x in os.scandir(folder) if not is_hidden(x.name))
  return sorted(entries, key=lambda entry: entry.name)


def is_hidden(name: str) -> bool:
  """Whether a name starts with a dot, or belongs to macOS or a Synology NAS."""
  return name.startswith(('.', '__MACOSX', '@eaDir'))


def nfc(text: str) -> str:
  """Normalises a name to NFC: macOS and Linux encode accents differently."""
  return unicodedata.normalize('NFC', text)


def find(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of a file that a table or an annotation names.

  `name` may have surrounding blanks, backslashes instead of slashes, or another
  Unicode form of accents than the file. The result may be a missing file.
  """
  plain = name.strip().replace('\\', '/')
  nfd = unicodedata.normalize('NFD', plain)
  names = dict.fromkeys([name, name.strip(), plain, nfc(plain), nfd])
  if len(names) > 1:  # with one spelling there is nothing to choose
    for spelling in names:
      if (folder / spelling).exists():
        return folder / spelling
  return folder / plain


def sub_folders(folder: pathlib.Path) -> tuple[str, ...]:
  """Returns the sorted names of the visible sub-folders."""
  return tuple(entry.name for entry in visible(folder) if entry.is_dir())


def list_images(folder: str | pathlib.Path) -> tuple[list[str], Counter]:
  """Lists the images of a folder and its sub-folders.

  The extension or the first bytes decide whether a file is an image. Hidden
  files and folders are ignored. A folder that several links lead to is listed
  once. Returns the sorted paths, and the number of other files by extension.
  Raises OSError if a folder cannot be read.
  """
  paths: list[str] = []
  others: Counter = collections.Counter()
  seen: set[str] = set()
  for parent, folders, names in os.walk(
    folder, onerror=_raise, followlinks=True
  ):
    # A link to a parent folder would list the same images many times.
    if (place := os.path.realpath(parent)) in seen:
      folders.clear()
      continue
    seen.add(place)
    # The real path of a folder is preferred to a link beside it.
    folders[:] = sorted(
      (x for x in folders if not is_hidden(x)),
      key=lambda x: (os.path.islink(os.path.join(parent, x)), x),
    )
    for name in names:
      path = os.path.join(parent, name)
      if is_hidden(name):
        continue
      if is_image_name(name) or _begins_as_image(path):
        paths.append(path)
      else:
        others[os.path.splitext(name)[1].lower() or 'without extension'] += 1
  return sorted(paths), others


def _raise(error: OSError) -> None:
  raise error


def _begins_as_image(path: str) -> bool:
  # A backup repeats its original, and a partial download is unreadable.
  if path.lower().endswith(_COPIES) or not os.path.isfile(path):
    return False
  try:
    with open(path, 'rb') as file:
      return bool(_BEGINNINGS.match(file.read(16)))
  except OSError:
    return False


def warn_left_out(root: str | pathlib.Path, others: Counter) -> None:
  """Warns of files that are not images, as counted by `list_images`."""
  if others:
    decode.warn_once(
      f'{root}: files that are not images are left out{counted(others)}'
    )


def counted(others: Counter) -> str:
  """Formats the number of files by extension, such as ' (3 .txt, 1 .csv)'."""
  if not others:
    return ''
  listed = ', '.join(f'{count} {name}' for name, count in others.most_common())
  heic = f'. {decode.HEIC_NEEDS}' if others.keys() & {*_HEIC} else ''
  return f' ({listed}{heic})'


def by_stem(folder: pathlib.Path) -> dict[str, list[str]]:
  """Maps each NFC stem to the names of the image files with that stem."""
  found: dict[str, list[str]] = {}
  for entry in visible(folder):
    if is_image_name(entry.name):
      stem = nfc(os.path.splitext(entry.name)[0])
      found.setdefault(stem, []).append(entry.name)
  return found


def is_image_name(name: str) -> bool:
  """Whether a name is not hidden and has the extension of an image format."""
  extension = os.path.splitext(name)[1].lower()
  return not is_hidden(name) and extension in _image_extensions()


@functools.cache
def _image_extensions() -> frozenset[str]:
  return frozenset(
    extension
    for extension, name in Image.registered_extensions().items()
    # MPO files are JPEGs with several pictures; Pillow opens them as JPEG.
    if name in (*decode.pillow_formats(), 'MPO')
  )
