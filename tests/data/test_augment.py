"""Scaling, flips and mixup against their definitions."""

import jax
import numpy as np
import pytest

from vit_jax.data import augment


def images(n, dtype=np.uint8):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (n, 3, 4, 3)).astype(dtype)


def test_unit_range_is_the_papers_scaling_at_all_256_values():
  values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
  got = augment.normalize(np.repeat(values, 3, axis=-1))
  assert got.dtype == np.float32
  want = (np.arange(256) - 127.5) / 127.5
  for channel in range(3):
    # One rounding to float32 in the division, of numbers up to 1.
    np.testing.assert_allclose(
      np.ravel(got[..., channel]), want, rtol=0, atol=1e-7
    )
  assert np.ravel(got)[[0, -1]].tolist() == [-1, 1]


def test_each_channel_has_its_own_mean_and_deviation():
  mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
  values = images(5)
  got = augment.normalize(values, mean, std)
  want = (values / 255.0 - np.array(mean)) / np.array(std)
  # Values up to 3 in float32.
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def flips(n, seed):
  """Returns which images were mirrored; fails if anything else happened."""
  before = images(n, np.float32)
  after = np.asarray(augment.random_flip(jax.random.key(seed), before))
  mirrored = (after == before[:, :, ::-1]).all((1, 2, 3))
  kept = (after == before).all((1, 2, 3))
  assert (mirrored ^ kept).all()
  return mirrored


def test_flip_mirrors_half_of_the_images_exactly():
  mirrored = flips(4000, seed=0)
  # Five standard deviations of a fair coin.
  assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)


def test_flip_differs_between_keys_and_not_with_the_same():
  assert (flips(100, seed=1) != flips(100, seed=2)).any()
  assert (flips(100, seed=1) == flips(100, seed=1)).all()


def test_flip_is_left_to_right():
  image = np.zeros((64, 2, 3, 1), np.float32)
  image[:, 0, 0] = 1  # top left
  after = np.asarray(augment.random_flip(jax.random.key(0), image))
  assert set(np.argmax(after.reshape(64, -1), 1)) == {0, 2}


def share_of(seed, alpha, n=6):
  """Mixes, checks that it is one convex combination, and returns its share."""
  x, y = images(n, np.float32), np.eye(n, dtype=np.float32)
  mixed_x, mixed_y = jax.device_get(
    augment.mixup(jax.random.key(seed), x, y, alpha)
  )
  share = mixed_y[0, 0]  # every image has a class of its own
  partner = np.roll(np.arange(n), 1)
  assert (partner != np.arange(n)).all()
  # Products and sums of float32 numbers up to 255, and up to 1.
  np.testing.assert_allclose(
    mixed_x, share * x + (1 - share) * x[partner], rtol=0, atol=1e-4
  )
  np.testing.assert_allclose(
    mixed_y, share * y + (1 - share) * y[partner], rtol=0, atol=1e-6
  )
  np.testing.assert_allclose(mixed_y.sum(1), 1, rtol=0, atol=1e-6)
  return share


@pytest.mark.parametrize('alpha', [0.1, 0.2, 1.0, 8.0])
def test_mixup_is_a_convex_combination_with_the_neighbour(alpha):
  shares = [share_of(seed, alpha) for seed in range(20)]
  assert all(0.5 <= share <= 1 for share in shares)
  assert len(set(shares)) > 10


@pytest.mark.parametrize('alpha', [0.2, 1.0, 4.0])
def test_shares_are_a_folded_beta_distribution(alpha):
  """Against the quantiles of 20,000 draws by NumPy."""
  n = 2000
  mix = jax.vmap(
    lambda key: augment.mixup(key, np.zeros((2, 1, 1, 1)), np.eye(2), alpha)[1]
  )
  shares = np.asarray(mix(jax.random.split(jax.random.key(0), n))[:, 0, 0])
  draws = np.random.default_rng(0).beta(alpha, alpha, 20_000)
  want = np.maximum(draws, 1 - draws)
  # Kolmogorov-Smirnov: the distance of two samples exceeds this once in 10^5.
  grid = np.linspace(0.5, 1, 401)
  distance = np.abs(
    np.searchsorted(np.sort(shares), grid, 'right') / n
    - np.searchsorted(np.sort(want), grid, 'right') / len(want)
  ).max()
  assert distance < 2.5 * np.sqrt((n + len(want)) / (n * len(want)))


def test_one_share_serves_the_whole_batch():
  """So that a batch shared by many devices needs no more randomness."""
  y = np.eye(6, dtype=np.float32)
  _, mixed = augment.mixup(jax.random.key(0), images(6, np.float32), y, 1.0)
  assert len(set(np.diag(np.asarray(mixed)))) == 1
