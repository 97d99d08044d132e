"""Fetches checkpoints from buckets and the Hugging Face hub into a cache.

Files from buckets are in `~/.cache/vit_jax/checkpoints` (or under
`$XDG_CACHE_HOME`), models from the hub in the cache of huggingface_hub.
"""

import base64
import contextlib
import http
import os
import pathlib
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

import google_crc32c
from etils import epath
from tqdm import tqdm

from vit_jax.checkpoints import saving
from vit_jax.checkpoints.catalogue import FAMILIES, PUBLISHED
from vit_jax.data import atomic_files
from vit_jax.register import nearest

# Server of public buckets over https; needs no account.
_STORAGE = 'https://storage.googleapis.com'
_TIMEOUT_S = 60
_CHUNK_BYTES = 1 << 20
# Suffixes of files to copy. Other paths in a bucket are workdirs, which orbax
# reads without a copy.
_FILES = ('.npz', '.safetensors', '.pth', '.pt', '.bin')
_REPOSITORY = re.compile(r'([\w.-]+/[\w.-]+)(?:@(.+))?')


def local(source: str) -> str:
  """Returns the local path of a checkpoint; fetches it if necessary.

  Args:
    source: a name in `catalogue.PUBLISHED`; gs://BUCKET/FILE; hf://ORG/MODEL or
      hf://ORG/MODEL@REVISION; or timm://NAME.TAG. An existing path takes
      precedence over a published name. A path, or a directory in a bucket, is
      returned unchanged.

  Raises:
    ConnectionError: if the download fails.
    FileNotFoundError: if the file, model or revision does not exist, or the
      model on the hub is private or gated.
    ImportError: if a library is not installed.
    PermissionError: if vit_jax's own cache folder is not writable.
    ValueError: if the name is invalid.
  """
  scheme, separator, name = source.partition('://')
  if not separator:
    return _published(source)
  if scheme == 'gs':
    is_file = name.endswith(_FILES)
    return _from_bucket(source, _open_file) if is_file else source
  if scheme == 'hf':
    return _from_hub(source, name)
  if scheme == 'timm':
    if '.' not in name:
      raise ValueError(
        f'{source} has no tag. Add it, as in '
        'timm://vit_base_patch16_224.augreg_in21k. '
        'https://huggingface.co/timm lists all models.'
      )
    return _from_hub(source, f'timm/{name}')
  raise ValueError(
    f'{source} cannot be fetched. Give a path, or a name that begins with '
    'gs://, hf:// or timm://.'
  )


def is_name(source: str) -> bool:
  """Whether `source` is a URL or a published name, instead of a path."""
  return '://' in source or (
    source in PUBLISHED and not os.path.lexists(source)
  )


def _published(source: str) -> str:
  family, slash, _ = source.partition('/')
  if not slash or family not in FAMILIES or os.path.lexists(source):
    return source
  if source not in PUBLISHED:
    of_family = [name for name in PUBLISHED if name.startswith(f'{family}/')]
    raise FileNotFoundError(
      f'No file or published checkpoint has the name {source}. '
      f'{nearest(source, of_family)} `python -m vit_jax.models --pretrained` '
      'lists all published checkpoints.'
    )
  return _from_bucket(PUBLISHED[source].address, _open_public)


def _from_bucket(
  source: str, open_remote: Callable[[str], tuple[Any, int | None, str]]
) -> str:
  """Returns the local copy of gs://BUCKET/FILE; fetches it if necessary.

  `open_remote` is `_open_file` or `_open_public`.
  """
  parts = source.removeprefix('gs://').split('/')
  if len(parts) < 2 or not {'', '.', '..'}.isdisjoint(parts):
    raise ValueError(
      f'{source} is not a file in a bucket. Give gs://BUCKET/FILE.'
    )
  copy = atomic_files.cache_folder().joinpath('checkpoints', 'gs', *parts)
  copy.parent.mkdir(parents=True, exist_ok=True)
  by_hand = f'Download {_address(source)} and give the path.'
  if open_remote is _open_file:
    by_hand += (
      ' If the bucket is not public, run `gcloud auth application-default '
      'login` and try again.'
    )
  # FileExistsError means that this or another process has fetched the file.
  with contextlib.suppress(FileExistsError):
    with atomic_files.new_file(os.fspath(copy)) as partial:
      try:
        _copy(*open_remote(source), source, partial)
      except ImportError as e:
        raise ImportError(
          f'To read {source}, pip install gcsfs. Or: {by_hand} ({e})'
        ) from e
      except FileNotFoundError as e:
        raise FileNotFoundError(f'{source} does not exist.') from e
      except Exception as e:
        raise ConnectionError(
          f'{source} cannot be fetched ({saving.first_line(e)}). {by_hand}'
        ) from e
  return os.fspath(copy)


def _address(source: str) -> str:
  """Returns the https URL of gs://BUCKET/FILE."""
  path = urllib.parse.quote(source.removeprefix('gs://'))
  return f'{_STORAGE}/{path}'


def _open_file(source: str) -> tuple[Any, int, str]:
  """Opens gs://BUCKET/FILE with the user's account; returns file, size, ''."""
  place = epath.Path(source)
  size_bytes = place.stat().length
  return place.open('rb'), size_bytes, ''


def _open_public(source: str) -> tuple[Any, int | None, str]:
  """Opens gs://BUCKET/FILE by https; returns file, stated size and CRC32C."""
  try:
    answer = urllib.request.urlopen(_address(source), timeout=_TIMEOUT_S)
  except urllib.error.HTTPError as e:
    e.close()
    if e.code == http.HTTPStatus.NOT_FOUND:
      raise FileNotFoundError(source) from e
    raise
  hashes = str(answer.headers.get_all('x-goog-hash'))
  stated = re.search(r'crc32c=([\w+/]+==)', hashes)
  return answer, answer.length, stated[1] if stated else ''


def _copy(
  remote: Any,
  size_bytes: int | None,
  crc32c: str,
  source: str,
  target: pathlib.Path,
) -> None:
  """Copies a file; raises ValueError if size or CRC32C are not as stated."""
  found = google_crc32c.Checksum()
  with (
    remote,
    open(target, 'wb') as file,
    tqdm(
      desc=f'fetching {source}',
      total=size_bytes,
      unit='B',
      unit_scale=True,
      delay=2,
      disable=None,
      leave=False,
    ) as bar,
  ):
    while chunk := remote.read(_CHUNK_BYTES):
      file.write(chunk)
      found.update(chunk)
      bar.update(len(chunk))
    if size_bytes not in (None, file.tell()):
      raise ValueError(f'it ends at {file.tell():,} of {size_bytes:,} bytes')
  if crc32c not in ('', base64.b64encode(found.digest()).decode()):
    raise ValueError('its CRC32C differs from the one that the server states')


def _from_hub(source: str, name: str) -> str:
  """Returns the local folder of the hub's model ORG/MODEL[@REVISION]."""
  match = _REPOSITORY.fullmatch(name)
  if not match:
    raise ValueError(
      f'{source} is not a valid model name. Give hf://ORG/MODEL, '
      'hf://ORG/MODEL@REVISION or timm://NAME.TAG.'
    )
  repository, revision = match.groups()
  page = f'https://huggingface.co/{repository}'
  by_hand = f'Download it from {page} and give the path of the folder.'
  try:
    from huggingface_hub import errors, snapshot_download
  except ImportError as e:
    raise ImportError(
      f'To fetch {source}, pip install huggingface-hub. Or: {by_hand} ({e})'
    ) from e
  try:
    # Skips weights for other runtimes, such as tf_model.h5.
    for stem, suffix in (('model', 'safetensors'), ('pytorch_model', 'bin')):
      path: str = snapshot_download(
        repository,
        revision=revision,
        ignore_patterns=['*/*'],
        allow_patterns=['*.json', f'{stem}.{suffix}', f'{stem}-*.{suffix}'],
      )
      if any(pathlib.Path(path).glob(f'{stem}*.{suffix}')):
        break
    return path
  except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as e:
    raise FileNotFoundError(
      f'The Hugging Face hub has no {source}, or the model is gated or private.'
      f' See {page}, accept its conditions and run `hf auth login`. Or: '
      f'{by_hand}'
    ) from e
  except Exception as e:
    raise ConnectionError(
      f'{source} is not in the cache and cannot be fetched '
      f'({saving.first_line(e)}). {by_hand}'
    ) from e
