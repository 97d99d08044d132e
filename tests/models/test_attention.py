"""Attention without kept weights, against the formula written out in NumPy."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import attention, layers, tpu_layout, vit
from vit_jax.training import sharding

B, N, K = 2, 3, 8


def arrays(queries, keys, dtype=np.float32):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.asarray(rng.normal(size=(B, length, N, K)), dtype)
    for length in (queries, keys, keys, queries)
  )


def with_gradients(function, q, k, v, dy):
  """Returns the result and its three gradients, compiled as one program."""

  def run(q, k, v, dy):
    y, vjp = jax.vjp(function, q, k, v)
    return y, *vjp(dy)

  return jax.jit(run)(q, k, v, dy)


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


@pytest.fixture(params=['whole', 'by parts'])
def parts(request, monkeypatch):
  most = {'whole': 1024, 'by parts': 4}[request.param]
  monkeypatch.setattr(attention, 'MAX_QUERIES', most)


@pytest.mark.parametrize(
  ('parts', 'queries', 'keys'),
  [('whole', 10, 3), ('by parts', 7, 7), ('by parts', 1, 9)],
  indirect=['parts'],
)
def test_attention_and_its_gradients_are_those_of_the_formula(
  parts, queries, keys
):
  q, k, v, dy = arrays(queries, keys)
  want = formula(q, k, v, dy)
  np.testing.assert_allclose(
    attention.attend(q, k, v), want[0], rtol=1e-5, atol=1e-6
  )
  results = with_gradients(attention.attend, q, k, v, dy)
  for got, expected in zip(results, want, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


def test_large_logits_do_not_overflow(parts):
  q, k, v, dy = arrays(7, 7)
  for x in with_gradients(attention.attend, 100 * q, 100 * k, v, dy):
    assert np.isfinite(x).all()


@pytest.mark.parametrize('parts', ['by parts'], indirect=True)
def test_bfloat16_is_as_close_as_its_rounding(parts):
  """Operands, logits and weights have eight bits."""
  q, k, v, dy = arrays(9, 9, jnp.bfloat16)
  want = formula(q, k, v, dy)
  y, vjp = jax.vjp(attention.attend, q, k, v)
  without_gradients = attention.attend(q, k, v)
  for got, expected in zip(
    (without_gradients, y, *vjp(dy)), (want[0], *want), strict=True
  ):
    assert got.dtype == jnp.bfloat16
    error = np.abs(np.asarray(got, np.float64) - expected)
    assert error.max() < 2**-5 * np.abs(expected).max()
  assert attention.logits(q, k).dtype == jnp.float32


def test_gradients_of_bfloat16_weights_have_more_digits(parts):
  """Eight bits would round the products, 64 and some sixteenths, to a half.

  Queries of 0 have equal weights for all keys, whose mean is 0.
  """
  signs = jnp.array([1, 1, -1, -1], jnp.bfloat16)[None, :, None, None]
  k = jnp.broadcast_to(signs, (B, 4, N, K))
  q, dy = jnp.zeros_like(k), jnp.ones_like(k)
  more = jnp.array([3, 1, 0, 0], jnp.bfloat16)[None, :, None]
  v = jnp.full_like(k, 8).at[..., 0].add(more / 16)
  _, vjp = jax.vjp(attention.attend, q, k, v)
  want = (3 + 1) / 16 / 4 / np.sqrt(K)
  np.testing.assert_allclose(np.float32(vjp(dy)[0]), want, rtol=0.05)


def test_denominators_of_bfloat16_logits_have_more_digits(parts):
  """Equal keys give the mean of the values, even if logits are large.

  Eight bits would round 181 + log(9) to 183, and exp(-2) is not 1 / 9.
  """
  q, k, v, dy = arrays(9, 9, jnp.bfloat16)
  y, vjp = jax.vjp(attention.attend, jnp.full_like(q, 8), 0 * k + 8, v)
  for got, x in ((y, v), (vjp(dy)[2], dy)):
    want = np.mean(np.asarray(x, np.float64), axis=1, keepdims=True)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert error.max() < 2**-5 * np.abs(want).max()


def test_no_weights_are_kept():
  q, k, v, _ = arrays(64, 64)
  _, vjp = jax.vjp(attention.attend, q, k, v)
  largest = max(x.size for x in jax.tree.leaves(vjp))
  assert largest == q.size < B * N * 64 * 64


def test_queries_are_in_as_few_parts_as_hold_them():
  """A part has at most 1,024 queries, in forward and backward passes."""

  def text(function, queries):
    q = jax.ShapeDtypeStruct((1, queries, 1, 8), jnp.float32)
    return str(jax.make_jaxpr(function)(q, q, q))

  def gradients(q, k, v):
    y, vjp = jax.vjp(attention.attend, q, k, v)
    return vjp(y)

  for queries, parts in ((1024, 1), (1025, 2), (2048, 2), (2049, 3)):
    assert text(attention.attend, queries).count('= exp ') == parts
    # One loop in the forward pass, and one in the backward pass.
    lengths = [f'{parts}'] * 2 * (parts > 1)
    assert re.findall(r'length=(\d+)', text(gradients, queries)) == lengths


@pytest.mark.slow
def test_cheap_rematerialisation_does_no_matrix_product_twice():
  """Except for the logits, L x L, which are not stored."""
  x = jax.random.normal(jax.random.key(0), (2, 5, 12))
  fields = {'patch_size': 4, 'width': 12, 'depth': 1, 'mlp_dim': 24, 'heads': 3}
  encoder_fields = vit.ViT(num_classes=0, **fields).encoder_fields

  def products(policy):
    block = layers.remat(layers.EncoderBlock, policy, in_loop=False)(
      encoder_fields
    )
    params = jax.eval_shape(block.init, jax.random.key(1), x)

    def loss(params):
      return jnp.sum(block.apply(params, x)[0] ** 2)

    return str(jax.make_jaxpr(jax.grad(loss))(params)).count('dot_general')

  assert products('cheap') == products('none')
  assert products('nothing_saveable') > products('none')


def with_infinities(q_BQNK, k_BLNK, v_BLNK, mask_BQL):
  """The formula in float32; 0 for queries whose mask is false everywhere."""
  mask = jnp.broadcast_to(mask_BQL, (B, q_BQNK.shape[1], k_BLNK.shape[1]))[
    :, None
  ]
  logits = jnp.einsum('BQNK,BLNK->BNQL', q_BQNK, k_BLNK) / np.sqrt(K)
  nowhere = ~mask.any(-1, keepdims=True)
  weights = jax.nn.softmax(jnp.where(mask | nowhere, logits, -jnp.inf))
  return jnp.einsum('BNQL,BLNK->BQNK', jnp.where(nowhere, 0, weights), v_BLNK)


def make_mask(kind, queries, keys):
  """Returns a mask BQL that is false everywhere for some queries."""
  if kind == 'random':
    rng = np.random.default_rng(3)
    mask = rng.uniform(size=(B, queries, keys)) < 0.5
    mask[0, 2] = False
  elif kind == 'causal':
    mask = np.tril(np.ones((1, queries, keys), bool))
  elif kind == 'padding':
    mask = np.arange(keys) < np.array([[[keys - 2]], [[0]]])
  else:
    mask = np.arange(keys)[None, None] < 2
  return jnp.asarray(mask)


@pytest.mark.fast('whole-padding')
@pytest.mark.parametrize(
  ('parts', 'kind'),
  [
    ('whole', 'padding'),
    ('whole', 'random'),
    ('by parts', 'one for all'),
    ('by parts', 'causal'),
  ],
  indirect=['parts'],
)
def test_masked_attention_and_its_gradients(parts, kind):
  q, k, v, dy = arrays(10, 6)
  mask = make_mask(kind, 10, 6)
  want, got = (
    with_gradients(lambda *qkv, f=f: f(*qkv, mask), q, k, v, dy)
    for f in (with_infinities, attention.attend)
  )
  primal = jax.jit(attention.attend)(q, k, v, mask)
  np.testing.assert_allclose(primal, want[0], rtol=1e-5, atol=1e-6)
  for x, expected in zip(got, want, strict=True):
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=2e-6)


def test_a_mask_of_keys_alone_is_not_repeated_for_every_query(monkeypatch):
  monkeypatch.setattr(attention, 'MAX_QUERIES', 4)
  q, k, v, dy = arrays(64, 64)
  mask = make_mask('padding', 64, 64)

  def gradients(q, k, v, dy):
    return jax.vjp(lambda *qkv: attention.attend(*qkv, mask), q, k, v)[1](dy)

  program = str(jax.make_jaxpr(gradients)(q, k, v, dy))
  assert 'bool[2,1,64]' in program and 'bool[2,64,64]' not in program


@pytest.mark.fast('causal-None')
@pytest.mark.parametrize(
  ('kind', 'relative'), [('causal', None), ('padding', 0)]
)
def test_all_ways_of_attention_take_a_mask(kind, relative):
  """With and without returned weights and relative positions."""
  x = jax.random.normal(jax.random.key(0), (B, 6, 12))
  mask = make_mask(kind, 6, 6)
  module = layers.MultiHeadAttention(3, relative, weights=True)
  variables = jax.jit(module.init)(jax.random.key(1), x)
  assert variables.keys() == {'params'}
  params = variables['params']

  def loss(params, module):
    y, weights = module.apply({'params': params}, x, mask_BQL=mask)
    return jnp.sum(y**2), (y, weights)

  grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  grads, (y, weights) = grad(params, module)
  whole = jnp.broadcast_to(mask, (B, 6, 6))[:, None]
  assert not np.where(whole, 0, weights).any()
  np.testing.assert_allclose(
    weights.sum(-1), np.broadcast_to(whole.any(-1), (B, 3, 6)), rtol=1e-6
  )
  for leaf in jax.tree.leaves(grads):
    assert np.isfinite(leaf).all()
  other_grads, (same, _) = grad(params, module.clone(weights=False))
  np.testing.assert_allclose(same, y, rtol=1e-5, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    other_grads,
    grads,
  )


def test_values_apart_from_keys():
  """DETR adds positions to queries and keys, but not to values."""
  rng = np.random.default_rng(0)
  queries, keys, values = (
    jnp.asarray(rng.normal(size=(B, length, 12)), jnp.float32)
    for length in (4, 7, 7)
  )
  mask = make_mask('padding', 4, 7)
  module = layers.MultiHeadAttention(3)
  variables = module.init(jax.random.key(1), queries, keys, values)
  got, _ = module.apply(variables, queries, keys, values, mask)
  p = variables['params']

  def project(name, x_BLD):
    kernel_DNK, bias_NK = p[name]['kernel'], p[name]['bias']
    return jnp.einsum('BLD,DNK->BLNK', x_BLD, kernel_DNK) + bias_NK[None, None]

  q, k, v = map(project, ('query', 'key', 'value'), (queries, keys, values))
  logits_BNQL = jnp.einsum('BQNK,BLNK->BNQL', q, k) / 2
  # The second image has no keys.
  weights_NQL = jax.nn.softmax(logits_BNQL[0, :, :, :5])
  y_QNK = jnp.einsum('NQL,LNK->QNK', weights_NQL, v[0, :5])
  want_QD = jnp.einsum('QNK,NKD->QD', y_QNK, p['out']['kernel'])
  np.testing.assert_allclose(
    got[0], want_QD + p['out']['bias'][None], rtol=1e-5, atol=1e-5
  )
  np.testing.assert_array_equal(got[1] - p['out']['bias'][None], 0)
  # Keys default to the queries, and values to the keys.
  for given, same in (
    ((queries, keys), (queries, keys, keys)),
    ((keys,), (keys, keys, keys)),
  ):
    np.testing.assert_array_equal(
      module.apply(variables, *given)[0], module.apply(variables, *same)[0]
    )


@pytest.mark.parametrize(('platform', 'sums'), [('tpu', False), ('cpu', True)])
def test_only_tpus_sum_by_a_product(platform, sums):
  x_BNLQ = np.random.default_rng(0).random((B, N, 9, 7), np.float32)
  for function in (tpu_layout.sum_keys, tpu_layout.sum_by_product):
    np.testing.assert_allclose(
      function(x_BNLQ), x_BNLQ.sum(2, keepdims=True), rtol=1e-6
    )
    assert function(jnp.bfloat16(x_BNLQ)).dtype == jnp.bfloat16
  traced = jax.jit(tpu_layout.sum_keys).trace(x_BNLQ)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert ('stablehlo.reduce' in text) == sums
  assert ('stablehlo.dot_general' in text) != sums


@pytest.mark.parametrize(
  ('backend', 'lengths', 'K', 'dtype', 'takes'),
  [
    ('gpu', (4, 4), 128, 'bfloat16', True),
    ('gpu', (4, 4, 'mask'), 8, 'bfloat16', True),
    ('gpu', (4, 5, 'mask'), 8, 'bfloat16', False),
    ('gpu', (1, 4), 128, 'bfloat16', False),
    ('gpu', (4, 4), 136, 'bfloat16', False),
    ('gpu', (4, 4), 12, 'bfloat16', False),
    ('gpu', (4, 4), 8, 'float32', False),
    ('tpu', (4, 4), 8, 'bfloat16', False),
  ],
)
def test_cudnn_is_asked_for_what_it_has(
  monkeypatch, backend, lengths, K, dtype, takes
):
  asked = []
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(attention, '_cudnn', lambda q, *_: asked.append(q) or q)
  Q, L, *masked = lengths
  q_BQNK, k_BLNK = (jnp.ones((1, n, 2, K), dtype) for n in (Q, L))
  mask = jnp.ones((1, 1, L), bool) if masked else None
  attention.attend(q_BQNK, k_BLNK, k_BLNK, mask)
  assert bool(asked) == takes


@pytest.mark.parametrize(
  ('capability', 'takes'), [('7.5', False), ('8.0', True), ('gfx942', False)]
)
def test_cudnn_is_asked_on_ampere_or_newer(monkeypatch, capability, takes):
  asked = []
  device = types.SimpleNamespace(compute_capability=capability)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax, 'local_devices', lambda: [device])
  monkeypatch.setattr(attention, '_cudnn', lambda q, *_: asked.append(q) or q)
  x = jnp.ones((1, 4, 2, 8), 'bfloat16')
  attention.attend(x, x, x)
  assert bool(asked) == takes


@pytest.mark.fast('random')
@pytest.mark.parametrize('kind', ['random', 'one for all'])
def test_cudnn_is_asked_for_no_gradient_that_it_has_not(monkeypatch, kind):
  """XLA's attention replaces cuDNN's.

  On an H100, cuDNN 9.19 gave NaN gradients for a query whose mask is false
  everywhere.
  """
  plain = jax.nn.dot_product_attention
  asked = []

  def other(q, k, v, *, implementation, mask):
    asked.append((implementation, mask.shape))
    assert mask.any(-1).all()
    return plain(q, k, v, mask=mask, implementation='xla')

  monkeypatch.setattr(jax.nn, 'dot_product_attention', other)
  q, k, v, dy = arrays(8, 6)
  mask = make_mask(kind, 8, 6)
  want = with_gradients(lambda *qkv: with_infinities(*qkv, mask), q, k, v, dy)
  got, vjp = jax.vjp(lambda *qkv: attention._cudnn(*qkv, mask), q, k, v)
  for x, expected in zip((got, *vjp(dy)), want, strict=True):
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=2e-6)
  # Several devices share a batch of masks, but not one mask for all.
  assert asked == [('cudnn', (len(mask), 1, 8, 6))]


@pytest.fixture
def like_cudnn(monkeypatch):
  """Replaces cuDNN's attention by XLA's and returns the list of its calls.

  Like cuDNN's, it refuses to be differentiated if a length is odd.
  """
  plain = jax.nn.dot_product_attention
  asked = []

  @jax.custom_vjp
  def even(x):
    return x

  def even_forward(x):
    assert x.shape[1] % 2 == 0, 'no gradient of an odd length'
    return x, None

  even.defvjp(even_forward, lambda _, dx: (dx,))

  def fused(q, k, v, *, implementation, **more):
    assert implementation == 'cudnn'
    asked.append((q.shape, k.shape, {n: x.shape for n, x in more.items()}))
    return plain(*map(even, (q, k, v)), implementation='xla', **more)

  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(jax.nn, 'dot_product_attention', fused)
  return asked


def test_odd_lengths_are_even_for_cudnns_gradient(like_cudnn):
  q, k, v, dy = arrays(7, 9, 'bfloat16')
  want = formula(q, k, v, dy)
  y, vjp = jax.vjp(attention.attend, q, k, v)
  for got, expected in zip((y, *vjp(dy)), want, strict=True):
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      np.asarray(got, np.float64), expected, rtol=0.05, atol=0.03
    )
  (with_gradient,) = like_cudnn
  given = {'query_seq_lengths': (B,), 'key_value_seq_lengths': (B,)}
  assert with_gradient == ((B, 8, N, K), (B, 10, N, K), given)
  like_cudnn.clear()
  np.testing.assert_allclose(
    np.asarray(attention.attend(q, k, v), np.float64),
    want[0],
    rtol=0.05,
    atol=0.03,
  )
  assert like_cudnn == [(q.shape, k.shape, {})]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('batch', 'heads', 'own'), [(8, 2, (2, 1)), (8, 3, (2, 3))]
)
def test_devices_tell_cudnn_the_lengths_of_their_own(
  like_cudnn, batch, heads, own
):
  """Heads that `tensor` does not divide stay whole on each device."""
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'tensor': 2})
  rng = np.random.default_rng(0)
  q, k, v, dy = (
    jnp.asarray(rng.normal(size=(batch, 7, heads, K)), 'bfloat16')
    for _ in range(4)
  )

  def run(q, k, v, dy):
    y, vjp = jax.vjp(attention.attend, q, k, v)
    return y, *vjp(dy)

  want = run(q, k, v, dy)
  like_cudnn.clear()
  with sharding.activations(mesh):
    got = jax.jit(run)(
      *jax.device_put((q, k, v, dy), sharding.replicated(mesh))
    )
  for x, expected in zip(got, want, strict=True):
    np.testing.assert_allclose(
      np.asarray(x, np.float32), np.asarray(expected, np.float32), atol=0.02
    )
  ((shape, _, lengths),) = like_cudnn
  B, N = own
  assert shape == (B, 8, N, K)
  assert lengths == {'query_seq_lengths': (B,), 'key_value_seq_lengths': (B,)}


def test_only_gpus_have_their_tokens_kept_in_rows(monkeypatch):
  x_BLD = jnp.ones((2, 3, 4))

  def text():
    return jax.jit(lambda x: layers.constrain(x, 'BLD')).lower(x_BLD).as_text()

  assert 'LayoutConstraint' not in text()
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert 'LayoutConstraint' in text()
  assert 'dense<[2, 1, 0]>' in text()
  with attention.portable():
    assert 'LayoutConstraint' not in text()
  assert 'LayoutConstraint' in text()


def test_activations_are_shared_out_by_their_examples():
  sizes = {'slice': 2, 'data': 2, 'fsdp': 2, 'tensor': 1}
  mesh = sharding.make_mesh(sizes)
  x_BLD = sharding.place(
    np.ones((8, 4, 4), np.float32), sharding.replicated(mesh)
  )
  kept = jax.jit(lambda x: layers.constrain(x, 'BLD'))
  assert kept(x_BLD).sharding.is_fully_replicated
  with sharding.activations(mesh):
    spec = jax.jit(lambda x: layers.constrain(x, 'BLD'))(x_BLD).sharding.spec
  assert spec == sharding.BATCH
