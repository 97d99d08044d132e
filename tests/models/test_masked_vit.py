"""Corruption in a ViT that predicts patches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import variants
from vit_jax.models.masked_vit import KEPT, MASKED, OTHER, SAME
from vit_jax.models.vit import ViT

SIZE = (16, 24)
FIELDS = {'patch_size': 8, 'width': 16, 'depth': 2, 'mlp_dim': 24, 'heads': 2}
L = 6


@functools.cache
def initial(model):
  init = jax.jit(lambda key: variants.init(model, key, SIZE))
  return init(jax.random.key(0))


def make(**fields):
  model = variants.build(
    name='masked_vit',
    image_size=SIZE,
    **(FIELDS | {'num_classes': 0, 'pool': 'gap'} | fields),
  )
  params = initial(model)
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: x + np.float32(0.3 * rng.standard_normal(x.shape)), params
  )
  return model, params


def images_of(seed=0):
  rng = np.random.default_rng(seed)
  return rng.uniform(-1, 1, (2, *SIZE, 3)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, images, kind, other):
  return model.apply({'params': params}, images, corruption=(kind, other))[0]


def predict(model, params, images, kind, other=None):
  kind = jnp.array([kind, kind])
  other = jnp.roll(jnp.arange(L), -1) if other is None else jnp.array(other)
  other = jnp.stack([other, other])
  return np.asarray(apply(model, params, images, kind, other))


@pytest.mark.slow
def test_its_body_is_a_vit():
  model, params = make(pool='cls', target='downsized')
  body = model.body()
  assert type(body) is ViT
  theirs = {k: x for k, x in params.items() if k not in model.task_params}
  assert jax.tree.map(np.shape, theirs) == jax.tree.map(np.shape, initial(body))
  y, want = jax.jit(body.apply)({'params': theirs}, images_of())
  predicted, aux = jax.jit(model.apply)({'params': params}, images_of())
  for name in ('stem', 'tokens', 'pre_logits'):
    np.testing.assert_array_equal(aux[name], want[name], err_msg=name)
  np.testing.assert_array_equal(aux['pre_logits'], y)
  assert predicted.shape == (2, L, 16, 512)
  assert predicted.dtype == jnp.float32
  # The linear layer of the paper, on every patch.
  kernel, bias = params['prediction']['kernel'], params['prediction']['bias']
  tokens = aux['tokens'][:, -L:]
  np.testing.assert_allclose(
    predicted,
    np.einsum('BLD,D...->BL...', tokens, kernel) + np.asarray(bias),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize('kind', [KEPT, MASKED, OTHER, SAME])
def test_what_is_hidden_makes_no_difference(kind):
  """Changes pixels of the first patch under each kind of corruption."""
  model, params = make(pool='cls')
  one, other = images_of(), images_of()
  other[:, :8, :8] += 0.5
  kinds = [kind] + [KEPT] * (L - 1)
  got, want = (predict(model, params, x, kinds) for x in (other, one))
  if kind in (MASKED, OTHER):
    np.testing.assert_array_equal(got, want)
  else:
    assert np.abs(got - want).max() > 1e-3


def test_another_patch_stands_in_its_place():
  """Copying the pixels by hand gives the same."""
  model, params = make(posemb='learned1d')
  images = images_of()
  copied = images.copy()
  copied[:, :8, :8] = images[:, 8:, 16:]  # the last patch of 2 x 3
  kinds = [OTHER] + [KEPT] * (L - 1)
  got = predict(model, params, images, kinds, [5, 0, 0, 0, 0, 0])
  want = predict(model, params, copied, [KEPT] * L)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_hidden_patches_leave_the_layers_their_dtype():
  """Float32 tokens would take twice the memory."""
  model, params = make(dtype='bfloat16')
  corruption = (
    jnp.array([[MASKED] + [KEPT] * (L - 1)] * 2),
    jnp.zeros((2, L), int),
  )
  _, aux = jax.eval_shape(
    lambda: model.apply(
      {'params': params},
      images_of(),
      corruption=corruption,
      capture=('blocks',),
    )
  )
  assert aux['blocks'].dtype == jnp.bfloat16


def test_the_mask_is_learned():
  model, params = make()
  kinds = jnp.array([[MASKED] + [KEPT] * (L - 1)] * 2)
  other = jnp.zeros((2, L), int)

  def total(params):
    predicted, _ = model.apply(
      {'params': params}, images_of(), corruption=(kinds, other)
    )
    return jnp.sum(predicted**2)

  assert np.abs(jax.jit(jax.grad(total))(params)['mask_embedding']).max() > 1e-3


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'pool': 'map'}, "model.pool is 'map'.* Use 'cls' or 'gap'"),
    ({'norm_pooled': True}, 'model.norm_pooled is True.* Use False'),
    ({'target': 'downsized', 'patch_size': 2}, '2 pixels cannot be downsized'),
  ],
)
def test_what_makes_no_sense_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    make(**fields)


def test_a_single_patch_is_refused():
  fields = FIELDS | {'name': 'masked_vit', 'num_classes': 0, 'pool': 'gap'}
  with pytest.raises(ValueError, match='a single patch, so there are no'):
    variants.build(image_size=(8, 8), **fields)
  assert variants.build(image_size=(8, 16), **fields).grid((8, 16)) == (1, 2)
  # Patches of any size have a mean colour.
  small = variants.build(image_size=(8, 16), **fields | {'patch_size': 2})
  assert small.target == 'mean_colour'


def test_it_starts_with_a_small_mask_and_no_prediction():
  model, _ = make()
  params = initial(model)
  assert not any(x.any() for x in params['prediction'].values())
  # Sixteen draws of a deviation of 0.02.
  assert 0.01 < np.std(params['mask_embedding']) < 0.04
