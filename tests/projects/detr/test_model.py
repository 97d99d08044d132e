"""DETR against formulas, torchvision's ResNet, and itself in other forms.

test_hf_format.py compares it with transformers, test_objective.py with the
original.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from vit_jax.models import fields, flops, layers, posemb, variants
from vit_jax.projects.detr import hf_format as detr_keys
from vit_jax.projects.detr import layers as backbone
from vit_jax.projects.detr import layers as detr_layers
from vit_jax.projects.detr import mask_head
from vit_jax.projects.detr import model as detr
from vit_jax.training import sharding

# Of values of a few units: both sides work in float32.
TOLERANCE = 1e-5

# Widths, layers, queries and classes all differ.
SIZE = (48, 80)
FIELDS = {
  'name': 'detr',
  'num_queries': 5,
  'width': 64,
  'heads': 8,
  'mlp_dim': 48,
  'encoder_layers': 2,
  'decoder_layers': 3,
  'backbone_width': 32,
}
PLAIN = FIELDS | {'backbone': 'plain', 'backbone_layers': (1, 2)}
MASKS = FIELDS | {'backbone_layers': (1, 1, 1, 1), 'masks': True}


def build(fields=PLAIN, **more):
  return variants.build(num_classes=6, image_size=SIZE, **(fields | more))


def random_params(model, size=SIZE):
  """Returns parameters none of which is zero or one; variances are positive."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: variants.init(model, jax.random.key(0), size))

  def draw(path, x):
    name = path[-1].key
    found = rng.standard_normal(x.shape)
    if name == 'kernel':
      fan_in = np.prod(x.shape[:-1])
      if path[-2].key in ('query', 'key', 'value', 'q_linear', 'k_linear'):
        fan_in = x.shape[0]
      found = found * fan_in**-0.5
    elif name == 'var':
      found = np.exp(0.3 * found)
    elif name != 'query_embed':
      found = 0.3 * found + (name == 'scale')
    return np.float32(found)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def images(batch=3, size=SIZE):
  rng = np.random.default_rng(1)
  return rng.standard_normal((batch, *size, 3)).astype(np.float32)


def padding(size=SIZE):
  """Returns that of three images: none, some, and less."""
  found = np.zeros((3, *size), bool)
  found[1, 20:], found[1, :, 50:], found[2, :, 70:] = True, True, True
  return found


@functools.cache
def case(name):
  model = build({'plain': PLAIN, 'masks': MASKS}[name])
  return model, random_params(model)


def run(model, params, *args, **kwargs):
  return jax.jit(lambda p, *xs: model.apply({'params': p}, *xs, **kwargs))(
    params, *args
  )


def test_positions_are_the_formula():
  inside = np.zeros((1, 4, 6), bool)
  inside[0, :3, :5] = True
  got = np.asarray(posemb.detr_sincos2d(jnp.asarray(inside), 16))[0, 1, 2]
  periods = 10_000.0 ** (np.arange(4) / 4)
  y, x = 2 * np.pi * 2 / 3 / periods, 2 * np.pi * 3 / 5 / periods
  want = [[np.sin(a), np.cos(a)] for turns in (y, x) for a in turns]
  np.testing.assert_allclose(got, np.ravel(want), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize('dilated', [True, False])
def test_the_resnet_is_torchvisions(torch, dilated):
  """With random statistics; uneven sides."""
  layers = (1, 2, 1, 3)
  models = pytest.importorskip('torchvision.models')
  peer = models.resnet.ResNet(
    models.resnet.Bottleneck,
    layers,
    replace_stride_with_dilation=[False, False, dilated],
  ).eval()
  model = resnet_of(layers, dilated)
  params = random_params(model)
  with torch.no_grad():
    state = peer.state_dict()
    for name, x in traverse_util.flatten_dict(params, sep='/').items():
      if not name.startswith('backbone/'):
        continue
      key = detr_keys.key_of(name, detr_keys.ORIGINAL)
      to_file, _ = detr_keys.torch_vit.layout(name, x.shape)
      state[key.removeprefix('backbone.0.body.')].copy_(
        torch.from_numpy(to_file(x).copy())
      )
    x = torch.from_numpy(images(2, (65, 97)).transpose(0, 3, 1, 2).copy())
    x = peer.maxpool(peer.relu(peer.bn1(peer.conv1(x))))
    wants = []
    for i in range(1, 5):
      x = getattr(peer, f'layer{i}')(x)
      wants.append(x.numpy().transpose(0, 2, 3, 1))
  maps = jax.jit(
    lambda p, x: resnet_of(layers, dilated).apply(
      {'params': p}, x, capture_intermediates=lambda m, _: m.name == 'backbone'
    )[1]['intermediates']['backbone']['__call__'][0]
  )(params, images(2, (65, 97)))
  for got, want in zip(maps, wants, strict=True):
    assert got.shape == want.shape
    assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


def resnet_of(layers, dilated):
  fields = {'backbone_layers': layers, 'dilation': dilated}
  return build(FIELDS | fields | {'backbone_width': 64, 'encoder_layers': 1})


@pytest.mark.slow
def test_outputs_are_as_documented():
  model, params = case('masks')
  logits, aux = run(
    model, params, images(), padding(), capture=('blocks', 'attention')
  )
  h, w = model.grid(SIZE)
  shapes = {
    'logits': (3, 3, 5, 7),
    'boxes': (3, 3, 5, 4),
    'positions': (3, h, w, 64),
    'tokens': (3, h * w, 64),
    'pre_logits': (3, 5, 64),
    'blocks': (2, 3, h * w, 64),
    'attention': (2, 3, 8, h * w, h * w),
    'mask_logits': (3, 5, 12, 20),
  }
  assert {key: x.shape for key, x in aux.items()} == shapes
  np.testing.assert_array_equal(logits, aux['logits'][-1])
  head = params['class_embed']
  want = np.asarray(aux['pre_logits']) @ head['kernel'] + head['bias']
  np.testing.assert_allclose(logits, want, atol=TOLERANCE)
  assert (h, w) == (2, 3)
  np.testing.assert_allclose(aux['attention'].sum(-1), 1, rtol=1e-5)
  outside = np.asarray(
    mask_head.nearest(padding(), (h, w)).reshape(3, 1, 1, h * w)
  )
  assert not (aux['attention'] * outside[None]).any()
  body, plain = run(
    model.body(),
    {k: x for k, x in params.items() if k != 'class_embed'},
    images(),
  )
  assert body.shape == (3, 5, 64)
  np.testing.assert_array_equal(body, plain['pre_logits'])


@pytest.mark.slow
def test_boxes_and_classes_do_not_see_padding():
  """Pixels of it apart, which the convolutions at its border do see."""
  model, params = case('plain')
  maps = [np.random.default_rng(0).standard_normal((3, 12, 20, 64))]
  maps = [np.float32(x) for x in maps]
  outside = np.asarray(mask_head.nearest(padding(), (12, 20)))
  changed = [np.where(outside[..., None], 9, maps[0]).astype(np.float32)]
  want, got, other = (
    run(model, params, x, pad)[1]
    for x, pad in ((maps, outside), (changed, outside), (changed, None))
  )
  for key in ('logits', 'boxes'):
    np.testing.assert_allclose(got[key], want[key], atol=TOLERANCE)
    assert np.abs(other[key] - want[key]).max() > 1e-3


def loss(model, params, x, pad, **kwargs):
  logits, aux = model.apply({'params': params}, x, pad, **kwargs)
  outputs = [logits, aux['logits'], aux['boxes']]
  if model.masks:
    outputs.append(aux['mask_logits'])
  return sum(jnp.sum(jnp.sin(x)) for x in outputs)


def gradients(model, params, pad, **kwargs):
  return jax.jit(jax.grad(functools.partial(loss, model, **kwargs)))(
    params, images(), pad
  )


@pytest.mark.slow
def test_gradients_are_finite_where_an_image_is_padding_alone():
  model = build(MASKS, encoder_layers=1, decoder_layers=2)
  params = random_params(model)
  pad = padding()
  pad[2] = True
  grads = gradients(
    model, params, pad, train=True, rngs={'dropout': jax.random.key(0)}
  )
  for path, x in traverse_util.flatten_dict(grads, sep='/').items():
    assert np.isfinite(x).all(), path
    if '/bn' in path:
      assert not np.any(x), path
    # The first self-attention is among zeros, whose values are all alike.
    elif 'decoder_layer0/self_attn' not in path:
      assert np.any(x), path


@pytest.mark.slow
def test_scan_and_remat_change_no_number():
  model = build(decoder_layers=2, backbone_layers=(1, 1))
  params = random_params(model)
  key = {'dropout': jax.random.key(2)}
  want = gradients(model, params, padding(), train=True, rngs=key)
  looped = model.clone(scan=True, remat='cheap')
  stacked = model.stack_layers(params)
  got = gradients(looped, stacked, padding(), train=True, rngs=key)
  for path, x in traverse_util.flatten_dict(want, sep='/').items():
    y = traverse_util.flatten_dict(model.unstack_layers(got), sep='/')[path]
    # Keys' biases have gradients of rounding alone.
    atol = 1e-4 * max(np.abs(x).max(), 0.1)
    np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=path)


@pytest.mark.slow
def test_eight_devices_equal_one():
  model, params = case('plain')
  x, pad = images(4), np.concatenate([padding(), padding()[:1]])
  want, _ = run(model, params, x, pad)
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'tensor': 2})
  placed = jax.device_put(
    params, sharding.tree_shardings(params, mesh, model.partitions)
  )
  batch = sharding.global_batch({'images': x, 'padding': pad}, mesh)
  got, _ = run(model, placed, batch['images'], batch['padding'])
  np.testing.assert_allclose(got, want, atol=TOLERANCE)
  hidden = placed['encoder_layer0']['linear1']['kernel'].sharding.spec
  assert tuple(hidden) == (('fsdp', 'data'), 'tensor')


def test_outputs_of_a_model_in_bfloat16_are_float32():
  for name in ('plain', 'masks'):
    model, params = case(name)
    half = model.clone(dtype=jnp.bfloat16)
    (_, aux), modules = jax.eval_shape(
      functools.partial(half.apply, capture_intermediates=True),
      {'params': params},
      images(),
    )
    assert aux['tokens'].dtype == jnp.bfloat16
    assert aux['positions'].shape == (3, *model.grid(SIZE), 64)
    results = traverse_util.flatten_dict(modules['intermediates'])
    for (*path, _), result in results.items():
      # Classes, boxes and masks, and the weights that masks are made of.
      wide = 'class_embed', 'bbox_embed', 'bbox_attention', 'mask_head'
      is_wide = not path or (path[0] in wide[:2] or path[-1] in wide[2:])
      first = jax.tree.leaves(result)[0]
      assert first.dtype == ('float32' if is_wide else 'bfloat16'), path
  assert aux['mask_logits'].dtype == jnp.float32


# Those that the original trains, which are no batch norms and no convolutions
# of root and first stage: 41.3M in its table. R101 has 17 units more in the
# third.
TRAINED = {
  'detr_r50_dc5': 41_302_368,
  'detr_r101': 41_302_368 + 17 * 256 * (2 * 1024 + 9 * 256),
}
# Of the original's table, a product and a sum counted once; over the first 100
# images of COCO's validation set.
GFLOPS = {'detr_r50_dc5': 187, 'detr_r101': 152}


@pytest.mark.slow
@pytest.mark.parametrize('variant', TRAINED)
def test_parameters_and_gflops_are_the_published_ones(variant):
  size = (800, 1066)
  model = variants.build(
    num_classes=91, image_size=size, **variants.fields(variant)
  )
  shapes = traverse_util.flatten_dict(flops.param_shapes(model, size), sep='/')
  trained = sum(
    np.prod(x.shape)
    for name, x in shapes.items()
    if '/bn' not in name
    and not name.startswith(('backbone/conv_root', 'backbone/block1'))
  )
  assert trained == TRAINED[variant]
  got = flops.forward_flops(model, size) / 2e9
  assert got == pytest.approx(GFLOPS[variant], rel=0.1)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'width': 60}, 'model.width 60 is not a multiple of model.heads'),
    (
      {'masks': True, 'backbone_layers': (1, 1, 1)},
      'has 3 stages. Use at least 1, and at least 4 with model.masks',
    ),
    ({'backbone_layers': ()}, 'model.backbone_layers has 0 stages'),
    (
      {'masks': True, 'backbone_layers': (1, 1, 1, 1), 'width': 72},
      'With model.width 72 and model.heads 8',
    ),
  ],
)
def test_what_cannot_work_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build(**fields)


def plain_backbone(layers, dilated):
  model = detr.DETR(
    num_classes=3,
    backbone='plain',
    backbone_width=32,
    backbone_layers=layers,
    dilation=dilated,
  )
  return backbone.PlainBackbone(fields.frozen(model))


@pytest.mark.parametrize('dilated', [False, True])
def test_plain_stages_halve_sides_and_double_widths(dilated):
  module = plain_backbone((2, 3), dilated)
  x = images(1, (8, 12))
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda s: np.float32(0.1 * rng.standard_normal(s.shape)), shapes
  )
  maps = module.apply({'params': params}, x)
  last = (1, 4, 6, 64) if dilated else (1, 2, 3, 64)
  assert [m.shape for m in maps] == [(1, 4, 6, 32), last]
  jaxpr = jax.make_jaxpr(lambda p: module.apply({'params': p}, x))(params)
  convolutions = [
    (eqn.params['window_strides'][0], eqn.params['rhs_dilation'][0])
    for eqn in jaxpr.jaxpr.eqns
    if eqn.primitive.name == 'conv_general_dilated'
  ]
  # Dilated ones see as far as behind the stride that there is not.
  second = [(1, 1), (1, 2), (1, 2)] if dilated else [(2, 1), (1, 1), (1, 1)]
  assert convolutions == [(2, 1), (1, 1), *second]
  # All but the first of a stage add to what they are given.
  for name in ('gn1_2', 'gn2_2', 'gn2_3'):
    params[name] = jax.tree.map(np.zeros_like, params[name])
  passed = module.apply({'params': params}, x)
  params['gn2_1'] = {'scale': np.zeros(64, 'f'), 'bias': np.ones(64, 'f')}
  np.testing.assert_array_equal(module.apply({'params': params}, x)[1], 1)
  assert (passed[0] >= 0).all() and (passed[1] > 0).any()


def test_a_plain_stage_is_normalised_by_channels():
  """Of 32 channels each is a group; small ones tell epsilon."""
  module = plain_backbone((1,), False)
  x = 1e-3 * images(2, (8, 12))
  params = jax.jit(module.init)(jax.random.key(0), x)['params']
  kernel = params['conv1_1']['kernel']
  # He et al.: twice the variance, as half is lost to a ReLU.
  assert np.std(kernel) == pytest.approx((2 / 27) ** 0.5, rel=0.1)
  y = nn.Conv(32, (3, 3), 2, use_bias=False).apply(
    {'params': {'kernel': kernel}}, x
  )
  y = y - y.mean((1, 2), keepdims=True)
  y = y / np.sqrt((y**2).mean((1, 2), keepdims=True) + 1e-5)
  (got,) = module.apply({'params': params}, x)
  np.testing.assert_allclose(got, np.maximum(y, 0), atol=1e-4)


def test_every_branch_of_a_layer_drops_out_by_a_key_of_its_own(monkeypatch):
  """Weights, branches and the MLP's inside; each once. Keys are names here."""
  calls = []

  def split(key, n):
    return [f'{key}/{i}' for i in range(n)]

  monkeypatch.setattr(detr_layers, '_split', split)

  def note(x, rate, key):
    calls.append((x.shape, rate, key))
    return x

  monkeypatch.setattr(detr_layers, 'dropout', note)
  monkeypatch.setattr(layers, 'dropout', note)
  model = detr.DETR(num_classes=3, heads=2, mlp_dim=24, dropout=0.25)
  x, queries = jnp.ones((1, 6, 8)), jnp.ones((1, 5, 8))
  branch, weights = (1, 6, 8), (1, 2, 6, 6)
  of_queries = (1, 5, 8)
  for kind, args, want in (
    (
      detr_layers.EncoderLayer,
      (x, 'key', x, None),
      [weights, branch, (1, 6, 24), branch],
    ),
    (
      detr_layers.DecoderLayer,
      (queries, 'key', queries, x, x, None),
      [
        *((1, 2, 5, 5), of_queries),
        *((1, 2, 5, 6), of_queries),
        *((1, 5, 24), of_queries),
      ],
    ),
  ):
    layer = kind(fields.frozen(model))
    calls.clear()
    jax.eval_shape(
      lambda layer=layer, args=args: layer.init(jax.random.key(0), *args)
    )
    assert [shape for shape, _, _ in calls] == want
    assert {rate for _, rate, _ in calls} == {0.25}
    keys = [key for _, _, key in calls]
    assert len(set(keys)) == len(keys)


def test_every_layer_of_encoder_and_decoder_drops_out_by_its_own_key(
  monkeypatch,
):
  model, params = case('plain')
  found = []

  def note(block, loop, x_BLD, inputs, *args, **kwargs):
    found.extend(inputs)
    return layers.repeated(block, loop, x_BLD, inputs, *args, **kwargs)

  monkeypatch.setattr(detr, 'repeated', note)

  @jax.jit
  def keys(params):
    found.clear()
    rngs = {'dropout': jax.random.key(0)}
    model.apply({'params': params}, images(1), train=True, rngs=rngs)
    return [jax.random.key_data(x) for x in found]

  encoders, decoders = keys(params)
  assert (len(encoders), len(decoders)) == (2, 3)
  assert len({*map(tuple, np.concatenate([encoders, decoders]).tolist())}) == 5


@pytest.mark.slow
def test_initial_scales_are_the_originals():
  """Queries N(0, 1), Xavier's in layers; features evenly, as PyTorch does."""
  model = build(num_queries=100, encoder_layers=1, decoder_layers=1)
  maps = [np.zeros((1, 2, 3, 256), np.float32)]
  params = jax.jit(lambda key: model.init(key, maps)['params'])(
    jax.random.key(0)
  )
  assert np.std(params['query_embed']) == pytest.approx(1, rel=0.05)
  flat = traverse_util.flatten_dict(params, sep='/')
  for name, bound in {
    'input_proj': 1 / 16,
    'encoder_layer0/linear1': (6 / (64 + 48)) ** 0.5,
    'encoder_layer0/linear2': (6 / (64 + 48)) ** 0.5,
    'decoder_layer0/multihead_attn/query': (6 / 128) ** 0.5,
  }.items():
    kernel = flat[f'{name}/kernel']
    assert np.abs(kernel).max() <= bound
    assert np.std(kernel) == pytest.approx(bound / 3**0.5, rel=0.05), name


def test_linear_layers_begin_as_pytorchs():
  """Kernel and bias evenly from -1 / sqrt(inputs) to that."""

  class One(nn.Module):
    @nn.compact
    def __call__(self, x):
      return detr.linear(x, 400, 'made')

  params = One().init(jax.random.key(0), jnp.ones((1, 64)))['params']['made']
  for x in params.values():
    assert np.abs(x).max() <= 1 / 8
    assert np.std(x) == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
    assert abs(np.mean(x)) < 0.02


def test_a_joined_convolution_is_that_of_features_beside_maps():
  rng = np.random.default_rng(0)
  x_BhwD = np.float32(rng.standard_normal((2, 4, 5, 6)))
  seen_BQhwN = np.float32(rng.standard_normal((2, 3, 4, 5, 2)))
  params = {
    'kernel': np.float32(rng.standard_normal((3, 3, 8, 8))),
    'bias': np.float32(rng.standard_normal(8)),
  }
  got = mask_head.JoinedConv().apply({'params': params}, x_BhwD, seen_BQhwN)
  for query in range(3):
    joined = np.concatenate([x_BhwD, seen_BQhwN[:, query]], -1)
    want = nn.Conv(8, (3, 3)).apply({'params': params}, joined)
    np.testing.assert_allclose(got[:, query], want, rtol=1e-4, atol=1e-4)


def test_a_query_looks_once_over_all_heads():
  rng = np.random.default_rng(0)
  queries, tokens = (np.float32(rng.standard_normal((2, n, 6))) for n in (3, 4))
  mask = np.array([[[True] * 4], [[True, True, False, False]]])
  module = mask_head.AttentionMap(2)
  shapes = jax.eval_shape(module.init, jax.random.key(0), queries, tokens, mask)
  params = jax.tree.map(
    lambda s: np.float32(rng.standard_normal(s.shape)), shapes['params']
  )
  got = module.apply({'params': params}, queries, tokens, mask)
  q, k = (
    np.einsum('BLD,DNK->BLNK', x, params[n]['kernel']) + params[n]['bias']
    for x, n in ((queries, 'q_linear'), (tokens, 'k_linear'))
  )
  odds = np.exp(np.einsum('BQNK,BLNK->BQLN', q, k) / np.sqrt(3))
  odds *= mask[:, 0][:, None, :, None]
  want = odds / odds.sum((2, 3), keepdims=True)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
  plain = module.apply({'params': params}, queries, tokens, None)
  np.testing.assert_allclose(plain[0], want[0], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(plain.sum((2, 3)), 1, rtol=1e-5)


def test_nearest_takes_the_pixel_at_or_before():
  x = np.arange(35).reshape(1, 5, 7)
  for size in ((10, 14), (3, 4)):
    got = mask_head.nearest(jnp.asarray(x), size)
    rows, columns = (
      np.arange(n) * o // n for n, o in zip(size, (5, 7), strict=True)
    )
    np.testing.assert_array_equal(got, x[:, rows][:, :, columns])
  moved = mask_head.nearest(
    jnp.asarray(x)[..., None].swapaxes(0, 1), (14, 2), 2
  )
  assert moved.shape == (5, 1, 14, 2)


@pytest.mark.parametrize('dilated', [False, True])
def test_the_only_stage_of_a_resnet_has_stride_4(dilated):
  """Dilation replaces a stride, which a first stage does not have."""
  assert resnet_of((1,), dilated).grid((64, 100)) == (16, 25)
