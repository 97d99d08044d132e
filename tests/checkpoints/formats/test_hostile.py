"""Damaged and malicious checkpoints are refused by one sentence.

Each of a thousand damaged files opens with the same parameters, or is refused
in little memory by an error that names it. Code in a file never runs.
"""

import importlib.util
import os
import pickle
import resource
import shutil
import zlib

import numpy as np
import pytest
from flax import traverse_util

from tests.checkpoints.formats.hostile_formats import FORMATS, WITHOUT_CHECKSUMS
from tests.checkpoints.formats.hostile_payloads import payload
from tests.checkpoints.formats.mutations import mutations
from vit_jax.checkpoints import opening
from vit_jax.convert import __main__ as cli
from vit_jax.models import flops

CASES = 1000
MEMORY_BYTES = 500e6

EVERY = [
  (name, mutation, seed)
  # More seeds than are needed.
  for seed in range(CASES)
  for name in FORMATS
  for mutation in mutations(name)
][:CASES]
FAST = [case for case in EVERY if case[2] == 0][::3]


@pytest.fixture(scope='module')
def pristine(tmp_path_factory):
  """Gives a function from a format to a path and its `Checkpoint`."""
  made = {}

  def make(name):
    if name not in made:
      path = tmp_path_factory.mktemp('pristine') / name
      FORMATS[name](path)
      made[name] = path, opening.open_checkpoint(str(path))
    return made[name]

  return make


def _arrays(checkpoint):
  return traverse_util.flatten_dict(checkpoint.params, sep='/')


@pytest.fixture
def mutated(request, tmp_path, pristine):
  """Gives the mutation, a damaged copy, words of the error, the original."""
  name, mutation, seed = request.param
  if name.endswith('.pth'):
    request.getfixturevalue('torch')
  if name == 'timm' and importlib.util.find_spec('timm'):
    # Where a refusal looks up names; with CUDA it takes much memory by itself.
    request.getfixturevalue('timm')
  source, checkpoint = pristine(name)
  path = tmp_path / 'files' / name
  path.parent.mkdir()
  (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
  rng = np.random.default_rng([zlib.crc32(f'{name} {mutation}'.encode()), seed])
  words = mutations(name)[mutation](path, rng) or []
  return mutation, path, words, checkpoint


def of(cases):
  return pytest.mark.parametrize(
    'mutated',
    cases,
    ids=['-'.join(map(str, case)).replace(' ', '_') for case in cases],
    indirect=True,
  )


def peak_bytes():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_unharmed(opened, whole, mutation, name):
  """Checks that a damaged file opens like the original."""
  got, want = _arrays(opened), _arrays(whole)
  expected = flops.param_shapes(opened.model, opened.image_size)
  assert {key: x.shape for key, x in got.items()} == {
    key: x.shape
    for key, x in traverse_util.flatten_dict(expected, sep='/').items()
  }
  different = [
    key
    for key in want.keys() | got.keys()
    if not np.array_equal(got.get(key), want.get(key))
  ]
  # Where nothing is there to compare with, a value can change.
  assert len(different) <= name.startswith(WITHOUT_CHECKSUMS), different
  if name.endswith('.npz') or (name == 'workdir' and 'forged' not in mutation):
    for field in ('model', 'image_size', 'preprocessing', 'class_names'):
      assert getattr(opened, field) == getattr(whole, field)


def check(mutation, path, words, checkpoint):
  """Checks that a file is refused by one sentence, or opens unharmed."""
  before = peak_bytes()
  try:
    opened = opening.open_checkpoint(str(path))
  except Exception as e:
    # Not one of their subclasses, which a reader let through.
    assert type(e) in (ValueError, FileNotFoundError, ImportError), repr(e)
    message = str(e)
    assert str(path) in message
    assert '\n' not in message and len(message) < 1000, message
    if words and 'layers' in mutation:  # too many for any model
      words = {*words, 'model.depth is', 'layers is'}
    if words:  # a missing array has the name of ours
      words = {*words, 'lacks the array', 'it is missing'}
    assert not words or any(word in message for word in words), message
  else:
    check_unharmed(opened, checkpoint, mutation, path.name)
  assert peak_bytes() - before < MEMORY_BYTES
  assert os.listdir(path.parent) == [path.name]


@pytest.mark.edge
@of(FAST)
def test_a_damaged_file_is_refused_or_unharmed(mutated):
  check(*mutated)


@pytest.mark.slow
@of([case for case in EVERY if case not in FAST])
def test_a_thousand_damaged_files_are_refused_or_unharmed(mutated):
  check(*mutated)


@pytest.mark.edge
@of([('official.npz', 'array missing', 0), ('hf', 'no object', 0)])
def test_a_refused_conversion_leaves_nothing(mutated, capsys):
  _, path, _, _ = mutated
  status = cli.main([str(path), str(path.parent / 'target'), '--to=orbax'])
  err = capsys.readouterr().err
  assert status == 2
  assert str(path) in err and 'Traceback' not in err
  assert os.listdir(path.parent) == [path.name]


@pytest.mark.edge
def test_the_payloads_would_run(tmp_path):
  """Otherwise the tests above would prove nothing."""
  pickle.loads(pickle.dumps(payload(tmp_path / 'mark')))
  assert (tmp_path / 'mark').exists()
