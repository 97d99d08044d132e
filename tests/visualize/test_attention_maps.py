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
  'hybrid': {'patch_size': 1, 'stem_width': 32},
  'deit': {'name': 'deit', 'registers': 1},
  'normed': {'attention_norm': True, 'qk_norm': True},
  'stacked': {'scan': True, 'remat': 'cheap'},
}
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


@pytest.mark.parametrize('kind', KINDS)
def test_each_layers_attention_is_what_the_model_captures(kind):
  model, params, images = tiny(kind)
  logits, aux = model.apply({'params': params}, images, capture=('attention',))
  layers = Layers(model, params, images)
  got = list(layers.attention())
  assert len(got) == 3
  want = aux['attention'] if kind == 'axial' else {'all': aux['attention']}
  for axis, stacked in want.items():
    for layer, expected in zip(got, stacked, strict=True):
      np.testing.assert_allclose(layer[axis], expected, atol=1e-6)
      np.testing.assert_allclose(layer[axis].sum(-1), 1, atol=1e-6)
  np.testing.assert_allclose(layers.logits_BC, logits, rtol=1e-5, atol=1e-5)
  assert layers.grid == (2, 3)


def test_a_pooling_head_reads_as_its_heads_attend_on_average():
  model, params, images = tiny('map')
  _, aux = model.apply({'params': params}, images)
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


@pytest.mark.parametrize(
  'kind',
  [
    pytest.param(
      kind, marks=[] if kind in ('cls', 'map', 'axial') else pytest.mark.slow
    )
    for kind in KINDS
    if kind != 'stacked'
  ],
)
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

  names = ['row', 'column'] if kind == 'axial' else ['all']
  rng = np.random.default_rng(1)
  for layer, (weights, gradients) in enumerate(found):
    assert weights.keys() == gradients.keys() == {*names}
    for place, name in enumerate(names):
      gradient = np.asarray(gradients[name])
      assert gradient.dtype == np.float64
      # Axial weights have rows or columns in an axis of their own.
      flat = gradient.reshape(-1, *gradient.shape[-3:])
      for _ in range(4):
        entry = tuple(rng.integers(flat.shape))
        change = np.zeros(flat.shape)
        change[entry] = 1e-4
        call = layer * len(names) + place
        difference = (logit({call: change}) - logit({call: -change})) / 2e-4
        np.testing.assert_allclose(
          flat[entry], difference, rtol=1e-5, atol=1e-9
        )


@pytest.mark.parametrize(
  ('axial', 'reason'),
  [(False, 'no attention'), (True, 'convolutions between its attention')],
)
def test_a_resnet_says_why_not(axial, reason):
  model = variants.build(
    name='resnet',
    image_size=(32, 32),
    width=32,
    layers=(1,),
    num_classes=3,
    axial=axial,
  )
  with pytest.raises(ValueError, match=f'ResNet, which has {reason}'):
    Layers(model, {}, np.zeros((1, 32, 32, 3)))


@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('igpt', 'IGPT, which has attention of pixels, which is not drawn'),
    ('detr', 'DETR, which has attention of objects, which is not drawn'),
  ],
)
def test_other_transformers_say_why_not(name, reason):
  fields = {'width': 32, 'mlp_dim': 8, 'heads': 2}
  fields |= {'depth': 1} if name == 'igpt' else {'backbone': 'plain'}
  model = variants.build(
    name=name, image_size=(32, 32), num_classes=3, **fields
  )
  with pytest.raises(ValueError, match=reason):
    Layers(model, {}, np.zeros((1, 32, 32, 3)))
