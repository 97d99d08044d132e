"""Distances of attention made by hand."""

import itertools

import numpy as np
import pytest

from tests.visualize.test_attention_maps import tiny
from vit_jax.visualize import distance
from vit_jax.visualize.attention_maps import Layers


def test_attention_to_oneself_is_at_no_distance():
  weights = np.broadcast_to(np.eye(10, dtype=np.float32), (2, 3, 10, 10))
  got = distance.of_weights(weights, (2, 5), 16)
  np.testing.assert_array_equal(got, np.zeros((2, 3)))


def test_uniform_attention_is_at_the_mean_of_all_pairs():
  weights = np.full((1, 2, 10, 10), 1 / 10, np.float32)
  got = distance.of_weights(weights, (2, 5), 16)
  places = list(itertools.product(range(2), range(5)))
  pairs = itertools.product(places, places)
  want = np.mean([np.hypot(a[0] - b[0], a[1] - b[1]) for a, b in pairs])
  np.testing.assert_allclose(got, 16 * want, rtol=1e-6)


@pytest.mark.parametrize('down', [False, True], ids=['right', 'down'])
def test_a_shift_is_at_its_length(down):
  """Around the border it would be another length: those wrap to themselves."""
  k = 2
  h, w = 5, 6
  weights = np.zeros((1, 1, h * w, h * w), np.float32)
  inside = 0
  for y, x in itertools.product(range(h), range(w)):
    to = (y + k, x) if down else (y, x + k)
    if to[0] >= h or to[1] >= w:
      to = y, x
    else:
      inside += 1
    weights[0, 0, y * w + x, to[0] * w + to[1]] = 1
  got = distance.of_weights(weights, (h, w), 14)
  np.testing.assert_allclose(got, [[14 * k * inside / (h * w)]], rtol=1e-6)


def test_a_class_token_is_nowhere():
  """Half of each patch's attention goes to it, the rest two patches right."""
  weights = np.zeros((1, 1, 5, 5), np.float32)
  weights[..., 0, :] = 0.2
  weights[..., 1:, 0] = 0.5
  for i in range(4):
    weights[0, 0, 1 + i, 1 + (i + 2) % 4] = 0.5
  np.testing.assert_allclose(distance.of_weights(weights, (1, 4), 8), [[16]])


def test_heads_of_layers_over_images():
  layers = Layers(*tiny('cls'))
  got = distance.mean_distances(layers, 4)
  for i, weights in enumerate(layers.attention()):
    each = distance.of_weights(weights, layers.grid, 4)
    np.testing.assert_allclose(got[i], np.mean(each, 0), rtol=1e-6)
  assert got.shape == (3, 2)
  assert np.all(got > 0) and np.all(got < 4 * np.hypot(1, 2))
