"""Fixtures of the tests of transformers' directories."""

import pytest

from tests.checkpoints.formats.hf_folder import SIZE, TINY, TINY_BIT, Folder
from tests.checkpoints.random_weights import random_checkpoint


@pytest.fixture
def folder(tmp_path):
  """A written transformers directory."""
  checkpoint = random_checkpoint(None, SIZE, **TINY)
  return Folder(tmp_path / 'vit', checkpoint)


@pytest.fixture
def bit_folder(tmp_path):
  return Folder(tmp_path / 'bit', random_checkpoint(None, SIZE, **TINY_BIT))
