"""A file of representations is read for what it was written, and no other."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.evaluators import feature_file

FACTS = {'layer': 'block_1', 'size': (8, 12), 'model': 'x' * 118}
ARRAYS = {
  'train_labels': np.array([0, 1, 1], np.int32),
  'test_labels': np.array([1, 0], np.int32),
  'class_names': np.array(['cat', 'dog']),
}


@pytest.fixture
def path(tmp_path):
  rng = np.random.default_rng(0)
  found = {'train_features': rng.random((3, 5))}
  found['test_features'] = rng.random((2, 5))
  feature_file.write(str(tmp_path / 'f.npz'), FACTS, found | ARRAYS)
  return str(tmp_path / 'f.npz')


def test_what_was_written_is_read(path):
  rng = np.random.default_rng(0)
  train_ND, test_MD = feature_file.read(path, FACTS, ARRAYS)
  np.testing.assert_array_equal(train_ND, rng.random((3, 5)))
  np.testing.assert_array_equal(test_MD, rng.random((2, 5)))
  with np.load(path) as file:
    assert {*file} == {
      *('train_features', 'test_features', 'train_labels', 'test_labels'),
      *('class_names', 'facts'),
    }


@pytest.mark.parametrize(
  ('changes', 'lines'),
  [
    ({'layer': 'pre_logits'}, ['layer: "block_1" -> "pre_logits"']),
    ({'new': 3}, ['new: null -> 3']),
    ({'train_labels': np.array([0, 1, 0])}, ['train_labels: others']),
    ({'class_names': np.array(['dog', 'cat'])}, ['class_names: others']),
  ],
)
def test_what_differs_is_named(path, changes, lines):
  with pytest.raises(ValueError) as refused:
    feature_file.read(
      path,
      FACTS | {k: v for k, v in changes.items() if k not in ARRAYS},
      ARRAYS | {k: v for k, v in changes.items() if k in ARRAYS},
    )
  first, *named, last = str(refused.value).splitlines()
  assert first == f'{path} holds features of something else:'
  assert named == [f'  {line}' for line in lines]
  assert last.startswith('Give another --features')


def test_damage_is_refused(path, tmp_path):
  with open(path, 'r+b') as file:
    file.truncate(300)
  with pytest.raises(ValueError, match='cannot be read as a file of features'):
    feature_file.read(path, FACTS, ARRAYS)


def test_a_checkpoint_is_known_by_its_model_and_all_of_its_numbers():
  fields = dict(patch_size=8, width=8, depth=1, mlp_dim=8, heads=2)
  one = random_checkpoint(None, (8, 16), **fields)
  same = random_checkpoint(None, (8, 16), names=False, **fields)
  assert feature_file.identity(one) == feature_file.identity(same)
  moved = jax.tree.map(np.copy, one.params)
  moved['head']['bias'][2] += 1
  others = (
    dataclasses.replace(one, params=moved),
    dataclasses.replace(one, model=one.model.clone(gelu='exact')),
  )
  # As another format may have them.
  turned = dict(reversed(one.params.items()))
  turned = dataclasses.replace(one, params=turned)
  assert feature_file.identity(turned) == feature_file.identity(one)
  found = {feature_file.identity(x) for x in (one, *others)}
  assert len(found) == 3
