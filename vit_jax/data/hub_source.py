"""Datasets of the Hugging Face hub: hf://datasets/OWNER/NAME[:CONFIG]."""

import importlib.util
from typing import Any

import numpy as np

from vit_jax.data import decode, splits
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

    path, _, config = name.removeprefix(PREFIX).partition(':')
    try:
      tables = datasets.load_dataset(path, config or None)
    except Exception as e:  # its own, and those of several clients
      said = str(e).strip().partition('\n')[0]
      raise ValueError(f'{name} cannot be loaded: {said:.300}') from e
    first = next(iter(tables.values()))
    self._image, self._label = _columns(name, first.features, datasets)
    whole = datasets.concatenate_datasets(list(tables.values()))
    whole = whole.select_columns([self._image, self._label])
    values = whole[self._label][:]
    # A column of plain names or numbers has the classes themselves.
    names = getattr(first.features[self._label], 'names', None)
    known = range(len(names)) if names else sorted(set(values) - {None})
    self.class_names = tuple(map(str, names or known))
    number_of = {value: i for i, value in enumerate(known)}
    labels_N = np.array([number_of.get(x, -1) for x in values], np.int32)
    members, start = {}, 0
    for split_name, table in tables.items():
      members[split_name] = list(range(start, start + len(table)))
      start += len(table)
    if list(members) == ['train']:
      members = splits.stratified_fifth(labels_N.tolist(), split_seed)
    members = splits.permuted(members, split_seed)
    self._rows = splits.select(split, members, name)
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
