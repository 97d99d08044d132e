"""Rollout as the paper's formula says it, layer by layer."""

import numpy as np
import pytest

from tests.convert.random_weights import random_checkpoint
from vit_jax.visualize.rollout import rollout


def loop(attention_XBNLL, grid):
  """The definition, for one image at a time."""
  h, w = grid
  maps = []
  for image in range(attention_XBNLL.shape[1]):
    L = attention_XBNLL.shape[-1]
    R = np.eye(L)
    for A_NLL in attention_XBNLL[:, image].astype(np.float64):
      a = 0.5 * A_NLL.mean(0) + 0.5 * np.eye(L)
      R = a / a.sum(1, keepdims=True) @ R
    row = R[0, 1:] if L > h * w else R.mean(0)
    maps.append(row.reshape(h, w) / row.max())
  return np.stack(maps)


@pytest.mark.parametrize('extra', [0, 1], ids=['all tokens', 'class token'])
def test_rollout_is_the_product_over_layers(extra):
  rng = np.random.default_rng(0)
  tokens = 6 + extra
  logits = 2 * rng.standard_normal((3, 2, 4, tokens, tokens), np.float32)
  attention = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  got = rollout(attention, (2, 3))
  np.testing.assert_allclose(got, loop(attention, (2, 3)), rtol=1e-5)


def test_what_a_model_captures_is_taken():
  checkpoint = random_checkpoint(
    None, (32, 48), patch_size=8, width=32, depth=3, mlp_dim=48, heads=4
  )
  images = np.random.default_rng(0).standard_normal((2, 32, 48, 3), np.float32)
  _, aux = checkpoint.model.apply(
    {'params': checkpoint.params}, images, capture=('attention',)
  )
  grid = checkpoint.model.grid(checkpoint.image_size)
  got = rollout(aux['attention'], grid)
  assert got.shape == (2, 4, 6)
  np.testing.assert_array_equal(np.max(got, axis=(1, 2)), 1)
  want = loop(np.asarray(aux['attention']), grid)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_attention_to_nothing_but_oneself_reaches_nothing_else():
  identity = np.broadcast_to(np.eye(5, dtype=np.float32), (2, 1, 3, 5, 5))
  np.testing.assert_array_equal(rollout(identity[..., 1:, 1:], (2, 2)), 1)
