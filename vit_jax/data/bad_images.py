"""Finds unreadable images before training starts.

The check decodes every image once, in full, with the decoder that training
uses. It stores a hash for each readable image in `~/.cache/vit_jax` (or under
`$XDG_CACHE_HOME`) and, in training, in the workdir. The hash depends on the
version of the decoder and on `Source.states`: for a file in a folder, its path,
size and modification time. A restart checks only images whose hash is not
stored. An image whose size differs from its annotation counts as unreadable.
"""

import contextlib
import hashlib
import io
import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import PIL
import simplejpeg
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.data import atomic_files, cores, decode, sources
from vit_jax.data.sources import Source, subset
from vit_jax.models.fields import check_value

_log = logging.getLogger(__name__)

_LISTED = 20


class BadImage(NamedTuple):
  """An unreadable image: its index in the source, its name, and the reason."""

  row: int
  name: str
  reason: str


def open_checked(data: ConfigDict, split: str) -> Source:
  """Opens a split of `config.data`, and checks its images.

  Raises the errors of `sources.open_config` and `checked`.
  """
  return checked(sources.open_config(data, split), data.on_bad_image)


def checked(source: Source, on_bad_image: str) -> Source:
  """Returns a source without its unreadable images.

  All processes must call this function together. They share the work and drop
  the same images. With 'skip', the loader also skips images that become
  unreadable later. A source whose `states` are None needs no check and is
  returned unchanged.

  Raises:
    ValueError: an image is unreadable and `on_bad_image` is 'error'; all images
      are unreadable; the processes see different data; or `on_bad_image` is
      neither 'error' nor 'skip'.
  """
  check_value('on_bad_image', on_bad_image, ('error', 'skip'))
  _refuse_different(source)
  own = find_bad_images(source)
  if own is None:
    return source
  bad = [BadImage(*x) for x in gather(own)]
  if not bad and on_bad_image == 'error':
    return source
  lines = sorted({f'  {b.name}: {b.reason}' for b in bad})
  listed = '\n'.join(lines[:_LISTED])
  if len(lines) > _LISTED:
    listed += f'\n  and {len(lines) - _LISTED} more'
  summary = f'{len(bad)} of {len(source)} images are unreadable'
  if on_bad_image == 'error':
    raise ValueError(
      f'{summary}:\n{listed}\nRepair or remove them, or continue without them: '
      '--on_bad_image=skip, or for training --config.data.on_bad_image=skip'
    )
  if len(bad) == len(source):
    raise ValueError(f'{summary}:\n{listed}\nRepair or replace them.')
  if bad:
    _log.warning('%s and left out:\n%s', summary, listed)
  dropped = {b.row for b in bad}
  kept = subset(source, [i for i in range(len(source)) if i not in dropped])
  kept.skips_unreadable = True
  return kept


def _refuse_different(source: Source) -> None:
  """Raises ValueError if processes see different image counts or classes."""
  names = '\0'.join(source.class_names).encode(errors='surrogatepass')
  mine = [len(source), hashlib.sha256(names).hexdigest()]
  seen = gather([mine])
  if any(other != mine for other in seen):
    counts = ' and '.join(f'{count:,}' for count, _ in seen)
    raise ValueError(
      f'The processes see different data: {counts} images'
      + (', and different classes' if len({x for _, x in seen}) > 1 else '')
      + '. Give all processes the same data, in a folder that they share.'
    )


def find_bad_images(source: Source) -> list[BadImage] | None:
  """Returns the unreadable images of this process' share, in order.

  Each of N processes decodes every N-th image, on all cores. Images that an
  earlier check could read are decoded again only if `source.states` or the
  decoder has changed. Returns None if the source needs no check.
  """
  index, count = jax.process_index(), jax.process_count()
  share = range(index, len(source), count)
  texts = source.states(share)
  if texts is None:
    return None
  # Each hash includes the decoders, as another version may fail on a file.
  decoders = (
    f'decoder {decode.DECODER_VERSION} pillow {PIL.__version__} '
    f'simplejpeg {simplejpeg.__version__}'
  )
  bar = cores.progress('Looking for changed images', len(share), 'images')
  with bar:
    hashes = (_hash(f'{decoders} {text}', bar) for text in texts)
    states_N = np.fromiter(hashes, np.uint64, len(share))
  places = [epath.Path(atomic_files.cache_folder() / 'checked'), *_workdirs]
  known = {place: _read(place) for place in places}
  is_known_N = _is_in(states_N, np.concatenate([*known.values()]))
  new_N = np.flatnonzero(~is_known_N)
  indices = [share[i] for i in new_N]
  bar = cores.progress('Checking images', len(indices), 'images')
  found = list(cores.in_threads(lambda i: _examine(source, i), indices, bar))
  is_known_N[new_N] = [image is None for image in found]
  for place, known_N in known.items():
    readable_N = states_N[is_known_N]
    _keep(place, readable_N[~_is_in(readable_N, known_N)])
  return [image for image in found if image]


@contextlib.contextmanager
def kept_in(workdir: str) -> Iterator[None]:
  """Within this context, stores the results of image checks in a workdir too.

  Other hosts, and containers that start with an empty home, read them there.
  """
  _workdirs.append(epath.Path(workdir) / 'checked_images')
  try:
    yield
  finally:
    _workdirs.pop()


_workdirs: list[epath.Path] = []


def _hash(text: str, bar: Any) -> int:
  bar.update()
  digest = hashlib.blake2b(text.encode(errors='surrogateescape'), digest_size=8)
  return int.from_bytes(digest.digest(), 'little')


def _is_in(values_N: np.ndarray, known_M: np.ndarray) -> np.ndarray:
  """Same as np.isin, but much faster for few values in many hashes."""
  known_M = np.sort(known_M)
  first_N, last_N = (
    np.searchsorted(known_M, values_N, side) for side in ('left', 'right')
  )
  return first_N < last_N


def _read(place: epath.Path) -> np.ndarray:
  """Returns the hashes in the files of a folder; ignores damaged files."""
  hashes = [np.empty(0, np.uint64)]
  for path in place.glob('*.npy'):
    with contextlib.suppress(Exception):  # damaged files raise many types
      found = np.load(io.BytesIO(path.read_bytes()))
      if found.dtype == np.uint64 and found.ndim == 1:
        hashes.append(found)
  return np.concatenate(hashes)


def _keep(place: epath.Path, states_N: np.ndarray) -> None:
  """Writes the hashes of readable images to a new file in `place`."""
  if not states_N.size:
    return
  data = io.BytesIO()
  np.save(data, states_N)
  name = hashlib.sha256(data.getvalue()).hexdigest()[:16]
  try:
    place.mkdir(parents=True, exist_ok=True)
    atomic_files.replace(place / f'{name}.npy', data.getvalue())
  except OSError as e:  # training works with a read-only home too
    _log.warning('The results of the image check could not be stored: %s', e)


def gather(items: list[Any]) -> list[Any]:
  """Concatenates the items of all processes; items must be JSON values."""
  text = np.frombuffer(json.dumps(items).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([len(text)])).ravel()
  padded = np.pad(text, (0, max(sizes) - len(text)))
  texts = np.reshape(
    multihost_utils.process_allgather(padded), (len(sizes), -1)
  )
  return [
    item
    for row, size in zip(texts, sizes, strict=True)
    for item in json.loads(row[:size].tobytes())
  ]


def _examine(source: Source, index: int) -> BadImage | None:
  try:
    record = source[index]
    height, width, _ = decode.decode(record['image'], record['name']).shape
  except decode.UnreadableImage as error:
    return BadImage(index, error.name, error.reason)
  annotated = record.get('size', (height, width))
  if annotated != (height, width):
    reason = (
      f'the image has {width}x{height} pixels, but its annotation says '
      f'{annotated[1]}x{annotated[0]}, so boxes or masks may be wrong'
    )
    return BadImage(index, record['name'], reason)
  return None
