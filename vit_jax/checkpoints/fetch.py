"""Checkpoints by name: a file in a bucket, or a model of the Hugging Face hub.

Whatever was fetched once is kept and needs no network again: files of buckets
in `~/.cache/vit_jax/checkpoints` (or under `$XDG_CACHE_HOME`), models of the
hub where its own library keeps them.
"""

import contextlib
import functools
import os
import pathlib
import re

from etils import epath

from vit_jax.checkpoints.formats import archive
from vit_jax.data import whole

SCHEMES = ('gs', 'hf', 'timm')

_CHUNK_BYTES = 1 << 24
# Anything else in a bucket is a workdir, which orbax reads where it is.
_FILES = ('.npz', '.safetensors', '.pth', '.pt', '.bin')
_REPOSITORY = re.compile(r'([\w.-]+/[\w.-]+)(?:@(.+))?')


def local(source: str) -> str:
  """Returns the path of a checkpoint, after fetching it if it is a name.

  Args:
    source: a path, which is returned as it is; gs://BUCKET/FILE; a directory in
      a bucket, which is returned as it is; hf://ORG/MODEL or
      hf://ORG/MODEL@REVISION; or timm://NAME, with timm's tag or without.

  Raises:
    ConnectionError: if it cannot be reached; says how to do without.
    FileNotFoundError: if there is no such file, model or revision.
    ImportError: if a library is not installed, saying which.
    PermissionError: if one has to log in to have it.
    ValueError: if the name is none.
  """
  scheme, separator, name = source.partition('://')
  if not separator:
    return source
  if scheme == 'gs':
    return _from_bucket(source) if name.endswith(_FILES) else source
  if scheme == 'hf':
    return _from_hub(source, name)
  if scheme == 'timm':
    return _from_hub(source, f'timm/{_with_tag(source, name)}')
  raise ValueError(
    f'{source} cannot be fetched: give a path, or a name that begins with '
    f'{", ".join(f"{valid}://" for valid in SCHEMES)}.'
  )


def _from_bucket(source: str) -> str:
  """Returns the path of the copy of a file, copied if it is not there."""
  parts = source.removeprefix('gs://').split('/')
  if len(parts) < 2 or not {'', '.', '..'}.isdisjoint(parts):
    raise ValueError(f'{source} is no file in a bucket: gs://BUCKET/FILE.')
  copy = _cache_folder().joinpath('gs', *parts)
  if copy.exists():
    return os.fspath(copy)
  copy.parent.mkdir(parents=True, exist_ok=True)
  by_hand = (
    f'Download https://storage.googleapis.com/{"/".join(parts)}, or '
    f'`gcloud storage cp {source} .`, and give the path.'
  )
  # Another process may have been faster.
  with contextlib.suppress(FileExistsError):
    with whole.new_file(os.fspath(copy)) as partial:
      try:
        _copy(source, partial)
      except ImportError as e:
        raise ImportError(
          f'To read {source}, pip install gcsfs. Or: {by_hand} ({e})'
        ) from e
      except FileNotFoundError as e:
        raise FileNotFoundError(f'There is no file {source}.') from e
      except Exception as e:
        raise ConnectionError(
          f'{source} cannot be fetched ({_reason(e)}). {by_hand} A bucket that '
          'is not public wants `gcloud auth application-default login`.'
        ) from e
  return os.fspath(copy)


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
    if file.tell() != size_bytes:
      raise ValueError(f'it ends at {file.tell():,} of {size_bytes:,} bytes')


def _from_hub(source: str, name: str) -> str:
  """Returns the folder of a model of the hub, `name` being ORG/MODEL."""
  match = _REPOSITORY.fullmatch(name)
  if not match:
    raise ValueError(
      f'{source} is no name of a model: give hf://ORG/MODEL, '
      'hf://ORG/MODEL@REVISION or timm://NAME.'
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
  except errors.RepositoryNotFoundError as e:
    raise FileNotFoundError(
      f'The Hugging Face hub has no model {repository}. If it is a private '
      'one, `hf auth login`.'
    ) from e
  except errors.RevisionNotFoundError as e:
    raise FileNotFoundError(
      f'{repository} has no revision {revision!r}: see {page}.'
    ) from e
  except Exception as e:
    raise ConnectionError(
      f'{source} cannot be fetched, and is not there from an earlier time '
      f'({_reason(e)}). {by_hand}'
    ) from e


def _snapshot(repository: str, revision: str | None) -> str:
  """Returns the folder with the configuration and weights of a model."""
  import huggingface_hub

  # What is in folders is for other runtimes.
  download = functools.partial(
    huggingface_hub.snapshot_download,
    repository,
    revision=revision,
    ignore_patterns=['*/*'],
  )
  path = download(allow_patterns=['*.json', '*.safetensors'])
  if any(pathlib.Path(path).glob('*.safetensors')):
    return path
  return download(allow_patterns=['*.json', 'pytorch_model.bin'])


def _with_tag(source: str, name: str) -> str:
  """Returns the name of a model of timm with its tag."""
  if '.' in name:
    return name
  example = 'timm://vit_base_patch16_224.augreg_in21k'
  try:
    import timm
  # Besides ImportError, torchvision raises RuntimeError beside another torch.
  except Exception as e:
    raise ImportError(
      f'{source} has no tag, and timm, which knows the default one, is not '
      f'installed: give it, as in {example}. ({_reason(e)})'
    ) from e
  found = timm.get_pretrained_cfg(name)
  if found is None or not found.tag:
    raise ValueError(
      f'timm has no weights for {name!r}: give the name of a model of '
      f'https://huggingface.co/timm, as in {example}.'
    )
  return f'{name}.{found.tag}'


def _reason(error: Exception) -> str:
  """Returns the type of an error and the first line of its message."""
  lines = str(error).strip().splitlines() or ['']
  return f'{type(error).__name__}: {lines[0]}'.removesuffix(': ')


def _cache_folder() -> pathlib.Path:
  base = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return pathlib.Path(base).expanduser() / 'vit_jax' / 'checkpoints'
