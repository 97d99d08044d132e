"""The protocols of the paper's evaluations, against table 4 and TFDS."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax.data import benchmarks

# Examples of the splits of TFDS.
_SIZES = {
  'imagenet2012': {'train': 1281167, 'validation': 50000},
  'cifar10': {'train': 50000, 'test': 10000},
  'cifar100': {'train': 50000, 'test': 10000},
  'oxford_iiit_pet': {'train': 3680, 'test': 3669},
  'oxford_flowers102': {'train': 1020, 'validation': 1020, 'test': 6149},
}


def _rows(name, split):
  """By split of TFDS, how often its own parser selects each example."""
  infos = {
    key: tfds.core.SplitInfo(name=key, shard_lengths=[size], num_bytes=0)
    for key, size in _SIZES[name].items()
  }
  counts = {key: np.zeros(size, int) for key, size in _SIZES[name].items()}
  parts = tfds.core.splits.AbstractSplit.from_spec(split).to_absolute(infos)
  for part in parts:
    counts[part.splitname][part.from_ : part.to] += 1
  return counts


@pytest.mark.parametrize('name', _SIZES)
def test_a_part_of_the_training_set_is_held_out(name):
  benchmark = benchmarks.BENCHMARKS[name]
  splits = (
    benchmark.train,
    benchmark.test,
    benchmark.tune_train,
    benchmark.tune_val,
  )
  every = [_rows(name, split) for split in splits]
  train, test, tune_train, tune_val = (
    np.concatenate(list(counts.values())) for counts in every
  )
  assert benchmark.examples == tuple(
    rows.sum() for rows in (train, test, tune_train, tune_val)
  )
  # Everything is used, and nothing twice.
  np.testing.assert_array_equal(tune_train + tune_val, train)
  assert (train + test == 1).all()
  assert test.sum() == list(_SIZES[name].values())[-1]
  share = {'imagenet2012': 0.01, 'cifar10': 0.02, 'cifar100': 0.02}
  held_out = tune_val.sum() / train.sum()
  assert held_out == pytest.approx(share.get(name, 0.1), rel=1e-4)


@pytest.mark.parametrize('name', _SIZES)
def test_classes_are_those_of_tfds(name, tmp_path):
  builder = tfds.builder(name, data_dir=tmp_path)
  num_classes = builder.info.features['label'].num_classes
  assert benchmarks.BENCHMARKS[name].num_classes == num_classes


# Table 4.
_ALL = (0.001, 0.003, 0.01, 0.03)
_TABLE_4 = {
  'imagenet2012': (20000, (0.003, 0.01, 0.03)),
  'cifar10': (10000, _ALL),
  'cifar100': (10000, _ALL),
  'oxford_iiit_pet': (500, _ALL),
  'oxford_flowers102': (500, _ALL),
}


def test_table_4():
  assert benchmarks.IMAGENET_EXTRA_LEARNING_RATES == (0.06,)
  for name, benchmark in benchmarks.BENCHMARKS.items():
    assert benchmark.name == name
    assert (benchmark.steps, benchmark.learning_rates) == _TABLE_4.get(
      name, (2500, (0.01,))
    )


@pytest.mark.parametrize(
  ('name', 'flip', 'crop'),
  [
    ('dtd', True, 'resize'),
    ('smallnorb_azimuth', False, 'resize'),
    ('clevr_count', True, 'none'),
    ('dsprites_location', False, 'none'),
  ],
)
def test_augmentation_of_vtab_does_not_change_the_class(name, flip, crop):
  benchmark = benchmarks.BENCHMARKS[f'vtab/{name}']
  assert (benchmark.flip, benchmark.crop) == (flip, crop)
  splits = (
    benchmark.train,
    benchmark.test,
    benchmark.tune_train,
    benchmark.tune_val,
  )
  assert splits == ('train800val200', 'test', 'train800', 'val200')
