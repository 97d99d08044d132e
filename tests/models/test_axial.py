"""Axial attention against loops over rows and columns.

The references are the formulas of the papers in float64. They share only the
names of parameters with the models, which compute in float32.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.by_hand import (
  attention,
  layer_norm,
  mlp,
  randomised,
  softmax,
)
from vit_jax.models import axial, variants, vit

# Values around 1 and a few hundred roundings of 6e-8 each; a wrong term changes
# the first or second digit.
ATOL = 1e-5


def normal(*shape, seed=1):
  rng = np.random.default_rng(seed)
  return rng.normal(size=shape).astype(np.float32)


def encoder_block(x_LD, params):
  """Equations 2 and 3 on one sequence."""
  y, weights = attention(
    layer_norm(x_LD, params['LayerNorm_0']),
    params['MultiHeadDotProductAttention_1'],
  )
  x_LD = x_LD + y
  y = mlp(layer_norm(x_LD, params['LayerNorm_2']), params['MlpBlock_3'])
  return x_LD + y, weights


def axial_block(x_hwD, params):
  """Appendix D.6 on one image; returns the weights of rows and columns too."""
  h, w, _ = x_hwD.shape
  x_hwD = np.array(x_hwD, np.float64)
  rows, columns = [], []
  for i in range(h):
    x_hwD[i], weights = encoder_block(x_hwD[i], params['row'])
    rows.append(weights)
  for j in range(w):
    x_hwD[:, j], weights = encoder_block(x_hwD[:, j], params['column'])
    columns.append(weights)
  return x_hwD, np.array(rows), np.array(columns)


@pytest.mark.fast('none')
@pytest.mark.parametrize(
  ('fields', 'scan'),
  [
    ({'posemb': 'none'}, False),
    ({'posemb': 'learned1d', 'posemb_at': 'every_layer'}, False),
    ({'posemb': 'relative'}, True),
  ],
  ids=['none', 'every_layer', 'relative-scan'],
)
def test_axial_vit_is_rows_then_columns(fields, scan):
  size, (h, w) = (8, 12), (2, 3)
  model = variants.build(
    num_classes=0,
    image_size=size,
    patch_size=4,
    width=8,
    depth=2,
    mlp_dim=12,
    heads=2,
    pool='gap',
    axial=True,
    **fields,
  )
  params = randomised(
    jax.eval_shape(lambda k: variants.init(model, k, size), jax.random.key(0))
  )
  images = normal(2, *size, 3)
  used = model.stack_layers(params) if scan else params
  y, aux = jax.jit(
    lambda p, x: model.clone(scan=scan).apply(
      {'params': p}, x, capture=('attention', 'blocks')
    )
  )(used, images)

  encoder = params['Transformer']
  assert aux['attention']['row'].shape == (2, 2, h, 2, w, w)
  assert aux['attention']['column'].shape == (2, 2, w, 2, h, h)
  for b in range(2):
    x_hwD = np.asarray(aux['stem'])[b]
    for layer in range(2):
      if fields['posemb'] == 'learned1d':
        table = encoder['posembed_input']['pos_embedding'][layer]
        x_hwD = x_hwD + table.reshape(h, w, 8)
      x_hwD, rows, columns = axial_block(
        x_hwD, encoder[f'encoderblock_{layer}']
      )
      got = {name: x[layer, b] for name, x in aux['attention'].items()}
      np.testing.assert_allclose(got['row'], rows, rtol=0, atol=ATOL)
      np.testing.assert_allclose(got['column'], columns, rtol=0, atol=ATOL)
      np.testing.assert_allclose(
        aux['blocks'][layer, b], x_hwD.reshape(-1, 8), rtol=0, atol=ATOL
      )
    want = layer_norm(x_hwD, encoder['encoder_norm']).mean((0, 1))
    np.testing.assert_allclose(y[b], want, rtol=0, atol=ATOL)


def test_rows_and_columns_have_parameters_of_their_own():
  """The length of a row or column determines the number of its offsets."""
  fields = {'patch_size': 4, 'width': 8, 'depth': 1, 'mlp_dim': 12, 'heads': 2}
  encoder_fields = vit.ViT(num_classes=0, **fields).encoder_fields
  block = axial.AxialBlock((2, 3), encoder_fields, relative=0)
  shapes = jax.eval_shape(block.init, jax.random.key(0), normal(1, 6, 8))
  msa = 'MultiHeadDotProductAttention_1'
  tables = {
    name: x[msa]['relative']['relative_embedding'].shape
    for name, x in shapes['params'].items()
  }
  assert tables == {'row': (5, 2, 4), 'column': (3, 2, 4)}


def position_sensitive(x_yC, params):
  """Equation 4 of Wang et al. (2020b), term by term, for one row or column.

    a_op = softmax_p(q_o k_p + q_o r^q_{p-o} + k_p r^k_{p-o})
    y_o = sum_p a_op (v_p + r^v_{p-o})

  The logits are divided by the root of the key width; the authors apply batch
  norms instead.
  """
  length = len(x_yC)
  _, heads, V = params['value']['kernel'].shape
  K = params['query']['kernel'].shape[2]
  # Their keys are half as wide as their values.
  assert (heads, V) == (8, 2 * K)

  def r(name, p, o):
    table = params[f'relative_{name}']
    assert len(table) == 2 * length - 1
    return table[p - o + length - 1].astype(np.float64)

  y = np.zeros((length, heads * V))
  for n in range(heads):
    q, k, v = (
      x_yC.astype(np.float64) @ params[name]['kernel'][:, n]
      for name in ('query', 'key', 'value')
    )
    for o in range(length):
      logits = [
        (q[o] @ k[p] + q[o] @ r('query', p, o) + k[p] @ r('key', p, o))
        / math.sqrt(K)
        for p in range(length)
      ]
      weights = softmax(np.array(logits))
      for p in range(length):
        y[o, n * V : (n + 1) * V] += weights[p] * (v[p] + r('value', p, o))
  return y


def test_position_sensitive_attention_is_equation_4():
  length = 4
  module = axial.PositionSensitiveAttention(64)
  x_BxyC = normal(2, 3, length, 6)
  params = randomised(
    jax.eval_shape(module.init, jax.random.key(0), x_BxyC)['params']
  )
  got = jax.jit(lambda p, x: module.apply({'params': p}, x))(params, x_BxyC)
  assert got.shape == (2, 3, length, 64)
  for b in range(2):
    for x in range(3):
      want = position_sensitive(x_BxyC[b, x], params)
      np.testing.assert_allclose(got[b, x], want, rtol=0, atol=ATOL)


def test_its_softmax_works_in_float32_in_any_case():
  module = axial.PositionSensitiveAttention(64, jnp.bfloat16)
  x_BxyC = jnp.bfloat16(normal(2, 3, 4, 6))
  run = functools.partial(module.init_with_output, jax.random.key(0))
  text = str(jax.make_jaxpr(lambda x: run(x)[0])(x_BxyC))
  assert re.findall(r'(\w+)\[[\d,]*\] = exp ', text) == ['f32']
  assert 'bf16[2,3,4,64] = ' in text


def test_initial_offsets_depend_on_the_width_alone():
  """Their products with queries are then equally large for any length."""
  module = axial.PositionSensitiveAttention(512)
  init = jax.jit(module.init)
  params = init(jax.random.key(0), normal(1, 1, 100, 4))['params']
  # Eight heads have values of 64 numbers and keys of 32. With 199 times as many
  # draws, the deviation is known to 1 %.
  for name, width in {'query': 32, 'key': 32, 'value': 64}.items():
    table = params[f'relative_{name}']
    assert table.shape == (199, width)
    assert np.std(table) == pytest.approx(width**-0.5, rel=0.05), name


def group_norm(x_hwC, params, groups=32):
  h, w, C = x_hwC.shape
  width = C // groups
  y = np.zeros_like(x_hwC)
  for g in range(groups):
    channels = slice(g * width, (g + 1) * width)
    x = x_hwC[..., channels]
    y[..., channels] = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
  return y * params['scale'] + params['bias']


@pytest.mark.parametrize(('grid', 'stride'), [((3, 2), 1), ((3, 5), 2)])
def test_axial_convolution_is_row_norm_column_and_pooling(grid, stride):
  """The last window of an odd side averages over fewer entries."""
  module = axial.AxialConv(64, stride)
  x_BhwC = normal(2, *grid, 6)
  params = randomised(
    jax.eval_shape(module.init, jax.random.key(0), x_BhwC)['params']
  )
  got = jax.jit(lambda p, x: module.apply({'params': p}, x))(params, x_BhwC)
  (h, w), C = grid, 64
  for b in range(2):
    x = np.zeros((h, w, C))
    for i in range(h):
      x[i] = position_sensitive(x_BhwC[b, i], params['row'])
    x = group_norm(x, params['gn_row'])
    y = np.zeros((h, w, C))
    for j in range(w):
      y[:, j] = position_sensitive(x[:, j], params['column'])
    want = [
      [
        y[i : i + stride, j : j + stride].mean((0, 1))
        for j in range(0, w, stride)
      ]
      for i in range(0, h, stride)
    ]
    # Normalised values are larger than elsewhere, about 5.
    np.testing.assert_allclose(got[b], want, rtol=1e-5, atol=ATOL)
