"""Scaling, flips and mixup against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data import device_augmentation
from vit_jax.data import images as images_lib


def images(n, dtype=np.uint8):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (n, 3, 4, 3)).astype(dtype)


def test_unit_range_is_the_papers_scaling_at_all_256_values():
  values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
  got = device_augmentation.normalize(np.repeat(values, 3, axis=-1))
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
  got = device_augmentation.normalize(values, mean, std)
  want = (values / 255.0 - np.array(mean)) / np.array(std)
  # Values up to 3 in float32.
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_flip_mirrors_half_of_the_images_exactly():
  before = images(4000, np.float32)
  after = np.asarray(device_augmentation.random_flip(jax.random.key(0), before))
  mirrored = (after == before[:, :, ::-1]).all((1, 2, 3))
  kept = (after == before).all((1, 2, 3))
  assert (mirrored ^ kept).all()
  # Five standard deviations of a fair coin.
  assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / np.sqrt(4000)


def share_of(seed, alpha, n=6):
  """Mixes, checks that it is one convex combination, and returns its share."""
  x, y = images(n, np.float32), np.eye(n, dtype=np.float32)
  mixed_x, mixed_y = jax.device_get(
    device_augmentation.mixup(jax.random.key(seed), x, y, alpha)
  )
  # Every image has a class of its own, and one share serves the whole batch.
  share = mixed_y[0, 0]
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


@pytest.mark.parametrize('alpha', [0.2, 8.0])
def test_mixup_is_a_convex_combination_with_the_neighbour(alpha):
  shares = [share_of(seed, alpha) for seed in range(20)]
  assert all(0.5 <= share <= 1 for share in shares)
  assert len(set(shares)) > 10


@pytest.mark.parametrize('alpha', [0.2, 4.0])
def test_shares_are_a_folded_beta_distribution(alpha):
  """Against the quantiles of 20,000 draws by NumPy."""
  n = 2000
  mix = jax.vmap(
    lambda key: device_augmentation.mixup(
      key, np.zeros((2, 1, 1, 1)), np.eye(2), alpha
    )[1]
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


def test_erasing_makes_rectangles_noise():
  """As often, as large and as long as its paper says."""
  images = jnp.full((600, 24, 32, 3), 7.0)
  got = np.asarray(
    device_augmentation.random_erasing(jax.random.key(0), images, 0.25)
  )
  changed = (got != 7).any(-1)
  erased = changed.any((1, 2))
  # A binomial of 600 draws: 150 and a deviation of 10.6.
  assert abs(erased.sum() - 150) < 5 * 10.6
  noise = got[changed]
  assert abs(noise.mean()) < 0.02
  assert abs(noise.std() - 1) < 0.02
  whole = np.asarray(
    device_augmentation.random_erasing(jax.random.key(0), images, 1.0)
  )
  found = []
  for inside in (whole != 7).any(-1):
    rows, columns = inside.any(1), inside.any(0)
    np.testing.assert_array_equal(inside, np.outer(rows, columns))
    for side in (rows, columns):  # without gaps
      assert np.count_nonzero(np.diff(np.concatenate([[0], side, [0]]))) == 2
    found.append(
      [np.argmax(rows), np.argmax(columns), rows.sum(), columns.sum()]
    )
  top, left, h, w = np.array(found).T
  # The same by NumPy: of any number the first that fits.
  rng = np.random.default_rng(0)
  area = 24 * 32 * rng.uniform(0.02, 1 / 3, 20_000)
  aspect = np.exp(rng.uniform(np.log(0.3), -np.log(0.3), 20_000))
  want_h, want_w = np.sqrt([area * aspect, area / aspect]).round()
  fits = (want_h < 24) & (want_w < 32)
  want_h, want_w = want_h[fits], want_w[fits]
  for x, want in (
    (h, want_h),
    (w, want_w),
    (h * w, want_h * want_w),
    (h / w, want_h / want_w),
    # Every place is as likely, up to both ends.
    (top == 0, 1 / (25 - want_h)),
    (top + h == 24, 1 / (25 - want_h)),
    (left == 0, 1 / (33 - want_w)),
    (left + w == 32, 1 / (33 - want_w)),
  ):
    assert abs(np.mean(x) - np.mean(want)) < 5 * np.std(x) / np.sqrt(600)
  # Whichever the row.
  places = (top + 0.5) / (25 - h), (left + 0.5) / (33 - w)
  assert abs(np.corrcoef(places)[0, 1]) < 5 / np.sqrt(600)


@pytest.mark.parametrize('shape', [(9, 1, 64, 3), (9, 64, 1, 3)])
def test_what_no_rectangle_fits_in_is_not_erased(shape):
  images = jnp.full(shape, 7.0)
  got = device_augmentation.random_erasing(jax.random.key(0), images, 1.0)
  np.testing.assert_array_equal(got, images)


def test_images_are_mirrored_and_erased_where_that_is_asked_for():
  rng = np.random.default_rng(0)
  before = jnp.asarray(rng.normal(size=(16, 6, 8, 3)), jnp.float32)
  key = jax.random.key(3)

  def augmented(**fields):
    return np.asarray(
      images_lib.Images((6, 8), **fields).augmented(before, key)
    )

  plain, mirrored, erased, both = (
    augmented(flip=flip, erasing=erasing)
    for erasing in (0.0, 1.0)
    for flip in (False, True)
  )
  np.testing.assert_array_equal(plain, before)
  np.testing.assert_array_equal(
    mirrored, device_augmentation.random_flip(key, before)
  )
  assert (mirrored != plain).any()
  # Noise of the same places, whatever was there.
  is_noise = (erased != plain).any(-1)
  assert is_noise.any((1, 2)).mean() > 0.8 and is_noise.mean() < 0.5
  np.testing.assert_array_equal(both[is_noise], erased[is_noise])
  np.testing.assert_array_equal(both[~is_noise], mirrored[~is_noise])


@pytest.mark.slow
def test_cutmix_pastes_the_neighbour_and_mixes_by_area():
  B, H, W, C = 4, 20, 30, 5
  images = jnp.broadcast_to(jnp.arange(B)[:, None, None, None], (B, H, W, 3))
  labels = jax.nn.one_hot(jnp.arange(B), C)
  shares, sides, inner = [], set(), 0
  corners = set()
  for seed in range(200):
    got, mixed = device_augmentation.cutmix(
      jax.random.key(seed), images.astype(jnp.float32), labels, 1.0
    )
    got, mixed = np.asarray(got), np.asarray(mixed)
    pasted = got[0, :, :, 0] != 0
    share = pasted.mean()
    for i in range(B):
      want = np.where(pasted, (i - 1) % B, i)
      np.testing.assert_array_equal(got[i], np.stack([want] * 3, -1))
      np.testing.assert_allclose(mixed[i, i], 1 - share, rtol=1e-5)
      np.testing.assert_allclose(mixed[i, (i - 1) % B], share, atol=1e-6)
    np.testing.assert_array_equal(
      pasted, np.outer(pasted.any(1), pasted.any(0))
    )
    shares.append(share)
    sides.add((pasted[0, 0], pasted[-1, -1]))
    if share < 0.2:
      corners |= {i for i in range(4) if pasted[-(i // 2), -(i % 2)]}
    if 0 < share and not (pasted[[0, -1]].any() or pasted[:, [0, -1]].any()):
      # As in the authors' code, half a side, rounded down, lies to either side
      # of the centre; height and width are the same part of the image's.
      h, w = pasted.any(1).sum(), pasted.any(0).sum()
      assert h % 2 == w % 2 == 0
      assert max(h / H, w / W) < min((h + 2) / H, (w + 2) / W)
      inner += 1
  # Beta(1, 1) is uniform, with a mean of 1/2; what hangs over is lost: for
  # squares of side s about uniform centres, the mean of s (1 - s/4) squared.
  side = np.sqrt(np.linspace(0, 1, 10_001))
  want = np.mean((side * (1 - side / 4)) ** 2)
  deviation = np.std(shares) / np.sqrt(len(shares))
  assert abs(np.mean(shares) - want) < 5 * deviation
  assert {(True, False), (False, True), (False, False)} <= sides
  assert corners == {0, 1, 2, 3}
  assert inner > 10


@pytest.mark.slow
def test_a_batch_has_mixup_or_cutmix():
  images = jnp.arange(4.0)[:, None, None, None] * jnp.ones((4, 8, 8, 3))
  labels = jax.nn.one_hot(jnp.arange(4), 4)
  args = images, labels

  def of(key, *alphas):
    return [
      np.asarray(x)
      for x in device_augmentation.mixup_or_cutmix(key, *args, *alphas)
    ]

  key = jax.random.key(0)
  for got, want in (
    (of(key, 0, 0), args),
    (of(key, 0.3, 0), device_augmentation.mixup(key, *args, 0.3)),
    (of(key, 0, 0.3), device_augmentation.cutmix(key, *args, 0.3)),
  ):
    for x, y in zip(got, want, strict=True):
      np.testing.assert_array_equal(x, y)
  # Beta(10,000, 10,000) is next to 1/2, Beta(0.01, 0.01) next to 0 or 1.
  mixed = jax.jit(
    lambda key: device_augmentation.mixup_or_cutmix(key, *args, 1e4, 0.01)
  )
  cut = kept = 0
  for seed in range(100):
    pixels, shares = mixed(jax.random.key(seed))
    if np.array_equal(pixels, np.round(pixels)):
      cut += 1
      kept += np.array_equal(pixels, images)
    else:
      np.testing.assert_allclose(np.diag(shares), 0.5, atol=0.02)
  # Binomials of 100 and of some 50 draws: 50 and 25, deviations of 5 and 3.5.
  assert abs(cut - 50) < 25
  assert abs(kept - cut / 2) < 5 * 3.5
