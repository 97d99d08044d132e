"""The split arithmetic against TFDS, and what is refused."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax.data import splits

_SPLITS = {'train': list(range(100, 333)), 'test': list(range(7))}


def _by_tfds(split):
  """What TFDS would read: its own parser on splits of the same sizes."""
  infos = {
    name: tfds.core.SplitInfo(
      name=name, shard_lengths=[len(examples)], num_bytes=0
    )
    for name, examples in _SPLITS.items()
  }
  parts = tfds.core.splits.AbstractSplit.from_spec(split).to_absolute(infos)
  return [
    example
    for part in parts
    for example in _SPLITS[part.splitname][part.from_ : part.to]
  ]


@pytest.mark.parametrize(
  'split',
  [
    'test + train',
    'all',
    'train[-50:-20]',
    'train[:98%]',
    'train[:0.5%]',
    'train[12.5%:]+test[:-50%]',
    'train[10:50%]',
    'train[:1_00]',
    'train[:233]',
  ],
)
def test_same_examples_as_tfds(split):
  assert splits.select(split, _SPLITS, 'x').tolist() == _by_tfds(split)


def test_joined_splits_are_not_taken_for_one_another():
  """Or what is measured would be learned, or twice the same measured."""
  with pytest.raises(ValueError, match=r"no split 'val'; it has train, test"):
    splits.select('train+val', {'train': [1], 'test': [2]}, 'x')
  only_val = {'train': [1], 'val': [2, 3]}
  with pytest.raises(ValueError, match=r"no split 'test'; it has train, val"):
    splits.select('val[:1] + test', only_val, 'x')
  found = splits.select('train+validation[1:]', only_val, 'x')
  assert found.tolist() == [1, 3]


def test_aliases():
  only_val = {'train': [1], 'val': [2, 3]}
  assert splits.select('test', only_val, 'x').tolist() == [2, 3]
  assert splits.select('val', _SPLITS, 'x').tolist() == _SPLITS['test']
  both = {'train': [1], 'val': [2], 'test': [3]}
  assert splits.select('test', both, 'x').tolist() == [3]
  # The likelier one of two.
  assert splits.select('validation', both, 'x').tolist() == [2]
  both = {'validation': [4], 'test': [3]}
  assert splits.select('val', both, 'x').tolist() == [4]
  both = {'validation': [4], 'training': [3]}
  assert splits.select('val + train', both, 'x').tolist() == [4, 3]
  both = {'testing': [4], 'val': [3]}
  assert splits.select('test', both, 'x').tolist() == [4]
  both = {'validation': [4], 'val': [2]}
  assert splits.select('test', both, 'x').tolist() == [2]


@pytest.mark.parametrize(
  'split, message',
  [
    ('trian', "x has no split 'trian'; it has train, test"),
    ('train[', "split 'train\\[' of x is not valid: use names"),
    ('train[:]', "split 'train\\[:\\]' of x is not valid"),
    ('train[:1.5]', 'is not valid'),
    ('train[:234]', "slice 'train\\[:234\\]' exceeds the 233 examples"),
    ('train[9:9]', 'selects no example; sizes are train: 233, test: 7'),
    ('all[:5]', "x has no split 'all'; it has train, test"),
  ],
)
def test_refusals(split, message):
  with pytest.raises(ValueError, match=message):
    splits.select(split, _SPLITS, 'x')


def test_the_held_out_fifth_is_stratified():
  labels = np.repeat([0, 1, 2, 3, 4], [100, 20, 2, 1, 8])
  labels = np.random.default_rng(0).permutation(labels)
  found = splits.stratified_fifth(labels, seed=1)
  train, test = found['train'], found['test']
  assert sorted(train + test) == list(range(131))
  # Of eight two are nearer to a fifth than one is.
  assert np.bincount(labels[test]).tolist() == [20, 4, 1, 0, 2]
  assert found == splits.stratified_fifth(labels, seed=1)
  assert test != splits.stratified_fifth(labels, seed=2)['test']
  # The same as ever: what was held out once is not to be learned later.
  rng, want = np.random.RandomState(1), []
  for label, count in enumerate([20, 4, 1, 0, 2]):
    members = np.flatnonzero(labels == label)
    want += rng.permutation(members)[:count].tolist()
  assert test == sorted(want)


def test_the_order_of_a_split_is_of_its_size_and_the_seed_alone():
  """And the same as ever."""
  parts = {'train': range(100, 109), 'test': range(9)}
  found = splits.permuted(parts, 3)
  want = np.random.RandomState(3).permutation(9)
  assert found == {'train': (100 + want).tolist(), 'test': want.tolist()}
