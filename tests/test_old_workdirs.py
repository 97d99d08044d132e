"""Workdirs of earlier versions open, resume and end as they would have."""

import functools
import json
import pathlib
import tarfile

import numpy as np
import pytest
from flax import traverse_util

from configs import digits
from tests.conftest import ROOT
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening, saving
from vit_jax.train import train

WORKDIRS = pathlib.Path(__file__).parent / 'workdirs'
GOLDEN = ROOT / 'tests/golden'


def unpack(name, folder):
  """Returns a workdir of an earlier version, in the folder."""
  with tarfile.open(WORKDIRS / f'{name}.tar.gz') as file:
    # Not an argument: Python 3.11 has it only since 3.11.4.
    file.extraction_filter = getattr(tarfile, 'data_filter', None)
    file.extractall(folder)
  return folder / name


@pytest.fixture
def unpacked(tmp_path):
  return functools.partial(unpack, folder=tmp_path)


def flat_params(workdir):
  params = opening.open_checkpoint(str(workdir)).params
  return traverse_util.flatten_dict(params, sep='/')


def final_params(workdir):
  """Returns the parameters of step 12, and not their Polyak average."""
  like = opening.open_checkpoint(str(workdir)).params
  params = saving.read_arrays(workdir / 'checkpoints' / '12' / 'params', like)
  return traverse_util.flatten_dict(params, sep='/')


def config_of(workdir, name):
  """Returns today's config with what the workdir's had set."""
  meta = workdir / 'checkpoints' / '7' / 'meta' / 'metadata'
  saved = config_lib.flatten(json.loads(meta.read_text())['meta']['config'])
  config = digits.get_config(name)
  for key, value in saved.items():
    if not key.startswith('evaluators.'):
      value = tuple(value) if isinstance(value, list) else value
      config.update_from_flattened_dict({key: value})
  return config


@pytest.mark.parametrize('name', ['vit', 'hybrid'])
def test_they_open_as_they_did(name, unpacked):
  got = flat_params(unpacked(name))
  with np.load(WORKDIRS / f'{name}_seven.npz') as want:
    assert got.keys() == set(want)
    for key in want:
      np.testing.assert_array_equal(got[key], want[key], err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['vit', 'hybrid'])
def test_they_resume_and_end_as_if_undisturbed(name, unpacked, capsys):
  workdir = unpacked(name)
  train(config_of(workdir, name), str(workdir))
  assert 'test/accuracy' in capsys.readouterr().out
  assert len((workdir / 'metrics.csv').read_text().splitlines()) == 13
  got = final_params(workdir)
  with np.load(WORKDIRS / f'{name}_final.npz') as want:
    assert got.keys() == set(want)
    for key in want:
      # Another CPU adds up in another order; what five steps change is a
      # hundred times as much.
      np.testing.assert_allclose(
        got[key], want[key], rtol=0, atol=2e-4, err_msg=key
      )
    with np.load(WORKDIRS / f'{name}_seven.npz') as before:
      changes = [np.abs(want[key] - before[key]).max() for key in want]
  assert max(changes) > 2e-3


def test_a_converted_checkpoint_is_the_same(unpacked):
  got = flat_params(unpacked('converted'))
  with np.load(GOLDEN / 'tiny_s7.npz') as want:
    assert got.keys() == set(want)
    for key in want:
      np.testing.assert_array_equal(got[key], want[key], err_msg=key)
