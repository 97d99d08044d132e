"""Parts of a ResNet against NumPy and their definitions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import cpu_gradients, layers, resnet, variants

VERSIONS = (1, 2)


def draw(shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apply(module, params, x, **kwargs):
  return jax.jit(lambda p, x: module.apply({'params': p}, x, **kwargs))(
    params, x
  )


@pytest.mark.parametrize('version', VERSIONS)
def test_kernels_are_standardised_as_in_numpy(version):
  """Kernels are so small that the place of epsilon matters."""
  kernel = 1e-4 * (draw((3, 3, 4, 5)) + draw((5,), 1))
  x = draw((2, 6, 7, 4), 2)
  conv = resnet.StdConv(
    5, (3, 3), padding='VALID', use_bias=False, version=version
  )
  got = apply(conv, {'kernel': kernel}, x)
  mean, variance = kernel.mean((0, 1, 2)), kernel.var((0, 1, 2))
  standardised = (kernel - mean) / (
    np.sqrt(variance) + 1e-5 if version == 1 else np.sqrt(variance + 1e-10)
  )
  windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))
  want = np.einsum('bhwiyx,yxio->bhwo', windows, standardised)
  # Sums of 36 products of float32.
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_frozen_norm_is_its_formula_and_learns_nothing():
  x = draw((2, 3, 4, 5))
  params = {k: 1 + np.abs(draw((5,), i)) for i, k in enumerate('abcd')}
  names = ('scale', 'bias', 'mean', 'var')
  params = dict(zip(names, params.values(), strict=True))
  norm = resnet.FrozenBatchNorm()
  begins = norm.init(jax.random.key(0), x)['params']
  assert {k: set(v.tolist()) for k, v in begins.items()} == {
    **{'scale': {1}, 'bias': {0}, 'mean': {0}, 'var': {1}}
  }
  scale, bias, mean, var = (params[name] for name in names)
  want = (x - mean) / np.sqrt(var + 1e-5) * scale + bias
  np.testing.assert_allclose(
    norm.apply({'params': params}, x), want, rtol=1e-5, atol=1e-5
  )
  grads = jax.grad(lambda p: norm.apply({'params': p}, x).sum())(params)
  assert not any(np.any(g) for g in grads.values())


def test_far_from_zero_a_group_norm_has_its_digits():
  """The mean of squares minus the squared mean would be off by a tenth."""
  x = 1000 + draw((1, 4, 5, 32))
  params = {'scale': np.ones(32, 'f'), 'bias': np.zeros(32, 'f')}
  exact = np.asarray(x, np.float64)
  exact = (exact - exact.mean((1, 2))) / exact.std((1, 2))
  # Around 1,000, float32 numbers have four decimals.
  got = apply(layers.GroupNorm(1e-6), params, x)
  np.testing.assert_allclose(got, exact, atol=1e-3)


@pytest.mark.parametrize(('groups', 'dtype'), [(2, 'float32'), (8, 'bfloat16')])
def test_a_group_norm_is_flax_s_with_its_gradients(groups, dtype):
  x = jnp.asarray(draw((2, 5, 6, 8)), dtype)
  weights = jnp.asarray(draw((2, 5, 6, 8), 1), dtype)
  params = {'scale': draw((8,), 2), 'bias': draw((8,), 3)}

  def run(norm):
    def weighted(params, x):
      y = norm.apply({'params': params}, x)
      return (y * weights).astype(jnp.float32).sum(), y

    return jax.jit(jax.grad(weighted, (0, 1), has_aux=True))(params, x)

  got = run(layers.GroupNorm(1e-5, groups=groups))
  want = run(
    nn.GroupNorm(groups, epsilon=1e-5, dtype=dtype, use_fast_variance=False)
  )
  jax.tree.map(lambda a, b: _assert_close(a, b, dtype), got, want)
  assert got[1].dtype == dtype


def _assert_close(got, want, dtype):
  # Two roundings of bfloat16's 8 bits; float32 sums of 60 products.
  tolerance = 1e-2 if dtype == 'bfloat16' else 1e-5
  np.testing.assert_allclose(
    np.asarray(got, 'f'), np.asarray(want, 'f'), tolerance, tolerance
  )


@pytest.mark.fast('2-size1')
@pytest.mark.parametrize(
  ('version', 'size'), [(1, (7, 8)), (2, (7, 8)), (2, (1, 2))]
)
def test_max_pool_is_flax_s_with_its_gradient(version, size):
  x = draw((2, *size, 3))
  if version < 2:
    x = np.maximum(x, 0)  # as after the root's ReLU

  def flax_s(x):
    if version == 1:
      return nn.max_pool(x, (3, 3), (2, 2), padding='SAME')
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return nn.max_pool(x, (3, 3), (2, 2))

  want = flax_s(x)
  np.testing.assert_array_equal(cpu_gradients.max_pool(x, version), want)
  weights = draw(want.shape, 1)

  def gradient(pool):
    return jax.grad(lambda x: (pool(nn.relu(x)) * weights).sum())(x)

  # Behind a ReLU, equal maxima have no gradient.
  np.testing.assert_allclose(
    gradient(lambda x: cpu_gradients.max_pool(x, version)),
    gradient(flax_s),
    rtol=1e-6,
    atol=1e-6,
  )


def test_every_convolution_of_one_pixel_has_the_gradient_for_cpus():
  unit, params = init_unit(draw((1, 4, 4, 32)), version=1)
  apply = jax.make_jaxpr(lambda x: unit.apply({'params': params}, x))
  assert sorted(
    eqn.primitive.name
    for eqn in apply(draw((1, 4, 4, 32))).eqns
    if 'conv' in eqn.primitive.name or 'custom_vjp' in eqn.primitive.name
  ) == ['conv_general_dilated'] + 3 * ['custom_vjp_call']


@pytest.mark.parametrize('stride', [1, 2])
def test_a_convolution_of_one_pixel_is_xla_s(stride):
  """Compares gradients."""
  x, weights = (
    draw((2, 5, 6, 8)),
    draw((2, *(-(-n // stride) for n in (5, 6)), 32), 1),
  )
  params = {'kernel': draw((1, 1, 8, 32), 2)}
  convolution = resnet.StdConv(32, (1, 1), stride, use_bias=False)

  def gradients(module):
    return jax.jit(
      jax.grad(
        lambda p, x: (module.apply({'params': p}, x) * weights).sum(), (0, 1)
      )
    )(params, x)

  got = gradients(
    convolution.clone(conv_general_dilated=cpu_gradients.convolve_pixels)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
    got,
    gradients(convolution),
  )


def init_unit(x, **fields):
  unit = resnet.Unit(8 * 4, **fields)
  return unit, jax.jit(unit.init)(jax.random.key(0), x)['params']


def test_a_unit_of_version_1_begins_as_relu_of_its_input():
  x = draw((2, 4, 6, 128))
  unit, params = init_unit(x, version=1)
  assert not params['gn3']['scale'].any()
  assert 'conv_proj' not in params
  got = apply(unit, params, x)
  np.testing.assert_array_equal(got, np.maximum(x, 0))
  params['gn3']['scale'] = jnp.ones(128)
  assert np.abs(apply(unit, params, x) - got).max() > 0.1


def test_a_unit_of_version_2_adds_to_its_input():
  """With a last kernel of zero, even negative inputs stay."""
  x = draw((2, 4, 6, 128))
  unit, params = init_unit(x, version=2)
  for name in ('gn1', 'gn2', 'gn3'):
    np.testing.assert_array_equal(params[name]['scale'], 1)
  params['conv3']['kernel'] = jnp.zeros_like(params['conv3']['kernel'])
  np.testing.assert_array_equal(apply(unit, params, x), x)


@pytest.mark.parametrize(
  ('version', 'channels', 'stride', 'projects'),
  [(1, 128, 1, False), (2, 128, 2, True), (1, 64, 1, True)],
)
def test_shortcuts_are_projected_only_where_shapes_change(
  version, channels, stride, projects
):
  x = draw((2, 4, 6, channels))
  unit, params = init_unit(x, version=version, stride=stride)
  assert ('conv_proj' in params) == projects
  # Version 1 normalises what it projects.
  assert ('gn_proj' in params) == (projects and version == 1)
  got = apply(unit, params, x)
  assert got.shape == (2, 4 // stride, 6 // stride, 128)


@pytest.mark.fast('1-False')
@pytest.mark.parametrize(
  ('version', 'axial'), [(1, False), (2, False), (1, True)]
)
def test_feature_maps_halve_sides_and_double_widths(version, axial):
  size = (50, 33)
  model = variants.build(
    num_classes=0,
    image_size=size,
    name='resnet',
    layers=(1, 2, 1, 1),
    width=32,
    version=version,
    axial=axial,
  )
  _, aux = jax.eval_shape(
    lambda key, x: model.init_with_output(key, x, capture=('blocks',))[0],
    jax.random.key(0),
    jax.ShapeDtypeStruct((2, *size, 3), jnp.float32),
  )

  def sides(halvings):
    h, w = size
    for _ in range(halvings):
      # Sides are rounded up.
      h, w = -(-h // 2), -(-w // 2)
    return h, w

  assert aux['stem'].shape == (2, *sides(2), 32)
  assert [x.shape for x in aux['blocks']] == [
    (2, *sides(2 + i), 128 * 2**i) for i in range(4)
  ]
  h, w = model.grid(size)
  assert (h, w) == sides(5)
  assert aux['tokens'].shape == (2, h * w, 1024)


@pytest.mark.parametrize(('version', 'shift'), [(1, 2), (2, 3)])
def test_strided_convolutions_pad_as_their_version_does(version, shift):
  """Version 1 pads (2, 3) zeros like TensorFlow, version 2 (3, 3)."""
  model = variants.build(
    num_classes=0,
    image_size=(16, 16),
    name='resnet',
    layers=(1,),
    width=32,
    version=version,
  )
  images = np.zeros((1, 16, 16, 3), np.float32)
  jaxpr = jax.make_jaxpr(lambda key: model.init_with_output(key, images)[0][0])(
    jax.random.key(0)
  )
  strided = [
    eqn.params['padding']
    for eqn in jaxpr.eqns
    if eqn.primitive.name == 'conv_general_dilated'
    and eqn.params['window_strides'] == (2, 2)
  ]
  assert strided == [((shift, 5 - shift if version == 1 else shift),) * 2]
