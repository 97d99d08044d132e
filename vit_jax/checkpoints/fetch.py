"""Fetches checkpoints by name: published, in a bucket, or on the hub.

Fetched checkpoints are cached and work offline later: files of buckets in
`~/.cache/vit_jax/checkpoints` (or under `$XDG_CACHE_HOME`), models of the
Hugging Face hub in the cache of huggingface_hub.
"""

import base64
import contextlib
import hashlib
import http.client
import os
import pathlib
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import Any

import google_crc32c
from etils import epath

from vit_jax.checkpoints.catalogue import FAMILIES, PUBLISHED
from vit_jax.checkpoints.formats import archive
from vit_jax.data import atomic_files
from vit_jax.register import nearest

# Serves public buckets without an account or a library.
_STORAGE = 'https://storage.googleapis.com'
_TIMEOUT_S = 60
_ASK_S = 3
_CHUNK_BYTES = 1 << 24
# Other paths in a bucket are workdirs, which orbax reads directly.
_FILES = ('.npz', '.safetensors', '.pth', '.pt', '.bin')
_REPOSITORY = re.compile(r'([\w.-]+/[\w.-]+)(?:@(.+))?')


def local(source: str) -> str:
  """Returns the path of a checkpoint, after fetching it if it is a name.

  Args:
    source: a path or a directory in a bucket, which are returned unchanged; a
      name in `catalogue.PUBLISHED`, unless a path has this name;
      gs://BUCKET/FILE; hf://ORG/MODEL or hf://ORG/MODEL@REVISION; or
      timm://NAME.TAG.

  Raises:
    ConnectionError: if the server cannot be reached; explains how to download
      by hand.
    FileNotFoundError: if the file, model or revision does not exist.
    ImportError: if a library is not installed; names it.
    PermissionError: if the download needs a login.
    ValueError: if the name is invalid.
  """
  scheme, separator, name = source.partition('://')
  if not separator:
    return _published(source)
  if scheme == 'gs':
    return _from_bucket(source, _copy) if name.endswith(_FILES) else source
  if scheme == 'hf':
    return _from_hub(source, name)
  if scheme == 'timm':
    if '.' not in name:
      raise ValueError(
        f'The tag of {source} is missing: add it, as in '
        'timm://vit_base_patch16_224.augreg_in21k. '
        'https://huggingface.co/timm has the names of all models.'
      )
    return _from_hub(source, f'timm/{name}')
  raise ValueError(
    f'{source} cannot be fetched: give a path, or a name that begins with '
    'gs://, hf://, timm://.'
  )


def is_name(source: str) -> bool:
  """Whether a checkpoint is given by a name to fetch and not by a path."""
  return '://' in source or (
    source in PUBLISHED and not os.path.lexists(source)
  )


def is_here(name: str) -> bool:
  """Whether a published checkpoint was fetched before."""
  return _copy_of(PUBLISHED[name].address).exists()


def is_reachable() -> bool:
  """Whether published checkpoints can be fetched; waits three seconds at most.

  Asks in a thread, because DNS lookups have no timeout.
  """

  answered: list[bool] = []

  def ask() -> None:
    request = urllib.request.Request(_STORAGE, method='HEAD')
    with contextlib.suppress(OSError, http.client.HTTPException):
      with contextlib.suppress(urllib.error.HTTPError):  # an answer, too
        urllib.request.urlopen(request, timeout=_ASK_S).close()
      answered.append(True)

  thread = threading.Thread(target=ask, daemon=True)
  thread.start()
  thread.join(_ASK_S)
  return bool(answered)


def _published(source: str) -> str:
  family, slash, _ = source.partition('/')
  if not slash or family not in FAMILIES or os.path.lexists(source):
    return source
  if source not in PUBLISHED:
    of_family = [name for name in PUBLISHED if name.startswith(f'{family}/')]
    raise FileNotFoundError(
      f'There is neither a file nor a published checkpoint {source}. '
      f'{nearest(source, of_family)} `python -m vit_jax.models --pretrained` '
      'lists those that are published.'
    )
  return _from_bucket(PUBLISHED[source].address, _download)


def _from_bucket(source: str, copy_to: Callable) -> str:
  """Returns the path of the local copy of gs://BUCKET/FILE; fetches it first.

  `copy_to` is `_copy` or `_download`.
  """
  parts = source.removeprefix('gs://').split('/')
  if len(parts) < 2 or not {'', '.', '..'}.isdisjoint(parts):
    raise ValueError(
      f'{source} is not a file in a bucket: give gs://BUCKET/FILE.'
    )
  copy = _copy_of(source)
  if copy.exists():
    return os.fspath(copy)
  copy.parent.mkdir(parents=True, exist_ok=True)
  by_hand = f'Download {_address(source)} and give the path.'
  if copy_to is _copy:
    by_hand += (
      ' A bucket that is not public wants `gcloud auth application-default '
      'login`.'
    )
  # Another process may have fetched it meanwhile.
  with contextlib.suppress(FileExistsError):
    with atomic_files.new_file(os.fspath(copy)) as partial:
      try:
        copy_to(source, partial)
      except ImportError as e:
        raise ImportError(
          f'To read {source}, pip install gcsfs. Or: {by_hand} ({e})'
        ) from e
      except FileNotFoundError as e:
        raise FileNotFoundError(f'There is no file {source}.') from e
      except Exception as e:
        raise ConnectionError(
          f'{source} cannot be fetched ({_reason(e)}). {by_hand}'
        ) from e
  return os.fspath(copy)


def _copy_of(source: str) -> pathlib.Path:
  """Returns the path of the local copy of gs://BUCKET/FILE."""
  parts = source.removeprefix('gs://').split('/')
  return atomic_files.cache_folder().joinpath('checkpoints', 'gs', *parts)


def _address(source: str) -> str:
  """Returns the https URL of gs://BUCKET/FILE."""
  path = urllib.parse.quote(source.removeprefix('gs://'))
  return f'{_STORAGE}/{path}'


def _copy(source: str, target: pathlib.Path) -> None:
  place = epath.Path(source)
  size_bytes = place.stat().length
  with (
    place.open('rb') as remote,
    open(target, 'wb') as file,
    archive.progress(f'fetching {source}', size_bytes) as bar,
  ):
    while chunk := remote.read(_CHUNK_BYTES):
      file.write(chunk)
      bar.update(len(chunk))
    _check_size(file.tell(), size_bytes)


def _download(source: str, target: pathlib.Path) -> None:
  """Downloads a file of a public bucket and checks its size and checksums.

  Resumes a broken connection as long as each attempt transfers some bytes.
  """
  stated = Message()
  with (
    open(target, 'wb') as file,
    archive.progress(f'fetching {source}', 0) as bar,
  ):
    while True:
      start = file.tell()
      request = urllib.request.Request(_address(source))
      if start and stated['ETag']:
        request.add_header('Range', f'bytes={start}-')
        request.add_header('If-Range', stated['ETag'])
      try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
          if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
            given = answer.headers['Content-Range'] or ''
            if not given.startswith(f'bytes {start}-'):
              raise ValueError(
                f'bytes {start}- were asked for and the server sent {given!r}'
              )
          else:
            stated = answer.headers
            file.seek(0)
            file.truncate()
            bar.reset(int(stated['Content-Length'] or 0))
          # `read` would lose the received part of an incomplete chunk.
          while chunk := answer.read1(_CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
      except urllib.error.HTTPError as e:
        e.close()
        if e.code == http.HTTPStatus.NOT_FOUND:
          raise FileNotFoundError(source) from e
        raise
      except (OSError, http.client.HTTPException):
        if file.tell() <= start:
          raise
        continue
      size_bytes = int(stated['Content-Length'] or file.tell())
      if not start < file.tell() < size_bytes:
        break
    _check_size(file.tell(), size_bytes)
  for name, want in _stated_checksums(stated).items():
    if want != (found := _digest(target, _CHECKSUMS[name]())):
      raise ValueError(f'its {name} is {found}, the server states {want}')


def _check_size(found_bytes: int, stated_bytes: int) -> None:
  if found_bytes != stated_bytes:
    raise ValueError(f'it ends at {found_bytes:,} of {stated_bytes:,} bytes')


def _digest(path: pathlib.Path, checksum: Any) -> str:
  with open(path, 'rb') as file:
    while chunk := file.read(_CHUNK_BYTES):
      checksum.update(chunk)
  return checksum.digest().hex()


_CHECKSUMS: dict[str, Callable[[], Any]] = {
  'md5': hashlib.md5,
  'crc32c': google_crc32c.Checksum,
}


def _stated_checksums(headers: Message) -> dict[str, str]:
  """Returns the checksums that Google Cloud Storage states, in hexadecimal.

  One or two x-goog-hash headers contain them in base64. The ETag is the MD5
  unless the file was composed from parts
  (cloud.google.com/storage/docs/xml-api/reference-headers).
  """
  tag = headers.get('ETag', '').strip('"')
  found = {'md5': tag} if re.fullmatch('[0-9a-f]{32}', tag) else {}
  for value in headers.get_all('x-goog-hash', []):
    for part in value.split(','):
      name, _, text = part.strip().partition('=')
      if name in _CHECKSUMS:
        found[name] = base64.b64decode(text).hex()
  return found


def _from_hub(source: str, name: str) -> str:
  """Returns the folder of the hub's model `name`, ORG/MODEL."""
  match = _REPOSITORY.fullmatch(name)
  if not match:
    raise ValueError(
      f'{source} is not the name of a model: give hf://ORG/MODEL, '
      'hf://ORG/MODEL@REVISION or timm://NAME.TAG.'
    )
  repository, revision = match.groups()
  page = f'https://huggingface.co/{repository}'
  by_hand = f'Download it from {page} and give the path of the folder.'
  try:
    from huggingface_hub import errors
  except ImportError as e:
    raise ImportError(
      f'To fetch {source}, pip install huggingface-hub. Or: {by_hand} ({e})'
    ) from e
  try:
    return _snapshot(repository, revision)
  except errors.GatedRepoError as e:
    raise PermissionError(
      f'{source} is for those who accepted its conditions: do so at {page}, '
      f'then `hf auth login`. Or: {by_hand}'
    ) from e
  except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as e:
    raise FileNotFoundError(
      f'The Hugging Face hub has no {source}: see {page}. If the model is '
      'private, `hf auth login`.'
    ) from e
  except Exception as e:
    raise ConnectionError(
      f'{source} cannot be fetched, and is not there from an earlier time '
      f'({_reason(e)}). {by_hand}'
    ) from e


def _snapshot(repository: str, revision: str | None) -> str:
  """Returns the folder with the configuration and weights of a model."""
  import huggingface_hub

  # Fetches only these names: others belong to other runtimes and libraries.
  for stem, suffix in (('model', 'safetensors'), ('pytorch_model', 'bin')):
    path = huggingface_hub.snapshot_download(
      repository,
      revision=revision,
      ignore_patterns=['*/*'],
      allow_patterns=['*.json', f'{stem}.{suffix}', f'{stem}-*.{suffix}'],
    )
    if any(pathlib.Path(path).glob(f'{stem}*.{suffix}')):
      break
  return path


def _reason(error: Exception) -> str:
  """Returns the type of an error and the first line of its message."""
  lines = str(error).strip().splitlines() or ['']
  return f'{type(error).__name__}: {lines[0]}'.removesuffix(': ')
