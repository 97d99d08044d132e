"""From tokens to logits, against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.by_hand import layer_norm, mlp, randomised
from vit_jax.models import heads, variants, vit

# Values around 1 and a few hundred float32 roundings of 6e-8 each.
ATOL = 1e-5
SIZE = (8, 12)


def map_head(x_LD, params, gelu='tanh'):
  """2106.04560 and big_vision: y = MHA(probe, x), then y + MLP(LN(y))."""
  msa = params['MultiHeadDotProductAttention_0']
  probe_D = params['probe'][0, 0].astype(np.float64)
  y = msa['out']['bias'].astype(np.float64)
  for n, out in enumerate(msa['out']['kernel']):
    q = probe_D @ msa['query']['kernel'][:, n] + msa['query']['bias'][n]
    k, v = (
      x_LD @ msa[name]['kernel'][:, n] + msa[name]['bias'][n]
      for name in ('key', 'value')
    )
    weights = np.exp(k @ q / math.sqrt(len(q)))
    y = y + weights / weights.sum() @ v @ out

  y_normed = layer_norm(y, params['LayerNorm_0'])
  return y + mlp(y_normed, params['MlpBlock_0'], gelu)


def test_map_head_is_the_formula():
  fields = {'patch_size': 4, 'width': 12, 'depth': 1, 'mlp_dim': 20, 'heads': 3}
  fields['gelu'] = 'exact'
  module = heads.MAPHead(vit.ViT(num_classes=0, **fields).encoder_fields)
  x_BLD = np.random.default_rng(1).normal(size=(2, 5, 12)).astype(np.float32)
  params = randomised(
    jax.eval_shape(module.init, jax.random.key(0), x_BLD)['params']
  )
  got = jax.jit(lambda p, x: module.apply({'params': p}, x))(params, x_BLD)
  assert got.shape == (2, 12)
  for b in range(2):
    np.testing.assert_allclose(
      got[b], map_head(x_BLD[b], params, 'exact'), rtol=0, atol=ATOL
    )


def make(**fields):
  tiny = {'patch_size': 4, 'width': 8, 'depth': 1, 'mlp_dim': 12, 'heads': 2}
  model = variants.build(
    **({'num_classes': 3, 'image_size': SIZE} | tiny | fields)
  )
  params = randomised(
    jax.eval_shape(lambda k: variants.init(model, k, SIZE), jax.random.key(0))
  )
  images = np.random.default_rng(2).uniform(-1, 1, (2, *SIZE, 3))
  return model, params, images.astype(np.float32)


@pytest.mark.fast('cls-0', 'gap-5')
@pytest.mark.parametrize(
  ('pool', 'representation_size'), [('cls', 0), ('gap', 5), ('map', 0)]
)
def test_logits_are_pooled_tokens_through_the_head(pool, representation_size):
  """Registers come before the patches, and heads ignore them."""
  model, params, images = make(
    pool=pool, representation_size=representation_size, registers=2
  )
  logits, aux = jax.jit(lambda p, x: model.apply({'params': p}, x))(
    params, images
  )
  tokens = np.asarray(aux['tokens'], np.float64)
  assert tokens.shape == (2, 9 if pool == 'cls' else 8, 8)
  want = {
    'cls': lambda x: x[0],
    'gap': lambda x: sum(x[2:]) / 6,
    'map': lambda x: map_head(x[2:], params['MAPHead_0']),
  }[pool]
  y = np.array([want(x) for x in tokens])
  if representation_size:
    hidden = params['pre_logits']
    y = np.tanh(y @ hidden['kernel'] + hidden['bias'])
    assert y.shape == (2, 5)
  np.testing.assert_allclose(aux['pre_logits'], y, rtol=0, atol=ATOL)
  want_logits = y @ params['head']['kernel'] + params['head']['bias']
  np.testing.assert_allclose(logits, want_logits, rtol=0, atol=ATOL)


def test_logits_have_the_digits_of_float32_in_a_bfloat16_model():
  model, params, images = make(dtype='bfloat16', pool='gap')
  logits, aux = jax.jit(lambda p, x: model.apply({'params': p}, x))(
    params, images
  )
  assert aux['pre_logits'].dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  y = np.asarray(aux['pre_logits'], np.float64)
  want = y @ params['head']['kernel'] + params['head']['bias']
  # A head in bfloat16 would be off by 0.4 %.
  np.testing.assert_allclose(logits, want, rtol=0, atol=ATOL)
