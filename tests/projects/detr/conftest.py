"""Golden losses of DETR's original code, and fixtures of tests/data."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from tests.data.conftest import decodings, encode, own_cache  # noqa: F401


@pytest.fixture(scope='session')
def golden():
  with np.load(ROOT / 'tests/golden/detr_losses.npz') as file:
    return dict(file)


def objects_of(golden, rows=5):
  """Returns labels, boxes and masks of three images, padded to M rows."""
  labels_BM = np.full((3, rows), -1, np.int32)
  boxes_BM4 = np.zeros((3, rows, 4), np.float32)
  masks_BMHW = np.zeros((3, rows, 40, 48), bool)
  for i in range(3):
    n = len(golden[f'target{i}/labels'])
    labels_BM[i, :n] = golden[f'target{i}/labels']
    boxes_BM4[i, :n] = golden[f'target{i}/boxes']
    masks_BMHW[i, :n] = golden[f'target{i}/masks']
  return {'labels': labels_BM, 'boxes': boxes_BM4, 'masks': masks_BMHW}


def random_detr(size, **fields):
  """Returns a checkpoint with random weights and variances above 0."""
  checkpoint = random_checkpoint(None, size, **fields)
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: np.exp(x) if path[-1].key == 'var' else x,
    checkpoint.params,
  )
  return dataclasses.replace(checkpoint, params=params)
