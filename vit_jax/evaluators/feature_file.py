"""A .npz file of the features of a data set."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.checkpoints.saving import checksums
from vit_jax.data import atomic_files

_WAY_OUT = 'Give another --features, or remove it to have them computed anew.'


def identity(checkpoint: Checkpoint) -> str:
  """Returns a hash of the model and all of its parameters."""
  weights = checkpoint.weights()
  facts = {
    'fields': weights.fields,
    'shapes': {name: x.shape for name, x in weights.arrays.items()},
    'checksums': np.asarray(checksums(weights.arrays)).tolist(),
  }
  text = json.dumps(facts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def is_there(path: str) -> bool:
  """Whether the first process sees the file, which all of them then read.

  Raises:
    FileNotFoundError: if the file and its folder are missing.
  """
  if not path:
    return False
  is_found = np.array(os.path.exists(path))
  if multihost_utils.broadcast_one_to_all(is_found):
    return True
  atomic_files.refuse_existing(path)
  return False


def write(
  path: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a new file: facts of JSON's types, and arrays by name."""
  with atomic_files.new_file(path) as partial, open(partial, 'wb') as file:
    text = np.array(json.dumps(facts))
    np.savez(file, allow_pickle=False, facts=text, **arrays)


def read(
  path: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the features ND and MD of a file with these facts and arrays.

  Raises:
    ValueError: if the file has other contents, or is damaged.
  """
  try:
    # Opened here, as np.load does not close what it cannot read.
    with open(path, 'rb') as opened, np.load(opened) as file:
      kept = dict(json.loads(str(file['facts'])))
      train_ND, test_MD = file['train_features'], file['test_features']
      others = [k for k, x in arrays.items() if not np.array_equal(file[k], x)]
  except Exception as e:  # zip, npy and JSON fail in many ways
    raise ValueError(
      f'{path} cannot be read as a file of features ({type(e).__name__}: {e}). '
      f'{_WAY_OUT}'
    ) from None
  changes = [
    f'  {key}: {json.dumps(kept.get(key)):.120} -> {json.dumps(value):.120}\n'
    for key, value in json.loads(json.dumps(facts)).items()  # tuples are lists
    if kept.get(key) != value
  ] + [f'  {key}: others\n' for key in others]
  if changes:
    raise ValueError(
      f'{path} holds features of something else:\n{"".join(changes)}{_WAY_OUT}'
    )
  return train_ND, test_MD
