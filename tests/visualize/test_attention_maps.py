"""Layers beside the whole model, and gradients beside differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import attention, variants
from vit_jax.visualize.attention_maps import Layers

TINY = dict(patch_size=4, width=8, depth=3, mlp_dim=16, heads=2, num_classes=3)
KINDS = {
  'cls': {},
  'gap': {
    'pool': 'gap',
    'posemb': 'learned2d',
    'posemb_at': 'every_layer',
    'registers': 2,
  },
  'map': {'pool': 'map', 'posemb': 'sincos2d', 'registers': 1},
  'relative': {'posemb': 'relative'},
  'axial': {'pool': 'gap', 'axial': True, 'posemb': 'relative'},
  'deit': {'name': 'deit', 'registers': 1},
  'stacked': {'scan': True, 'remat': 'cheap'},
}
# Axial attention has relative embeddings to compare, and is not drawn.
ATTENDING = [kind for kind in KINDS if kind != 'axial']
SIZE = (8, 12)


def tiny(kind, dtype='float32'):
  """Returns a model, random parameters and a batch of two images."""
  model = variants.build(
    image_size=SIZE, **{'name': 'vit'} | TINY | KINDS[kind]
  ).clone(dtype=jnp.dtype(dtype))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (0.5 * rng.standard_normal(x.shape)).astype(dtype),
    jax.eval_shape(lambda: variants.init(model, jax.random.key(0), SIZE)),
  )
  images = rng.uniform(-1, 1, (2, *SIZE, 3)).astype(dtype)
  return model, params, images


@pytest.mark.fast('cls', 'map')
@pytest.mark.parametrize('kind', ATTENDING)
def test_each_layers_attention_is_what_the_model_captures(kind):
  model, params, images = tiny(kind)
  apply = jax.jit(model.apply, static_argnames='capture')
  logits, aux = apply({'params': params}, images, capture=('attention',))
  layers = Layers(model, params, images)
  got = list(layers.attention())
  assert len(got) == 3
  for weights, expected in zip(got, aux['attention'], strict=True):
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(layers.logits_BC, logits, rtol=1e-5, atol=1e-5)
  assert layers.grid == (2, 3)


def test_a_pooling_head_reads_as_its_heads_attend_on_average():
  model, params, images = tiny('map')
  _, aux = jax.jit(model.apply)({'params': params}, images)
  head = params['MAPHead_0']
  msa = head['MultiHeadDotProductAttention_0']
  # The first token is a register, which it does not see.
  q_NK, k_BLNK = (
    np.einsum('...D,DNK->...NK', x, msa[name]['kernel']) + msa[name]['bias']
    for name, x in (
      ('query', head['probe'][0, 0]),
      ('key', np.asarray(aux['tokens'])[:, 1:]),
    )
  )
  exp_BNL = np.exp(np.einsum('NK,BLNK->BNL', q_NK, k_BLNK) / np.sqrt(4))
  want_BL = (exp_BNL / exp_BNL.sum(-1, keepdims=True)).mean(1)
  read_BL = Layers(model, params, images).read_BL
  np.testing.assert_allclose(
    read_BL, np.pad(want_BL, ((0, 0), (1, 0))), rtol=1e-5, atol=1e-6
  )


@pytest.fixture
def in_float64():
  with jax.enable_x64(True):
    yield


@pytest.mark.fast('cls')
@pytest.mark.parametrize('kind', ['cls', 'gap', 'map', 'relative', 'deit'])
def test_gradients_are_differences_of_the_logit(kind, in_float64, monkeypatch):
  """Central differences of 1e-4 in float64, for weights of every layer."""
  model, params, images = tiny(kind, 'float64')
  class_B = np.array([2, 1])
  found = list(Layers(model, params, images).gradients(class_B))[::-1]
  calls, changed = [], {}
  weighted = attention.weighted

  def with_a_change(weights, v):
    calls.append(0)
    return weighted(weights + changed.get(len(calls) - 1, 0), v)

  monkeypatch.setattr(attention, 'weighted', with_a_change)

  @jax.jit
  def logit(change):
    calls.clear()
    changed.clear()
    changed.update(change)
    _, aux = model.apply({'params': params}, images, capture=('attention',))
    # The model's own logits are float32.
    logits = aux['pre_logits'] @ params['head']['kernel']
    if kind == 'deit':
      dist = aux['tokens'][:, 1] @ params['head_dist']['kernel']
      logits = (logits + dist) / 2
    return logits[jnp.arange(2), class_B].sum()

  rng = np.random.default_rng(1)
  for layer, (_, gradients) in enumerate(found):
    gradient = np.asarray(gradients)
    assert gradient.dtype == np.float64
    for _ in range(4):
      entry = tuple(rng.integers(gradient.shape))
      change = np.zeros(gradient.shape)
      change[entry] = 1e-4
      difference = (logit({layer: change}) - logit({layer: -change})) / 2e-4
      np.testing.assert_allclose(
        gradient[entry], difference, rtol=1e-5, atol=1e-9
      )


@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('vit', TINY | KINDS['axial']),
    ('resnet', {'width': 32, 'layers': (1,)}),
    ('igpt', {'width': 32, 'mlp_dim': 8, 'heads': 2, 'depth': 1}),
    ('detr', {'width': 32, 'mlp_dim': 8, 'heads': 2, 'backbone': 'plain'}),
  ],
)
def test_other_models_are_refused(name, fields):
  fields = {'name': name, 'num_classes': 3} | fields
  model = variants.build(image_size=(32, 32), **fields)
  with pytest.raises(ValueError, match=f'{type(model).__name__}.*Use a ViT'):
    Layers(model, {}, np.zeros((1, 32, 32, 3)))
