"""Writes images and their classes as ArrayRecord files."""

import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.data import atomic_files, cores, sources, splits
from vit_jax.data.source import LabelledSource, Source

_SHARD_BYTES = 256 << 20


def write(
  name: str, target: str, split_names: Sequence[str] = ()
) -> dict[str, int]:
  """Writes splits of a dataset to a new folder.

  The default is train, val and test, as far as they exist.

  `arrayrecord:TARGET` reads the same images and classes as `name`. The order is
  also the same if `split_seed` is 0. If `train` is the only split in the
  folder, `arrayrecord:` takes a fifth as `test`, and the order differs. The
  folder appears when everything is written. Returns the number of images by
  split.

  Raises the errors of `sources.open_source` and `atomic_files.new_file`, and
  ValueError if a split is not one of `splits.NAMES`, an image file cannot be
  read, two splits begin with the same image, or images have objects, masks or
  several classes.
  """
  if not split_names:
    opens = functools.partial(sources.open_source, name)
    existing = ([x for x in y if splits.exists(x, opens)] for y in splits.SAME)
    split_names = [synonyms[0] for synonyms in existing if synonyms]
  # If no split exists, opening `train` raises its error.
  split_names = split_names or ('train',)
  found = {key: sources.open_source(name, key) for key in split_names}
  for key, source in found.items():
    if key not in splits.NAMES:
      raise ValueError(
        f'split {key!r} cannot be written: use {", ".join(splits.NAMES)}'
      )
    one_class = isinstance(source, LabelledSource) or not source.class_names
    if source.several_labels or not one_class:
      raise ValueError(
        f'{name} has objects, masks, or several classes per image; shards keep '
        f'one class per image. Train on {name} itself.'
      )
  # If val or test is missing, its name selects the other split.
  first = [bytes(x[0]['image']) for x in found.values() if len(x)]
  if len({*first}) < len(first):
    raise ValueError(
      f'Two of the splits {", ".join(found)} of {name} begin with the same '
      'image. If val or test is missing, leave it out of --splits.'
    )
  with atomic_files.new_folder(target) as folder:
    for key, source in found.items():
      _write_split(source, f'{folder}/{key}')
    names = next(iter(found.values())).class_names
    if names:
      text = ''.join(f'{x}\n' for x in names)
      (folder / 'classes.txt').write_text(text, encoding='utf-8')
  return {key: len(source) for key, source in found.items()}


def _write_split(source: Source, prefix: str) -> None:
  # Imported here: TFDS takes a second; Windows lacks array_record.
  from array_record.python import array_record_module
  from tensorflow_datasets.proto import tf_example_pb2

  # Readers shuffle records with `splits.permuted`. Records are written in the
  # inverse permutation, so that readers get the order of `source`.
  index_of = np.argsort(splits.permuted({'': range(len(source))}, 0)[''])
  writer: Any = None
  count, size = 0, _SHARD_BYTES
  what = f'Writing {os.path.basename(prefix)}'
  with cores.progress(what, len(source), 'images') as bar:
    for index in index_of.tolist():
      if size >= _SHARD_BYTES:
        if writer:
          writer.close()
        writer = array_record_module.ArrayRecordWriter(
          f'{prefix}-{count:05d}.array_record',
          'group_size:1,uncompressed',  # images are compressed already
        )
        count, size = count + 1, 0
      record = source[index]
      image = record['image']
      if isinstance(image, np.ndarray):
        file = io.BytesIO()
        Image.fromarray(image).save(file, 'PNG')
        image = file.getvalue()
      example = tf_example_pb2.Example()
      fields = example.features.feature
      fields['image'].bytes_list.value.append(image)
      file_name = '/'.join(record['name'].split('/')[-2:])
      fields['file_name'].bytes_list.value.append(os.fsencode(file_name))
      if 'label' in record:
        fields['label'].int64_list.value.append(record['label'])
      writer.write(example.SerializeToString())
      size += len(image)
      bar.update()
  writer.close()
