"""Datasets of the Hugging Face hub, and Parquet files as the hub has them.

  hf://datasets/OWNER/NAME[:CONFIG]
  parquet:./folder or a pattern, see `shards`

The library reads Parquet files once and keeps them as Arrow files, which have
random access: a Parquet file gives an image only with its whole row group.
"""

import importlib.util
from typing import Any

import numpy as np

from vit_jax.data import decode, shards, splits
from vit_jax.data.source import Source

PREFIX = 'hf://datasets/'


class HubSource(Source):
  """One split of a dataset, with images still encoded.

  If `train` is the only split, a fifth of each class becomes `test`. Slices
  refer to an order by `split_seed`, because many datasets are sorted by class.
  """

  def __init__(self, name: str, split: str, split_seed: int):
    """Fetches all splits and takes one.

    Raises:
      ImportError: The extra `hf` is not installed.
      ValueError: The dataset or the split does not exist, or images do not have
        one class each.
    """
    if not importlib.util.find_spec('datasets'):
      raise ImportError(
        f'{name} takes the library datasets: '
        "pip install -c requirements.txt -e '.[hf]'"
      )
    import datasets

    given_names: tuple[str, ...] = ()
    files: dict[str, list[str]] | None = None
    if name.startswith(PREFIX):
      path, _, config = name.removeprefix(PREFIX).partition(':')
    else:
      path, config = 'parquet', ''
      fs, files = shards.find(name)
      given_names = shards.class_file(fs, next(iter(files.values()))[0])
    try:
      tables = datasets.load_dataset(path, config or None, data_files=files)
    except Exception as e:  # its own, and those of several clients
      said = str(e).strip().partition('\n')[0]
      raise ValueError(f'{name} cannot be loaded: {said:.300}') from e
    first = next(iter(tables.values()))
    self._image, self._label = _columns(name, first.features, datasets)
    whole = datasets.concatenate_datasets(list(tables.values()))
    whole = whole.select_columns([self._image, self._label])
    # A column of plain names or numbers has the classes themselves.
    names = getattr(first.features[self._label], 'names', None) or given_names
    labels_N, self.class_names = shards.numbered(whole[self._label][:], names)
    sizes = {split_name: len(table) for split_name, table in tables.items()}
    self._rows = splits.select_rows(split, sizes, labels_N, name, split_seed)
    self._labels_N = labels_N[self._rows]
    if lacking := np.sum(self._labels_N < 0):
      raise ValueError(
        f'{lacking:,} images of {name} {split} have no class, as where classes '
        'are kept back: name another split'
      )
    self._title = f'{name}/{split}'
    # The hash of what was loaded.
    self._fingerprint = f'{name} {first._fingerprint} {split} {split_seed}'
    self._table = whole.cast_column(
      self._image, datasets.Image(decode=False)
    ).with_format(None)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    found = self._table[int(self._rows[index])][self._image]
    name = f'{self._title}/{index}'
    if not found:
      raise decode.UnreadableImage(name, 'There is no image')
    data = found['bytes']
    if data is None:
      data = decode.read_file(found['path'])
    return {'image': data, 'label': int(self._labels_N[index]), 'name': name}

  def labels(self) -> np.ndarray:
    """The classes of all records, int32 [N]."""
    return self._labels_N

  def fingerprint(self) -> str:
    """The library's hash of the loaded data, which do not change."""
    return self._fingerprint


def _columns(name: str, features: Any, datasets: Any) -> tuple[str, str]:
  """The columns that hold the image and its class."""
  images = [k for k, f in features.items() if isinstance(f, datasets.Image)]
  # Files that the library has not written do not say that they have images.
  images = images or [k for k in features if k in ('image', 'img', 'jpg')]
  of_kind = {
    kind: [k for k, f in features.items() if isinstance(f, kind)]
    for kind in (datasets.ClassLabel, datasets.Value)
  }
  labels = of_kind[datasets.ClassLabel] or [
    k for k in of_kind[datasets.Value] if k in ('label', 'class')
  ]
  if len(images) != 1 or len(labels) != 1:
    raise ValueError(
      f'{name} is not one of images with one class each; its columns are '
      f'{", ".join(features)}'
    )
  return images[0], labels[0]
