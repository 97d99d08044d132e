"""iGPT, against transformers' ImageGPT; causality; kept keys and values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import hf
from vit_jax.models import flops, variants
from vit_jax.projects.igpt import model as igpt

SIZE = (4, 6)
L = SIZE[0] * SIZE[1]
# 11 colours, none of which is another's like.
PALETTE = tuple(np.random.default_rng(1).uniform(-1, 1, 33).tolist())
FIELDS = {'width': 32, 'depth': 3, 'mlp_dim': 48, 'heads': 4}
# Of values of some units: both sides work in float32.
TOLERANCE = 1e-5


def build(size=SIZE, num_classes=0, **fields):
  fields = {'name': 'igpt', 'palette': PALETTE} | FIELDS | fields
  return variants.build(num_classes=num_classes, image_size=size, **fields)


def random_params(model, size=SIZE):
  """Returns parameters none of which is zero or one."""
  rng = np.random.default_rng(0)
  params = jax.eval_shape(lambda: variants.init(model, jax.random.key(0), size))

  def draw(path, x):
    scale = {'kernel': 0.2, 'scale': 0.3}.get(path[-1].key, 0.5)
    one = path[-1].key == 'scale'
    return np.float32(one + scale * rng.standard_normal(x.shape))

  return jax.tree_util.tree_map_with_path(draw, params)


def colours(batch=3, length=L):
  return np.random.default_rng(2).integers(0, 11, (batch, length), np.int32)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, colours_BL, **kwargs):
  _, aux = model.apply(
    {'params': params}, colours_BL, capture=('pixels',), **kwargs
  )
  return aux


def pixels(model, params, colours_BL, **kwargs):
  return np.asarray(apply(model, params, colours_BL, **kwargs)['pixels'])


def test_transformers_computes_the_same_of_bert(tmp_path, transformers, torch):
  """transformers has only causal models, so the test opens their masks.

  test_hf_format.py compares causal models.
  """
  model = build(bias=True)
  params = random_params(model)
  checkpoint = opening.Checkpoint('made', model, params, SIZE)
  hf.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  peer = transformers.ImageGPTForCausalImageModeling.from_pretrained(
    tmp_path / 'x'
  ).eval()
  for layer in peer.transformer.h:
    layer.attn.bias.fill_(True)
  with torch.inference_mode():
    tokens = torch.tensor(colours()).long()
    want = peer(tokens, output_hidden_states=True)
  del params['start_embedding']
  aux = apply(model.clone(causal=False), params, colours())
  for got, x in (
    (aux['pixels'], want.logits),
    (aux['tokens'], want.hidden_states[-1]),
  ):
    x = x.numpy()
    assert np.abs(x).max() > 1
    np.testing.assert_allclose(got, x, rtol=0, atol=TOLERANCE * np.abs(x).max())


def test_a_pixel_is_predicted_of_those_before_it():
  model = build()
  params = random_params(model)
  plain_LL = np.repeat(colours(1), L, axis=0)
  changed_LL = plain_LL.copy()
  changed_LL[np.arange(L), np.arange(L)] += 1
  changed_LL %= 11
  got, plain = (pixels(model, params, x) for x in (changed_LL, plain_LL))
  # Row i: where the logits change with pixel i; rounding apart, all after it.
  differs_LL = np.abs(got - plain).max(-1) > 1e-4
  np.testing.assert_array_equal(differs_LL, np.tri(L, k=-1, dtype=bool).T)


def test_bert_sees_all_but_what_is_hidden():
  model = build(causal=False)
  params, colours_BL = random_params(model), colours(1)
  other_BL = (colours_BL + (np.arange(L) == 5)) % 11
  got = pixels(model, params, other_BL) - pixels(model, params, colours_BL)
  assert (np.abs(got).max(-1) > 1e-6).all()
  hidden_BL = np.arange(L)[None] == 5
  one, two = (
    pixels(model, params, x, hidden_BL=hidden_BL)
    for x in (colours_BL, other_BL)
  )
  np.testing.assert_array_equal(one, two)
  assert np.abs(one - pixels(model, params, colours_BL)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(('scan', 'given'), [(False, 0), (True, 7)])
def test_kept_keys_and_values_give_what_the_whole_image_does(scan, given):
  model = build(bias=True)
  params, colours_BL = random_params(model), colours()
  want = pixels(model, params, colours_BL)
  _, aux = model.apply({'params': params}, colours_BL, capture=('attention',))
  weights_XBNLL = aux['attention']
  if scan:
    model, params = model.clone(scan=True), model.stack_layers(params)
  # What comes after the given pixels is not known yet, and makes no difference.
  known_BL = np.where(np.arange(L) < given, colours_BL, 0)
  _, aux = model.apply({'params': params}, known_BL, capture=('cache',))
  keys, values, filled = aux['cache']
  assert filled == L and filled.dtype == jnp.int32
  cache = (keys, values, jnp.int32(given))

  @jax.jit
  def step(colours_B1, cache):
    _, aux = model.apply(
      {'params': params},
      colours_B1,
      capture=('pixels', 'attention'),
      cache=cache,
    )
    return aux['pixels'][:, 0], aux['attention'][:, :, :, 0], aux['cache']

  for i in range(given, L):
    logits_BK, weights_XBNL, cache = step(
      colours_BL[:, max(i - 1, 0)][:, None], cache
    )
    np.testing.assert_allclose(
      weights_XBNL, weights_XBNLL[:, :, :, i], rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
      logits_BK, want[:, i], rtol=0, atol=TOLERANCE * np.abs(want).max()
    )


def test_keys_and_values_are_kept_in_the_dtype_of_the_computation(monkeypatch):
  model = build(dtype='bfloat16')
  repeated = igpt.repeated

  def note(block, loop, x_BLD, *args, **kwargs):
    assert x_BLD.dtype == jnp.bfloat16  # as are the tokens from layer to layer
    return repeated(block, loop, x_BLD, *args, **kwargs)

  monkeypatch.setattr(igpt, 'repeated', note)
  _, aux = jax.eval_shape(
    functools.partial(model.apply, capture=('cache',)),
    {'params': random_params(model)},
    colours(),
  )
  keys, values, _ = aux['cache']
  assert keys.dtype == values.dtype == jnp.bfloat16


def test_attention_by_parts_equals_attention_at_once(monkeypatch):
  """Parts have 5 queries, and the last part has 4."""
  model = build()
  params = random_params(model)
  want = pixels(model, params, colours())
  monkeypatch.setattr(igpt, 'QUERIES', 5)
  capture = ('pixels', 'attention', 'blocks')
  run = jax.jit(functools.partial(model.apply, capture=capture))
  _, aux = run({'params': params}, colours())
  np.testing.assert_allclose(
    aux['pixels'], want, rtol=0, atol=TOLERANCE * np.abs(want).max()
  )
  np.testing.assert_allclose(aux['attention'].sum(-1), 1, atol=1e-5)
  assert not np.triu(aux['attention'], 1).any()
  # The paper probes what the first norm of a layer gives.
  normal = np.asarray(aux['blocks'][0]) / params['h0']['ln_1']['scale']
  np.testing.assert_allclose(np.mean(np.square(normal), -1), 1, rtol=1e-3)


@pytest.mark.slow
def test_images_become_the_nearest_colours():
  model = build()
  rng = np.random.default_rng(3)
  images = np.float32(rng.uniform(-1, 1, (2, *SIZE, 3)))
  got = model.quantised(jnp.asarray(images))
  far = images.reshape(2, L, 1, 3) - np.reshape(PALETTE, (1, 1, 11, 3))
  np.testing.assert_array_equal(got, np.square(far).sum(-1).argmin(-1))
  painted = model.painted(np.asarray(got))
  assert painted.dtype == np.uint8
  again = model.quantised(painted.reshape(2, *SIZE, 3) / np.float32(127.5) - 1)
  np.testing.assert_array_equal(again, got)
  params = random_params(model)
  outputs = (
    jax.jit(model.apply)({'params': params}, x)[0]
    for x in (images, np.asarray(got))
  )
  np.testing.assert_array_equal(*outputs)


def test_palettes():
  np.testing.assert_allclose(
    np.reshape(igpt.grey_palette(3), (3, 3)), [[-1] * 3, [0] * 3, [1] * 3]
  )
  even = np.reshape(igpt.even_palette(8), (-1, 3))
  assert len(np.unique(even, axis=0)) == 512
  assert even.min() == -1 and even.max() == 1
  # Blue changes first, red last.
  small = np.reshape(igpt.even_palette(2), (8, 3))
  assert small[1].tolist() == [-1, -1, 1] and small[4].tolist() == [1, -1, -1]


def test_colours_are_painted_as_the_nearest_of_256():
  palette = (-1.0, -0.99, 0.0, 0.5, 1.0, 1.0005)
  model = build(palette=palette)
  painted = model.painted(np.array([[1], [0]]))
  assert painted.dtype == np.uint8
  # 1.275, 127.5 and 191.25, and no more than there is.
  assert painted.tolist() == [[[191, 255, 255]], [[0, 1, 128]]]


@pytest.mark.parametrize(
  ('variant', 'millions'), [('igpt_s', 76), ('igpt_m', 455), ('igpt_l', 1362)]
)
def test_parameter_counts_are_the_published_ones(variant, millions):
  fields = variants.fields(variant)
  model = variants.build(num_classes=0, image_size=(32, 32), **fields)
  got = flops.count_params(model, (32, 32))
  D, depth = fields['width'], fields['depth']
  layer = 12 * D * D + 2 * D
  assert got == depth * layer + (512 + 1024 + 512 + 1 + 1) * D
  assert got / 1e6 == pytest.approx(millions, rel=0.01)


def test_operations_include_the_colours_that_are_predicted():
  D, M, K = FIELDS['width'], FIELDS['mlp_dim'], 11
  counts = [flops.forward_flops(build(depth=depth), SIZE) for depth in (1, 2)]
  a_layer = 2 * L * (4 * D * D + 2 * D * M + 2 * L * D)
  assert counts[1] - counts[0] == a_layer
  assert counts[0] - a_layer == 2 * L * K * D


@pytest.mark.slow
def test_initial_scales_are_the_originals():
  model = build((16, 16), width=256, mlp_dim=1024)
  params = jax.jit(lambda key: variants.init(model, key, (16, 16)))(
    jax.random.key(0)
  )
  wanted = {
    'pixel_embedding': 0.02,
    'start_embedding': 0.02,
    'pos_embedding': 0.01,
    'h1/query/kernel': 256**-0.5,
    'h1/out/kernel': (256 * 3) ** -0.5,
    'h1/mlp/Dense_0/kernel': 0.02,
    'h1/mlp/Dense_1/kernel': 0.02,
    'prediction/kernel': 0,
  }
  flat = traverse_util.flatten_dict(params, sep='/')
  assert not any(name.endswith('bias') for name in flat)
  for name, std in wanted.items():
    assert np.std(flat[name]) == pytest.approx(std, rel=0.15), name


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'palette': (0.0,) * 7}, 'model.palette has 7 numbers'),
    ({'size': (256, 257)}, 'Images of 256x257 have 65,792 pixels'),
    ({'heads': 5}, 'model.width 32 is not a multiple of model.heads 5'),
  ],
)
def test_what_cannot_work_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build(**fields)
