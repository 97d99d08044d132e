"""Reads datasets of TensorFlow Datasets (TFDS) without TensorFlow."""

import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data import cores, decode, shards
from vit_jax.data.source import Label, Source

# Installs the packages that `tfds build` needs; TFDS does not declare them all.
_INSTALL = (
  'pip install tensorflow tensorflow-datasets apache-beam mlcroissant '
  'importlib_resources'
)

# Fields that may hold an image's file name.
_FILE_NAMES = ('file_name', 'image/file_name', 'filename', 'image/filename')


def class_field(field: str, values: int, names: tuple[str, ...]) -> Label:
  """Returns the rule that maps a field of integers below `values` to classes.

  If there are fewer class names than values, adjacent values share a class.
  """
  classify = functools.partial(_class_of, field, values, len(names))
  return Label(names, (field,), classify)


def _class_of(
  field: str, values: int, classes: int, record: Mapping[str, Any]
) -> int:
  value = int(record[field])
  if not 0 <= value < values:
    raise ValueError(
      f'A record has {field} {value}, which is not a class, so the split has '
      'no labels. Use another split.'
    )
  return value * classes // values


class TfdsSource(Source):
  """A source of one split of a prepared dataset, with one class per image."""

  def __init__(
    self,
    builder: tfds.core.DatasetBuilder,
    split: str,
    label: Label,
    title: str,
    image: str = 'image',
    scale: int = 1,
  ):
    """Opens the split; raises ValueError if it is missing, invalid or empty.

    Args:
      builder: the builder of the dataset.
      split: a split string of TFDS.
      label: the rule that computes the class of a record.
      title: the first part of the records' names.
      image: the field of the image.
      scale: a factor for pixel values; images stay encoded if it is 1.
    """
    features = builder.info.features
    self.class_names = label.class_names
    self._image = image
    self._label = label
    self._scale = scale
    self._title = title
    self._file_name = next((f for f in _FILE_NAMES if f in features), None)
    self._fingerprint = (
      f'tfds {os.fspath(builder.data_dir)} {builder.info.dataset_size} {split}'
    )
    # Only these fields are parsed, and not, for example, masks.
    # `tfds.decode.PartialDecoding` does the same but needs TensorFlow.
    self._label_fields, self._fields = (
      tfds.features.FeaturesDict({x: features[x] for x in names if x})
      for names in (label.fields, (image, *label.fields, self._file_name))
    )
    try:
      infos = builder.info.splits
      parts = tfds.core.splits.AbstractSplit.from_spec(split).to_absolute(infos)
      rows = [
        range(infos[part.splitname].num_examples)[part.from_ : part.to]
        for part in parts
      ]
      # TFDS would read wrong examples for a slice such as [3:2].
      if not any(rows) or any(r.start > r.stop for r in rows):
        raise ValueError('a slice selects no example')
      self._records = builder.as_data_source(
        split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
      )
    except (ValueError, NotImplementedError) as error:
      sizes = ', '.join(
        f'{key}: {info.num_examples}'
        for key, info in builder.info.splits.items()
      )
      raise ValueError(
        f'split {split!r} of {builder.name} cannot be read; the dataset has '
        f'the splits {sizes}, and slices such as train[:98%]. Reason: {error}'
      ) from None

  def __len__(self) -> int:
    return len(self._records)

  def states(self, indices: Sequence[int]) -> Iterable[str]:
    # This suffices because TFDS never changes the files that it has written.
    return (f'{self._fingerprint} {i}' for i in indices)

  def __getitem__(self, index: int) -> dict[str, Any]:
    record = self._fields.deserialize_example_np(
      self._records[index], decoders={self._image: tfds.decode.SkipDecoding()}
    )
    name = f'{self._title}/{index}'
    if self._file_name:
      name += f'/{record[self._file_name].decode()}'
    image = record[self._image]
    if self._scale != 1:
      image = decode.decode(image, name) * np.uint8(self._scale)
    return {'image': image, 'label': self._label.classify(record), 'name': name}

  def labels(self) -> np.ndarray:
    return self._labels

  @functools.cached_property
  def _labels(self) -> np.ndarray:
    # Kept, because reading the labels reads the images as well.
    labels = np.empty(len(self), np.int32)
    with cores.progress('Reading labels', len(self), 'records') as bar:
      for i, record in enumerate(shards.read_all(self._records)):
        fields = self._label_fields.deserialize_example_np(record)
        labels[i] = self._label.classify(fields)
        bar.update()
    return labels


def open_dataset(name: str, split: str, data_dir: str | None) -> TfdsSource:
  builder = prepared_builder(name, data_dir)
  image, field = _keys(name, builder.info)
  names = tuple(builder.info.features[field].names)
  label = class_field(field, len(names), names)
  return TfdsSource(builder, split, label, f'{name}/{split}', image)


def is_known(name: str) -> bool:
  """Whether TFDS has a dataset of that name, prepared or not."""
  return re.split('[/:]', name)[0] in _all_names()


def _all_names() -> list[str]:
  return tfds.list_builders(with_community_datasets=False)


def prepared_builder(
  name: str, data_dir: str | None
) -> tfds.core.DatasetBuilder:
  """Returns the builder of a dataset that is prepared as array_record.

  Raises FileNotFoundError if it has another format, or is known to TFDS but not
  prepared. Raises ValueError if it is neither known nor prepared.
  """
  data_dir = data_dir and os.path.expanduser(data_dir)
  places = data_dir or '$TFDS_DATA_DIR, by default ~/tensorflow_datasets'
  try:
    builder = tfds.core.read_only_builder.builder_from_files(
      name, data_dir=data_dir
    )
  except ValueError:  # TFDS's own message has twenty lines of naming rules
    if not is_known(name):
      raise ValueError(_unknown(name, places)) from None
    in_data_dir = f' --data_dir={data_dir}' if data_dir else ''
    raise FileNotFoundError(
      f'dataset {name} is not prepared in {places}. Prepare it once:\n'
      f'  {_INSTALL}\n'
      f'  tfds build {name} --file_format=array_record{in_data_dir}\n'
      'Only these commands need TensorFlow; you can run them in another '
      'Python environment.'
    ) from None
  formats = sorted(f.value for f in builder.info.available_file_formats())
  if 'array_record' not in formats:
    raise FileNotFoundError(
      f'dataset {name} in {builder.data_dir} is prepared as '
      f'{", ".join(formats)}, but must be array_record. Convert it once:\n'
      f'  {_INSTALL}\n'
      f'  tfds convert_format --dataset_version_dir={builder.data_dir} '
      '--out_file_format=array_record'
    )
  return builder


def _unknown(name: str, places: str) -> str:
  base = name.partition(':')[0]
  close = difflib.get_close_matches(base, [*_all_names(), 'digits'], n=3)
  hint = f'; did you mean {" or ".join(close)}?' if close else '.'
  return (
    f'unknown dataset {name!r}{hint} Use digits, a dataset of TFDS '
    '(such as imagenet2012; https://www.tensorflow.org/datasets/catalog), a '
    f"dataset in TFDS's format in {places}, a table (.csv), "
    "'hf://datasets/OWNER/NAME', or a folder "
    f'of images, given as a path with a slash, such as ./{base}'
  )


def _keys(name: str, info: tfds.core.DatasetInfo) -> tuple[str, str]:
  """Returns the names of the features that hold the image and the class."""
  features = dict(info.features)
  keys = info.supervised_keys
  kinds = (tfds.features.Image, tfds.features.ClassLabel)
  if keys is None or len(keys) != 2:
    found = [[k for k, f in features.items() if type(f) is t] for t in kinds]
    keys = [key for of_kind in found for key in of_kind]
  if len(keys) != 2 or not all(
    isinstance(features.get(k), t) for k, t in zip(keys, kinds, strict=True)
  ):
    raise ValueError(
      f'dataset {name} does not pair one image with one class '
      '(supervised_keys of TFDS); its features are '
      f'{", ".join(sorted(features))}. To detect objects, give a folder with '
      'COCO or Pascal VOC annotations.'
    )
  return keys[0], keys[1]
