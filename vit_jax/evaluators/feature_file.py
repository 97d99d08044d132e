"""Representations of a data set in a file: .npz, for NumPy and anybody else."""

import dataclasses
import hashlib
import json
import os
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.checkpoints.saving import checksums
from vit_jax.data import whole

_WAY_OUT = 'Give another --features, or remove it to have them computed anew.'


@dataclasses.dataclass(frozen=True)
class Contents:
  """What a file has beside the representations.

  The facts are all that these depend on, of types that JSON has; labels are
  int32.
  """

  facts: dict[str, Any]
  train_labels_N: np.ndarray
  test_labels_M: np.ndarray
  class_names: tuple[str, ...]

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the arrays of the file, by their names in it."""
    return {
      'train_labels': self.train_labels_N,
      'test_labels': self.test_labels_M,
      'class_names': np.array(self.class_names),
    }


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
  """Whether there is such a file, for all processes alike.

  Raises:
    FileNotFoundError: if it is not there and its folder neither.
    ValueError: if only some processes see it.
  """
  if not path:
    return False
  found = multihost_utils.process_allgather(np.array(os.path.exists(path)))
  if np.all(found):
    return True
  if np.any(found):
    raise ValueError(
      f'{path} is there for some processes and not for others: put it into a '
      'folder that all of them share.'
    )
  whole.refuse_existing(path)
  return False


def write(
  path: str, contents: Contents, train_ND: np.ndarray, test_MD: np.ndarray
) -> None:
  """Writes a new file, with the facts as JSON: all of it or none."""
  with whole.new_file(path) as partial, open(partial, 'wb') as file:
    np.savez(
      file,
      allow_pickle=False,
      train_features=train_ND,
      test_features=test_MD,
      facts=np.array(json.dumps(contents.facts)),
      **contents.arrays(),
    )


def read(path: str, wanted: Contents) -> tuple[np.ndarray, np.ndarray]:
  """Returns the representations ND and MD of a file that `write` wrote.

  Raises:
    ValueError: if it has not the contents wanted, naming all that differs, or
      is damaged.
  """
  arrays = wanted.arrays()
  try:
    # Opened here, as np.load does not close what it cannot read.
    with open(path, 'rb') as opened, np.load(opened) as file:
      facts = dict(json.loads(str(file['facts'])))
      train_ND, test_MD = file['train_features'], file['test_features']
      same = {k: np.array_equal(file[k], x) for k, x in arrays.items()}
  except Exception as e:  # damage shows in as many ways as there are bytes
    raise ValueError(
      f'{path} cannot be read as a file of features ({type(e).__name__}: {e}). '
      f'{_WAY_OUT}'
    ) from None
  # As JSON gives it back, with lists for tuples.
  facts_wanted = json.loads(json.dumps(wanted.facts))
  changes = [
    f'  {key}: {_short(facts.get(key))} -> {_short(value)}'
    for key, value in facts_wanted.items()
    if facts.get(key) != value
  ]
  changes += [
    f'  {key}: others' for key, is_same in same.items() if not is_same
  ]
  if changes:
    raise ValueError(
      f'{path} holds features of something else:\n'
      + '\n'.join(changes)
      + f'\n{_WAY_OUT}'
    )
  return train_ND, test_MD


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 120 else f'{text[:120]}...'
