"""Rollout as the paper's formula says it, layer by layer."""

import functools

import jax
import numpy as np
import pytest

from tests.visualize.test_attention_maps import SIZE, tiny
from vit_jax.visualize import rollout
from vit_jax.visualize.attention_maps import Layers


def test_attention_to_nothing_but_oneself_reaches_nothing_else():
  identity_BNLL = np.broadcast_to(np.eye(4, dtype=np.float32), (1, 3, 4, 4))
  read_BL = np.full((1, 4), 0.25, np.float32)
  maps = rollout.maps([rollout.fuse(identity_BNLL)] * 2, read_BL, (2, 2))
  np.testing.assert_array_equal(maps, 1)


@functools.cache
def layers_of(kind):
  return Layers(*tiny(kind))


FUSIONS = {'mean': np.mean, 'min': np.min, 'max': np.max}


def fused(weights_NLL, fusion, discard, gradients_NLL=None):
  """A layer of one image, as the definition says it."""
  A_NLL = np.asarray(weights_NLL)
  if gradients_NLL is not None:
    A_NLL = np.maximum(A_NLL * gradients_NLL, 0)
  # In float32, so that the order of almost equal ones is the same.
  A_LL = FUSIONS[fusion](A_NLL, axis=0).astype(np.float64)
  lowest = sorted(np.ndindex(A_LL.shape), key=lambda at: A_LL[at])
  for at in lowest[: int(discard * A_LL.size)]:
    A_LL[at] = 0
  return A_LL if gradients_NLL is None else A_LL / (A_LL.sum(1).max() or 1)


def by_definition(layers_NLL, read_L, fusion, discard, gradients=None):
  R = np.eye(len(read_L))
  for i, weights_NLL in enumerate(layers_NLL):
    A_LL = fused(weights_NLL, fusion, discard, gradients and gradients[i])
    a = 0.5 * A_LL + 0.5 * np.eye(len(read_L))
    R = a / a.sum(1, keepdims=True) @ R
  row = np.asarray(read_L) @ R
  np.testing.assert_allclose(row.sum(), 1)
  row = row[len(row) - 6 :]
  return row.reshape(2, 3) / (row.max() or 1)


@pytest.mark.fast('cls-mean-0.9', 'gap-min-0.0')
@pytest.mark.parametrize(
  ('kind', 'fusion', 'discard'),
  [
    ('cls', 'mean', 0.9),
    ('gap', 'min', 0.0),
    ('map', 'max', 0.9),
    ('deit', 'mean', 0.0),
  ],
)
def test_every_fusion_is_its_formula(kind, fusion, discard):
  layers = layers_of(kind)
  weights = [np.asarray(x_BNLL) for x_BNLL in layers.attention()]
  read_BL = {
    'cls': np.eye(7)[[0, 0]],
    'gap': np.broadcast_to([0, 0, *[1 / 6] * 6], (2, 8)),
    'map': np.asarray(layers.read_BL),
    # Class and distillation token, and not the register.
    'deit': np.broadcast_to([0.5, 0.5, *[0] * 7], (2, 9)),
  }[kind]
  np.testing.assert_allclose(layers.read_BL, read_BL, rtol=1e-6)
  got = rollout.rollout(layers, fusion, discard)
  assert got.shape == (2, 2, 3)
  for i in range(2):
    want = by_definition([x[i] for x in weights], read_BL[i], fusion, discard)
    np.testing.assert_allclose(got[i], want, rtol=1e-5)


@pytest.mark.parametrize(('fusion', 'discard'), [('mean', 0.5), ('max', 0.0)])
def test_a_class_weighs_attention_by_its_gradients(fusion, discard):
  layers = layers_of('cls')
  class_B = np.array([2, 1])
  found = list(layers.gradients(class_B))[::-1]
  got = rollout.rollout(layers, fusion, discard, class_B)
  for i in range(2):
    want = by_definition(
      [np.asarray(w[i]) for w, _ in found],
      np.eye(7)[0],
      fusion,
      discard,
      [np.asarray(g[i]) for _, g in found],
    )
    np.testing.assert_allclose(got[i], want, rtol=1e-4)


def test_another_discard_needs_no_compilation(caplog):
  weights = np.full((1, 2, 5, 5), 0.2, np.float32)
  rollout.fuse(weights, discard=0.3)
  with jax.log_compiles():
    rollout.fuse(weights, discard=0.6)
    assert not caplog.messages
    rollout.fuse(weights[:, :, :3], discard=0.6)
  assert caplog.messages


def test_where_nothing_speaks_for_a_class_its_map_is_0():
  weights = np.full((1, 2, 5, 5), 0.2, np.float32)
  fused = rollout.fuse(weights, gradients_BNQL=-weights)
  np.testing.assert_array_equal(fused, np.zeros((1, 5, 5)))
  read_BL = np.eye(5, dtype=np.float32)[:1]
  maps = rollout.maps([fused], read_BL, (2, 2))
  np.testing.assert_array_equal(maps, np.zeros((1, 2, 2)))


@pytest.mark.slow
def test_a_batch_is_one_by_one():
  model, params, images = tiny('map')
  class_B = np.array([2, 1])
  got = rollout.rollout(layers_of('map'), 'max', 0.3, class_B=class_B)
  alone = rollout.rollout(
    Layers(model, params, images[1:]), 'max', 0.3, class_B=class_B[1:]
  )
  np.testing.assert_allclose(got[1:], alone, rtol=1e-4)


def test_uniform_attention_gives_the_uniform_map():
  model, params, images = tiny('cls')
  for name in params['Transformer']:
    if name.startswith('encoderblock'):
      block = params['Transformer'][name]['MultiHeadDotProductAttention_1']
      block['query'] = {k: np.zeros_like(x) for k, x in block['query'].items()}
  for fusion in FUSIONS:
    got = rollout.rollout(Layers(model, params, images), fusion)
    assert got.shape == (2, *(side // 4 for side in SIZE))
    np.testing.assert_allclose(got, 1, rtol=1e-6)
