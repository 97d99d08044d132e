"""Attention without kept weights, against the formula written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import attention, layers, vit

B, N, K = 2, 3, 8


def arrays(queries, keys, dtype=np.float32):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.asarray(rng.normal(size=(B, length, N, K)), dtype)
    for length in (queries, keys, keys, queries)
  )


def formula(q_BQNK, k_BLNK, v_BLNK, dy_BQNK):
  """Equations 6 and 7 and their gradients, head by head in float64."""
  results = [np.zeros(x.shape) for x in (q_BQNK, q_BQNK, k_BLNK, v_BLNK)]
  for b in range(B):
    for n in range(N):
      q, k, v, dy = (
        np.asarray(x, np.float64)[b, :, n]
        for x in (q_BQNK, k_BLNK, v_BLNK, dy_BQNK)
      )
      exp = np.exp(q @ k.T / np.sqrt(K))
      A = exp / exp.sum(1, keepdims=True)
      dA = dy @ v.T
      dS = A * (dA - (A * dA).sum(1, keepdims=True)) / np.sqrt(K)
      for result, x in zip(
        results, (A @ v, dS @ k, dS.T @ q, A.T @ dy), strict=True
      ):
        result[b, :, n] = x
  return results


@pytest.fixture(params=[1024, 4], ids=['whole', 'by parts'])
def parts(request, monkeypatch):
  monkeypatch.setattr(attention, 'MAX_QUERIES', request.param)


@pytest.mark.parametrize(
  ('queries', 'keys'), [(7, 7), (8, 8), (1, 9), (10, 3)], ids=str
)
def test_attention_and_its_gradients_are_those_of_the_formula(
  parts, queries, keys
):
  q, k, v, dy = arrays(queries, keys)
  want = formula(q, k, v, dy)
  np.testing.assert_allclose(
    attention.attend(q, k, v), want[0], rtol=1e-5, atol=1e-6
  )
  y, vjp = jax.vjp(attention.attend, q, k, v)
  for got, expected in zip((y, *vjp(dy)), want, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


def test_large_logits_do_not_overflow(parts):
  q, k, v, dy = arrays(7, 7)
  y, vjp = jax.vjp(attention.attend, 100 * q, 100 * k, v)
  for x in (y, *vjp(dy)):
    assert np.isfinite(x).all()


def test_bfloat16_is_as_close_as_its_rounding(parts):
  """Eight bits: of the operands, the logits and the weights."""
  q, k, v, dy = arrays(9, 9, jnp.bfloat16)
  want = formula(q, k, v, dy)
  y, vjp = jax.vjp(attention.attend, q, k, v)
  for got, expected in zip((y, *vjp(dy)), want, strict=True):
    assert got.dtype == jnp.bfloat16
    error = np.abs(np.asarray(got, np.float64) - expected)
    assert error.max() < 2**-5 * np.abs(expected).max()


def test_no_weights_are_kept():
  q, k, v, _ = arrays(64, 64)
  _, vjp = jax.vjp(attention.attend, q, k, v)
  largest = max(x.size for x in jax.tree.leaves(vjp))
  assert largest == q.size < B * N * 64 * 64


def test_long_sequences_take_memory_of_their_length(monkeypatch):
  """Four times the tokens; all weights at once would be 16 times as many."""
  monkeypatch.setattr(attention, 'MAX_QUERIES', 64)

  def temporaries(length):
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

    def gradients(q, k, v, dy):
      return jax.vjp(attention.attend, q, k, v)[1](dy)

    compiled = jax.jit(gradients).lower(shape, shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(4096) < 5 * temporaries(1024)
  assert temporaries(4096) < 4 * 4096**2 / 4


def test_any_length_is_traced_in_a_few_parts():
  """A damaged file may claim images of terapixels."""
  q = jax.ShapeDtypeStruct((1, 2**32, 1, 8), jnp.float32)
  program = jax.make_jaxpr(attention.attend)(q, q, q)
  assert len(str(program).splitlines()) < 2000


def test_weights_are_returned_where_they_are_asked_for():
  x = jax.random.normal(jax.random.key(0), (2, 5, 12))
  plain = layers.MultiHeadAttention(3)
  with_weights = layers.MultiHeadAttention(3, weights=True)
  params = plain.init(jax.random.key(1), x)
  y, nothing = plain.apply(params, x)
  same, weights = with_weights.apply(params, x)
  assert nothing is None
  assert weights.shape == (2, 3, 5, 5)
  np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
  np.testing.assert_allclose(same, y, rtol=1e-5, atol=1e-6)


def test_cheap_rematerialisation_does_no_matrix_product_twice():
  """But the logits, L x L, which are the price of not keeping them."""
  x = jax.random.normal(jax.random.key(0), (2, 5, 12))
  fields = {'patch_size': 4, 'width': 12, 'depth': 1, 'mlp_dim': 24, 'heads': 3}
  encoder_fields = vit.ViT(num_classes=0, **fields).encoder_fields

  def products(policy):
    block = layers.remat(layers.EncoderBlock, policy, in_loop=False)(
      encoder_fields
    )
    params = block.init(jax.random.key(1), x)

    def loss(params):
      return jnp.sum(block.apply(params, x)[0] ** 2)

    return str(jax.make_jaxpr(jax.grad(loss))(params)).count('dot_general')

  assert products('cheap') == products('none')
  assert products('nothing_saveable') > products('none')
