"""Position embeddings against their formulas, and their resizing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from tests.conftest import ROOT
from tests.models.by_hand import attention, layer_norm, randomised
from vit_jax.models import layers, posemb, variants, vit

GOLDEN = ROOT / 'tests/golden'


def table(grid, extra=1, D=4):
  rng = np.random.default_rng(0)
  L = extra + grid[0] * grid[1]
  return rng.standard_normal((1, L, D)).astype(np.float32)


def test_equals_the_original():
  checkpoint = np.load(GOLDEN / 'tiny_s7.npz')
  want = np.load(GOLDEN / 'tiny_s7_golden.npz')['resized_posemb']
  old = checkpoint['Transformer/posembed_input/pos_embedding']
  got = posemb.resize(old, (4, 4), (6, 6), 1)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert got.dtype == np.float32


def test_same_size_is_the_identity():
  old = table((3, 5), 2)
  np.testing.assert_array_equal(posemb.resize(old, (3, 5), (3, 5), 2), old)


@pytest.mark.parametrize(
  ('old', 'new', 'extra'),
  [
    ((16, 16), (30, 30), 0),  # the original zeroes the last row and column
    ((3, 5), (7, 4), 2),
    ((2, 2), (1, 3), 1),
  ],
)
def test_is_bilinear_with_aligned_corners(old, new, extra):
  """Against SciPy's interpolation at the coordinates of the definition."""
  old_table = table(old, extra)
  got = posemb.resize(old_table, old, new, extra)
  np.testing.assert_array_equal(got[:, :extra], old_table[:, :extra])
  rows, columns = (
    np.arange(n) * (o - 1) / max(n - 1, 1)
    for o, n in zip(old, new, strict=True)
  )
  coordinates = np.meshgrid(rows, columns, indexing='ij')
  for d in range(old_table.shape[2]):
    want = scipy.ndimage.map_coordinates(
      old_table[0, extra:, d].reshape(old), coordinates, order=1, mode='nearest'
    )
    np.testing.assert_allclose(
      got[0, extra:, d].reshape(new), want, rtol=1e-5, atol=1e-6
    )


def test_embeddings_of_another_grid_are_refused():
  with pytest.raises(ValueError, match='17 .* do not fit 0 tokens'):
    posemb.resize(table((4, 4)), (4, 4), (6, 6), 0)


# References are in float64. The model's float32 values around 1 have an error
# of 6e-8 after one operation. A few hundred errors add up to less than this,
# while a wrong table changes the first or second digit.
ATOL = 1e-5


def sincos_formula(grid, D):
  """2205.01580: sine and cosine of column and row at D/4 frequencies."""
  h, w = grid
  table = []
  for y in range(h):
    for x in range(w):
      f = [10_000 ** (-i / (D / 4 - 1)) for i in range(D // 4)]
      table.append(
        [math.sin(x * f_i) for f_i in f]
        + [math.cos(x * f_i) for f_i in f]
        + [math.sin(y * f_i) for f_i in f]
        + [math.cos(y * f_i) for f_i in f]
      )
  return np.array(table)


def test_sincos2d_is_the_formula():
  grid, D = (2, 5), 48
  got = posemb.sincos2d(grid, D)
  # Computed in float64: only the last rounding is float32's.
  np.testing.assert_allclose(got[0], sincos_formula(grid, D), rtol=0, atol=1e-7)
  assert got.shape == (1, grid[0] * grid[1], D)
  assert got.dtype == np.float32


def test_sincos2d_of_one_frequency_has_no_division_by_zero():
  table = posemb.sincos2d((2, 3), 4)[0]
  want = [math.sin(2), math.cos(2), math.sin(1), math.cos(1)]
  np.testing.assert_allclose(table[1 * 3 + 2], want, rtol=0, atol=1e-7)


def test_sincos2d_learns_nothing_and_gives_a_class_token_zeros():
  extra = 1
  module = posemb.PositionEmbedding('sincos2d', layers=2)
  got, variables = module.init_with_output(jax.random.key(0), (2, 3), extra, 16)
  assert not jax.tree.leaves(variables)
  assert got.shape == (2, extra + 6, 16)
  np.testing.assert_array_equal(got[:, :extra], 0)
  for layer in got:
    np.testing.assert_allclose(
      layer[extra:], sincos_formula((2, 3), 16), rtol=0, atol=1e-7
    )


def learned2d_formula(params, extra, layer):
  """Appendix D.4: the X-embedding of D/2 joined with the Y-embedding."""
  columns, rows = params['x_embedding'][layer], params['y_embedding'][layer]
  D = 2 * columns.shape[1]
  table = [np.zeros(D)] * extra
  for y in range(len(rows)):
    for x in range(len(columns)):
      table.append(np.array([*columns[x], *rows[y]]))
  return np.array(table)


def test_learned2d_joins_the_embeddings_of_column_and_row():
  grid, extra = (2, 3), 1
  module = posemb.PositionEmbedding('learned2d', layers=2)
  shapes = jax.eval_shape(
    lambda key: module.init(key, grid, extra, 6), jax.random.key(0)
  )['params']
  assert shapes['x_embedding'].shape == (2, grid[1], 3)
  assert shapes['y_embedding'].shape == (2, grid[0], 3)
  params = randomised(shapes)
  got = module.apply({'params': params}, grid, extra, 6)
  for layer in range(2):
    # The tables are only concatenated.
    np.testing.assert_array_equal(
      got[layer], learned2d_formula(params, extra, layer)
    )


GRID = (2, 3)
TINY = {'patch_size': 4, 'width': 8, 'depth': 2, 'mlp_dim': 12, 'heads': 2}


def make(**fields):
  size = tuple(4 * n for n in GRID)
  model = variants.build(num_classes=0, image_size=size, **(TINY | fields))
  params = randomised(
    jax.eval_shape(
      lambda key: variants.init(model.clone(scan=False), key, size),
      jax.random.key(0),
    )
  )
  images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3))
  return model, params, images.astype(np.float32)


def run(model, params, images):
  if model.scan:
    params = model.stack_layers(params)
  _, aux = jax.jit(
    lambda p, x: model.apply({'params': p}, x, capture=('attention', 'blocks'))
  )(params, images)
  return jax.device_get(aux)


def first_tokens(params, aux):
  """Returns the class token, if there is one, and the patches in raster."""
  stem = aux['stem']
  patches = stem.reshape(len(stem), -1, stem.shape[-1])
  if 'cls' not in params:
    return patches
  cls = np.repeat(params['cls'], len(stem), axis=0)
  return np.concatenate([cls, patches], axis=1)


@functools.cache
def plain_block():
  """One layer of the encoder, without positions."""
  block = layers.EncoderBlock(vit.ViT(num_classes=0, **TINY).encoder_fields)
  return jax.jit(lambda p, x: block.apply({'params': p}, x)[0])


@pytest.mark.fast('learned1d-input-cls-False')
@pytest.mark.parametrize(
  ('kind', 'place', 'pool', 'scan'),
  [
    ('learned1d', 'input', 'cls', False),
    ('learned2d', 'every_layer', 'gap', True),
    ('sincos2d', 'shared', 'cls', True),
  ],
)
def test_tables_are_added_where_they_should_be(kind, place, pool, scan):
  """The encoder layer by layer, with positions added by hand."""
  model, params, images = make(
    posemb=kind, posemb_at=place, pool=pool, scan=scan
  )
  aux = run(model, params, images)
  encoder = params['Transformer']
  extra = int(pool == 'cls')

  learned = encoder.get('posembed_input', {})
  assert bool(learned) == (kind != 'sincos2d')
  tables = 2 if place == 'every_layer' else 1
  assert all(len(x) == tables for x in learned.values())

  def table(i):
    if kind == 'learned1d':
      return learned['pos_embedding'][i]
    if kind == 'learned2d':
      return learned2d_formula(learned, extra, i)
    zeros = np.zeros((extra, TINY['width']))
    return np.concatenate([zeros, sincos_formula(GRID, TINY['width'])])

  x = first_tokens(params, aux)
  for layer in range(TINY['depth']):
    if place == 'every_layer':
      x = x + table(layer)
    elif place == 'shared' or layer == 0:
      x = x + table(0)
    x = plain_block()(encoder[f'encoderblock_{layer}'], x.astype(np.float32))
    x = np.asarray(x)
    np.testing.assert_allclose(aux['blocks'][layer], x, rtol=0, atol=ATOL)
  want = layer_norm(x, encoder['encoder_norm'])
  np.testing.assert_allclose(aux['tokens'], want, rtol=0, atol=ATOL)


@pytest.mark.parametrize(('L', 'extra'), [(1, 0), (7, 2)])
def test_relative_attention_is_the_formula(L, extra):
  msa = layers.MultiHeadAttention(heads=3, relative=extra)
  x = np.random.default_rng(2).normal(size=(2, L, 12)).astype(np.float32)
  params = randomised(
    jax.eval_shape(msa.init, jax.random.key(0), x)['params'], seed=L
  )
  y, weights = jax.jit(lambda p, x: msa.apply({'params': p}, x))(params, x)
  for b in range(2):
    want_y, want_weights = attention(x[b], params, extra)
    np.testing.assert_allclose(weights[b], want_weights, rtol=0, atol=ATOL)
    np.testing.assert_allclose(y[b], want_y, rtol=0, atol=ATOL)


def test_relative_logits_of_bfloat16_are_float32():
  """Float32 holds products of two bfloat16 numbers exactly."""
  L, N, K, extra = 5, 2, 16, 1
  rng = np.random.default_rng(0)
  q_LNK, r_ONK = (
    np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float64)
    for shape in ((extra + L, N, K), (2 * L - 1, N, K))
  )
  got = posemb.RelativeKeys().apply(
    {'params': {'relative_embedding': jnp.asarray(r_ONK, jnp.float32)}},
    jnp.asarray(q_LNK[None], jnp.bfloat16),
    extra,
  )
  assert got.dtype == jnp.float32
  want = np.zeros((N, extra + L, extra + L))
  for i, j in np.ndindex(L, L):
    dots_N = np.sum(q_LNK[extra + i] * r_ONK[i - j + L - 1], axis=-1)
    want[:, extra + i, extra + j] = dots_N / np.sqrt(K)
  np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-5)


def test_every_layer_has_relative_keys_that_leave_out_the_class_token():
  model, params, images = make(posemb='relative', scan=True)
  aux = run(model, params, images)
  x = first_tokens(params, aux)
  for layer in range(TINY['depth']):
    block = params['Transformer'][f'encoderblock_{layer}']
    x = layer_norm(x, block['LayerNorm_0'])
    for b in range(2):
      _, want = attention(x[b], block['MultiHeadDotProductAttention_1'], 1)
      np.testing.assert_allclose(
        aux['attention'][layer, b], want, rtol=0, atol=ATOL
      )
    x = aux['blocks'][layer]


@pytest.mark.parametrize('side', [0, 6, -1])
def test_queries_and_keys_turn_as_complex_numbers(side):
  rng = np.random.default_rng(0)
  (h, w), K, theta, extra = (2, 3), 8, 50.0, 2
  x = rng.standard_normal((2, extra + h * w, 3, K)).astype(np.float32)
  got = posemb.rotate(x, posemb.rotation((h, w), K, theta, side))
  np.testing.assert_array_equal(got[:, :extra], x[:, :extra])
  half = posemb.rotate(jnp.bfloat16(x), posemb.rotation((h, w), K, theta, side))
  assert half.dtype == jnp.bfloat16
  for row, column in np.ndindex(h, w):
    i = extra + row * w + column
    y, x_ = (row, column) if side < 0 else (row / h * side, column / w * side)
    if not side:  # the centres of the patches, from -1 to 1, in half turns
      y, x_ = (
        np.pi * 2 * ((2 * a + 1) / n - 1) for a, n in ((row, h), (column, w))
      )
    f = [theta**-0.0, theta**-0.5]
    turn = np.exp(1j * np.array([y * f[0], y * f[1], x_ * f[0], x_ * f[1]]))
    want = (x[:, i, :, :4] + 1j * x[:, i, :, 4:]) * turn
    np.testing.assert_allclose(got[:, i, :, :4], want.real, atol=1e-5)
    np.testing.assert_allclose(got[:, i, :, 4:], want.imag, atol=1e-5)
