"""Reads datasets of the Hugging Face hub, Parquet files and WebDataset tars.

  hf://datasets/OWNER/NAME[:CONFIG]
  parquet:./folder      or a pattern of files, see `shards`
  webdataset:./folder   or a pattern of files; KEY.cls has a class number

The library `datasets` copies these files to Arrow files once, for random
access. Otherwise, reading one image from a Parquet file would read a whole row
group, and a tar file could only be read from start to end.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vit_jax.data import decode, shards, splits
from vit_jax.data.source import Source


class HubSource(Source):
  """One split of a dataset, with encoded images.

  If `train` is the only split, a fifth of each class becomes `test`. Splits are
  shuffled by `split_seed` before slices are taken, because many datasets are
  sorted by class.
  """

  def __init__(self, name: str, split: str, split_seed: int):
    """Loads the dataset and opens one split; see `sources.open_source`."""
    import datasets

    given_names: tuple[str, ...] = ()
    files: dict[str, list[str]] | None = None
    if name.startswith('hf://'):
      path = name.removeprefix('hf://').removeprefix('datasets/')
      path, _, config = path.partition(':')
    else:
      path, config = name.partition(':')[0], ''
      fs, files = shards.find(name)
      given_names = shards.class_file(fs, next(iter(files.values()))[0])
    try:
      tables = datasets.load_dataset(path, config or None, data_files=files)
    except Exception as e:  # errors of the library and of its HTTP clients
      said = str(e).strip().partition('\n')[0]
      raise ValueError(f'{name} cannot be loaded: {said:.300}') from e
    first = next(iter(tables.values()))
    self._image, self._label = _columns(name, first.features, datasets)
    whole = datasets.concatenate_datasets(list(tables.values()))
    whole = whole.select_columns([self._image, self._label])
    # A column without the type ClassLabel holds class names or numbers.
    names = getattr(first.features[self._label], 'names', None) or given_names
    labels_N, self.class_names = shards.numbered(whole[self._label][:], names)
    sizes = {split_name: len(table) for split_name, table in tables.items()}
    self._rows = splits.select_rows(split, sizes, labels_N, name, split_seed)
    self._labels_N = labels_N[self._rows]
    if lacking := np.sum(self._labels_N < 0):
      raise ValueError(
        f'{lacking:,} images of {name} {split} have no class or an unknown '
        f'class; each needs one of the {len(self.class_names)} classes. Use a '
        'split whose classes are published. If there is a file classes.txt, it '
        'must have a line for each class, from class 0.'
      )
    self._title = f'{name}/{split}'
    # `first._fingerprint` is the library's hash of the loaded data.
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
      raise decode.UnreadableImage(name, 'the record has no image')
    data = found['bytes']
    if data is None:
      data = decode.read_file(found['path'])
    return {'image': data, 'label': int(self._labels_N[index]), 'name': name}

  def labels(self) -> np.ndarray:
    return self._labels_N

  def states(self, indices: Sequence[int]) -> Iterable[str]:
    return (f'{self._fingerprint} {i}' for i in indices)


def _columns(name: str, features: Any, datasets: Any) -> tuple[str, str]:
  def columns(kind: type, *names: str) -> list[str]:
    of_kind = [k for k, f in features.items() if isinstance(f, kind)]
    return [k for k in of_kind if k in names or not names]

  # Parquet files from other tools do not mark image columns.
  images = columns(datasets.Image) or columns(object, 'image', 'img', 'jpg')
  labels = columns(datasets.ClassLabel) or columns(
    datasets.Value, 'label', 'class', 'cls'
  )
  if len(images) != 1 or len(labels) != 1:
    raise ValueError(
      f'{name} must have one column of images (image, img or jpg) and one of '
      f'classes (label, class or cls); its columns are {", ".join(features)}'
    )
  return images[0], labels[0]
