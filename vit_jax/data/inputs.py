"""Opens what a config's `data` names, with all processes together."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.data import bad_images, sources


def open_source(data: ConfigDict, split: str) -> sources.Source:
  """Opens a split of `config.data`, its images checked by all processes."""
  source = sources.open_source(
    data.name,
    split,
    data_dir=data.dir or None,
    split_seed=data.split_seed,
    on_bad_image=None,
  )
  return checked(source, data.on_bad_image)


def checked(source: sources.Source, on_bad_image: str) -> sources.Source:
  """Refuses or drops unreadable images, which all processes look for.

  Raises:
    ValueError: as `check.drop_bad_images`.
  """
  bad = bad_images.find_bad_images(
    source,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )
  bad = [
    bad_images.BadImage(*fields)
    for fields in _gather([dataclasses.astuple(b) for b in bad])
  ]
  return bad_images.drop_bad_images(source, bad, on_bad_image)


def _gather(items: list[Any]) -> list[Any]:
  """Returns the JSON-like items of all processes, in the processes' order."""
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
