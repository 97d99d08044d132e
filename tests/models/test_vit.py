"""Initial values, dropout and identities of ViTs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import layers, variants, vit
from vit_jax.models.resnet import ResNet

SIZE = (16, 24)
TINY = {'patch_size': 8, 'width': 24, 'depth': 3, 'mlp_dim': 48, 'heads': 3}


@functools.cache
def initial(model, size, seed=0):
  init = jax.jit(lambda key: variants.init(model, key, size))
  return init(jax.random.key(seed))


def make(size=SIZE, **fields):
  model = variants.build(num_classes=5, image_size=size, **(TINY | fields))
  params = jax.tree.map(lambda x: x, initial(model, size))
  # The head starts at zero, which would hide everything before it.
  kernel = params['head']['kernel']
  params['head']['kernel'] = jax.random.normal(jax.random.key(1), kernel.shape)
  return model, params


def images(n=2, size=SIZE):
  return jax.random.uniform(jax.random.key(2), (n, *size, 3), minval=-1)


def run(model, params, train=False, capture=()):
  rngs = {'dropout': jax.random.key(3)}
  return jax.jit(
    lambda p, x: model.apply(
      {'params': p}, x, train=train, rngs=rngs, capture=capture
    )
  )(params, images())


@functools.partial(jax.jit, static_argnums=0)
def logits_and_grads(model, params):
  def loss(p):
    rngs = {'dropout': jax.random.key(3)}
    logits, _ = model.apply({'params': p}, images(), train=True, rngs=rngs)
    return jnp.sum(logits**2), logits

  (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
  return logits, grads


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['none', 'cheap'])
def test_scan_and_remat_change_no_number(remat):
  """Dropout keys do not depend on how layers are compiled.

  test_contract.py has models of all kinds, without dropout.
  """
  plain, params = make(dropout=0.3, stochastic_depth=0.4)
  other = plain.clone(scan=True, remat=remat)
  want, want_grads = logits_and_grads(plain, params)
  got, got_grads = logits_and_grads(other, plain.stack_layers(params))
  got_grads = plain.unstack_layers(got_grads)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  # Only the order of sums differs.
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4),
    got_grads,
    want_grads,
  )


@pytest.mark.slow
def test_stochastic_depth_leaves_out_later_layers():
  model, params = make(stochastic_depth=0.9999)
  quiet, want = run(model, params, capture=('blocks',))
  noisy, got = run(model, params, train=True, capture=('blocks',))
  # The first layer always stays; the last one is almost always left out.
  np.testing.assert_allclose(got['blocks'][0], want['blocks'][0], atol=1e-5)
  np.testing.assert_array_equal(got['blocks'][2], got['blocks'][1])
  assert np.abs(want['blocks'][2] - want['blocks'][1]).max() > 0.1
  same, _ = run(model.clone(stochastic_depth=0.0), params, train=True)
  np.testing.assert_array_equal(same, quiet)


def test_branches_are_dropped_by_example_and_scaled():
  y = jnp.ones((4000, 2, 3))
  got = np.asarray(layers.drop_branch(y, jnp.float32(0.25), jax.random.key(0)))
  kept = got[:, 0, 0] > 0
  # A binomial: 3,000 and a deviation of 27.
  assert abs(kept.sum() - 3000) < 5 * 27.4
  want = np.where(kept, np.float32(4 / 3), 0)[:, None, None]
  np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-6)
  for rate, key in ((None, jax.random.key(0)), (jnp.float32(0.5), None)):
    assert layers.drop_branch(y, rate, key) is y
  half = layers.drop_branch(y[:2].astype('bfloat16'), 0.5, jax.random.key(0))
  assert half.dtype == jnp.bfloat16
  # A dropout with the same key drops other examples.
  column = jnp.ones((4000, 1, 1))
  both = [
    np.asarray(drop(column, 0.5, jax.random.key(0)))[:, 0, 0] > 0
    for drop in (layers.drop_branch, layers.dropout)
  ]
  assert 0.4 < np.mean(both[0] == both[1]) < 0.6


def test_a_vector_of_a_block_is_a_class_token_or_the_mean_of_the_grid():
  x_BLD = np.random.default_rng(0).standard_normal((2, 8, 24), np.float32)
  x_BhwC = x_BLD.reshape(2, 2, 4, 24)
  resnet = ResNet((1,), num_classes=5)
  for model, x, want in (
    (vit.ViT(num_classes=5, **TINY, registers=1), x_BLD, x_BLD[:, 0]),
    (
      vit.ViT(num_classes=5, **TINY, registers=2, pool='gap'),
      x_BLD,
      x_BLD[:, 2:].mean(1),
    ),
    (resnet, x_BhwC, x_BhwC.mean((1, 2))),
  ):
    np.testing.assert_allclose(model.pool_block(x), want, rtol=1e-5, atol=1e-6)
  assert resnet.pool_block(jnp.bfloat16(x_BhwC)).dtype == jnp.float32


@pytest.mark.fast('fields1-biases1')
@pytest.mark.parametrize(
  ('fields', 'biases'),
  [
    ({'name': 'deit'}, {'head': -10, 'head_dist': -10}),
    ({'name': 'rotation_vit'}, {'head': -10, 'head_rotation': 0}),
    ({'name': 'video_vit'}, {'head': -10, 'head_next': 0}),
    ({'name': 'igpt', 'patch_size': None, 'head_bias': None}, {'head': 0}),
  ],
)
def test_every_head_starts_at_zero_but_for_the_bias_of_classes(fields, biases):
  fields = TINY | {'head_bias': -10.0, 'depth': 1} | fields
  fields = {name: x for name, x in fields.items() if x is not None}
  model = variants.build(num_classes=5, image_size=(8, 8), **fields)
  params = initial(model, (8, 8))
  assert {name for name in params if name.startswith('head')} == biases.keys()
  for name, bias in biases.items():
    assert not params[name]['kernel'].any()
    np.testing.assert_array_equal(params[name]['bias'], bias)


def test_initialisers_have_the_published_scales():
  """Xavier-uniform kernels, N(0, 1e-6) MLP biases, N(0, 0.02) positions."""
  size = (112, 112)
  model = variants.build(
    num_classes=2, image_size=size, **variants.fields('s8')
  )
  params = initial(model.clone(depth=1), size)
  block = params['Transformer']['encoderblock_0']
  parts = block['MultiHeadDotProductAttention_1'] | block['MlpBlock_3']
  assert len(parts) == 6
  for name, part in parts.items():
    bound = np.sqrt(6 / (384 + (4 if 'Dense' in name else 1) * 384))
    assert np.abs(part['kernel']).max() <= bound
    np.testing.assert_allclose(
      np.std(part['kernel']), bound / np.sqrt(3), rtol=0.02
    )
  bias = block['MlpBlock_3']['Dense_0']['bias']
  np.testing.assert_allclose(np.std(bias), 1e-6, rtol=0.1)
  posemb = params['Transformer']['posembed_input']['pos_embedding']
  np.testing.assert_allclose(np.std(posemb), 0.02, rtol=0.02)
  fan_in = 8 * 8 * 3
  np.testing.assert_allclose(
    np.std(params['embedding']['kernel']), fan_in**-0.5, rtol=0.02
  )
  assert not params['cls'].any()


@pytest.mark.parametrize('is_axial', [False, True])
def test_every_branch_drops_out_by_a_key_of_its_own(is_axial, monkeypatch):
  """Dropout has a key for every call, stochastic depth for every branch.

  Dropout follows the positions and, in every layer, the attention, the MLP's
  hidden layer and the MLP. Axial layers have rows and columns of each.
  """
  calls, branches = [], []

  def note(x, rate, key):
    calls.append((x.shape, rate, key))
    return x

  def note_branch(x, rate, key):
    branches.append(key)
    return x

  monkeypatch.setattr(layers, 'dropout', note)
  monkeypatch.setattr(layers, 'drop_branch', note_branch)
  fields = TINY | {'depth': 2}
  if is_axial:
    fields |= {'axial': True, 'pool': 'gap'}
  model = vit.ViT(num_classes=0, dropout=0.25, **fields)

  batches = [(2 * 2, 3), (2 * 3, 2)] if is_axial else [(2, 7)]
  want = [(2, 6 if is_axial else 7, 24)]
  want += [(*x, D) for x in batches for D in (24, 48, 24)] * 2
  rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
  for train in (False, True):
    calls.clear()
    branches.clear()
    jax.eval_shape(lambda t=train: model.init(rngs, images(), train=t))
    assert [(shape, rate) for shape, rate, _ in calls] == [
      (shape, 0.25) for shape in want
    ]
    assert len(branches) == 2 * len(batches) * 2
    # In tracing, each key of a split is a separate object.
    for keys in ([key for _, _, key in calls], branches):
      assert len(set(map(id, keys))) == (len(keys) if train else 1)
      assert all((key is not None) == train for key in keys)


def test_registers_begin_apart_and_channels_at_their_scale():
  model = variants.build(
    num_classes=0,
    image_size=SIZE,
    registers=16,
    layer_scale=0.3,
    **(TINY | {'depth': 1}),
  )
  params = initial(model, SIZE)
  assert not params['cls'].any()
  registers = np.asarray(params['registers'][0])
  assert registers.shape == (16, 24)
  assert np.std(registers) == pytest.approx(0.02, rel=0.15)
  assert np.abs(registers[0] - registers[1]).max() > 0.01
  block = params['Transformer']['encoderblock_0']
  for name in ('LayerScale_0', 'LayerScale_1'):
    np.testing.assert_array_equal(block[name]['scale'], np.float32([0.3] * 24))
