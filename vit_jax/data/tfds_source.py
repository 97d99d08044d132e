"""Datasets of TensorFlow Datasets (TFDS), read without TensorFlow."""

from __future__ import annotations

import difflib
import os
import re
from typing import Any

import tensorflow_datasets as tfds

# What `tfds build` needs, some of it undeclared. Only preparing a dataset does.
_INSTALL = (
  'pip install tensorflow tensorflow-datasets apache-beam mlcroissant '
  'importlib_resources'
)


class TfdsSource:
  """One split of a prepared dataset of TFDS, with images still encoded."""

  def __init__(self, name: str, split: str, data_dir: str | None):
    """Opens the dataset; see `sources.open_source`.

    Raises:
      FileNotFoundError: It is not prepared, or not in a random access format.
      ValueError: TFDS knows no such dataset, the dataset has no such split, or
        it is not one of labelled images.
    """
    if data_dir is not None:
      data_dir = os.path.expanduser(data_dir)
    builder = _prepared_builder(name, data_dir)
    self._name = name
    self._split = split
    self._image_key, self._label_key = _keys(name, builder.info)
    self.class_names = tuple(builder.info.features[self._label_key].names)
    self._data_dir = os.fspath(builder.data_dir)
    self._size = int(builder.info.dataset_size)
    # The other images of a record, such as masks, are not decoded either.
    decoders = {
      key: tfds.decode.SkipDecoding()
      for key, feature in builder.info.features.items()
      if isinstance(feature, tfds.features.Image)
    }
    try:
      self._records = builder.as_data_source(split=split, decoders=decoders)
    except ValueError as error:
      sizes = ', '.join(
        f'{key}: {info.num_examples}'
        for key, info in builder.info.splits.items()
      )
      raise ValueError(
        f'split {split!r} of {name} cannot be read; it has the splits {sizes}, '
        f'and slices such as train[:98%]. TFDS says: {error}'
      ) from None
    if not len(self._records):
      raise ValueError(f'split {split!r} of {name} selects no example')

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> dict[str, Any]:
    record = self._records[index]
    return {
      'image': record[self._image_key],
      'label': int(record[self._label_key]),
      'name': f'{self._name}/{self._split}/{index}',
    }

  def fingerprint(self) -> str:
    """The folder of the dataset, which has its version, its bytes, the split.

    TFDS writes the files once and never changes them.
    """
    return f'tfds {self._data_dir} {self._size} {self._split}'


def is_known(name: str) -> bool:
  """Whether TFDS has a dataset of that name, prepared or not."""
  return re.split('[/:]', name)[0] in _known_names()


def _known_names() -> list[str]:
  return tfds.list_builders(with_community_datasets=False)


def _prepared_builder(
  name: str, data_dir: str | None
) -> tfds.core.DatasetBuilder:
  """The builder of a dataset whose files can be read at random."""
  places = data_dir or '$TFDS_DATA_DIR, by default ~/tensorflow_datasets'
  in_data_dir = f' --data_dir={data_dir}' if data_dir else ''
  try:
    builder = tfds.core.read_only_builder.builder_from_files(
      name, data_dir=data_dir
    )
  except tfds.core.DatasetNotFoundError:
    if not is_known(name):
      raise ValueError(_unknown(name, places)) from None
    raise FileNotFoundError(
      f'dataset {name} is not prepared in {places}. Prepare it once:\n'
      f'  {_INSTALL}\n'
      f'  tfds build {name} --file_format=array_record{in_data_dir}\n'
      'TensorFlow is needed for that only, and may live in another environment'
    ) from None
  formats = sorted(f.value for f in builder.info.available_file_formats())
  if 'array_record' not in formats:
    raise FileNotFoundError(
      f'dataset {name} in {builder.data_dir} is prepared as '
      f'{", ".join(formats)}, which has no random access. Convert it once:\n'
      f'  {_INSTALL}\n'
      f'  tfds convert_format --dataset_version_dir={builder.data_dir} '
      '--out_file_format=array_record'
    )
  return builder


def _unknown(name: str, places: str) -> str:
  base = re.split('[/:]', name)[0]
  close = difflib.get_close_matches(base, [*_known_names(), 'digits'], n=3)
  hint = f'; did you mean {" or ".join(close)}?' if close else '.'
  return (
    f'unknown dataset {name!r}{hint} Valid are digits, the datasets of TFDS '
    '(https://www.tensorflow.org/datasets/catalog), any dataset in the format '
    f'of TFDS that lies in {places}, and folders of images, given as a path '
    f'with a slash, such as ./{base}'
  )


def _keys(name: str, info: tfds.core.DatasetInfo) -> tuple[str, str]:
  """The features that hold the image and its class."""
  features = dict(info.features)
  keys = info.supervised_keys
  if keys is None or len(keys) != 2:
    kinds = (tfds.features.Image, tfds.features.ClassLabel)
    found = [[k for k, f in features.items() if type(f) is t] for t in kinds]
    keys = [key for of_kind in found for key in of_kind]
  if (
    len(keys) != 2
    or not isinstance(features.get(keys[0]), tfds.features.Image)
    or not isinstance(features.get(keys[1]), tfds.features.ClassLabel)
  ):
    raise ValueError(
      f'dataset {name} is not one of images with one class each; its features '
      f'are {", ".join(features)}'
    )
  return keys[0], keys[1]
