"""Properties of every architecture."""

import functools
import json

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from tests.models import kinks
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.saving import Checkpoints
from vit_jax.models import flops, variants
from vit_jax.projects.igpt import model as igpt
from vit_jax.training import sharding

CLASSES = 5
# The mesh below splits a batch into four parts.
BATCH = 4
MESH = {'data': 2, 'fsdp': 2, 'tensor': 2}

# Sums of a few thousand float32 terms in another order: errors seen are below
# 1e-5 of an array's largest entry.
TOLERANCE = 1e-4

# Wider than high, because squares would hide swapped axes.
SIZE = (32, 48)
# Widths, heads and classes all differ, so that no mistaken shape fits.
ENCODER = {'patch_size': 8, 'width': 32, 'depth': 2, 'mlp_dim': 48, 'heads': 4}
VITS = ('vit', 'deit', 'rotation_vit', 'video_vit')
RESNET = {'name': 'resnet', 'layers': (1, 3), 'width': 32}
IGPT = {
  'name': 'igpt',
  'width': 32,
  'depth': 2,
  'mlp_dim': 48,
  'heads': 4,
  'palette': igpt.even_palette(2),
}
# Each part of a model is in one of these.
ARCHITECTURES = {
  'vit': {},
  'vit-representation': {'representation_size': 20},
  'vit-relative': {'posemb': 'relative'},
  'vit-learned2d-every_layer': {
    'posemb': 'learned2d',
    'posemb_at': 'every_layer',
  },
  'vit-sincos2d-shared': {'posemb': 'sincos2d', 'posemb_at': 'shared'},
  'deit': {'name': 'deit'},
  'rotation': {'name': 'rotation_vit'},
  'video': {'name': 'video_vit'},
  'vit5': {
    'norm': 'rms',
    'layer_scale': 0.1,
    'qk_norm': True,
    'attention_norm': True,
    'mlp_norm': True,
    'qkv_bias': False,
    'registers': 4,
    'rope': 1e4,
    'rope_side': 4,
    'rope_registers': 100.0,
  },
  'dinov3': {
    'posemb': 'none',
    'layer_scale': 0.1,
    'qkv_bias': False,
    'registers': 3,
    'rope': 100.0,
    'swiglu': True,
  },
  'clip-gap': {
    'gelu': 'quick',
    'norm_pooled': True,
    'pool': 'gap',
    'pre_norm': True,
    'registers': 1,
  },
  'axial-map-relative': {'axial': True, 'pool': 'map', 'posemb': 'relative'},
  'hybrid': {'stem_width': 32, 'stem_layers': (1, 2), 'patch_size': 1},
  'resnet-2': RESNET | {'version': 2},
  'axial-resnet': RESNET | {'axial': True, 'version': 1, 'width': 64},
  'igpt': IGPT,
  'igpt-bert': IGPT | {'causal': False, 'bias': True},
}


# Most parts of a model are in one of these; the others are slow tests.
FAST = (
  *('vit', 'vit-representation', 'vit-learned2d-every_layer', 'deit', 'vit5'),
  *('clip-gap', 'axial-map-relative', 'hybrid', 'igpt'),
)

# Shapes of `stem`, `tokens` and `pre_logits` without the batch. Most have 4 x 6
# patches of 8 pixels and a class token. A root leaves a quarter of a side.
SHAPES = {name: ((4, 6, 32), (25, 32), (32,)) for name in ARCHITECTURES} | {
  'deit': ((4, 6, 32), (26, 32), (32,)),
  'vit5': ((4, 6, 32), (29, 32), (32,)),
  'dinov3': ((4, 6, 32), (28, 32), (32,)),
  'clip-gap': ((4, 6, 32), (25, 32), (32,)),
  'vit-representation': ((4, 6, 32), (25, 32), (20,)),
  'axial-map-relative': ((4, 6, 32), (24, 32), (32,)),
  'resnet-2': ((8, 12, 32), (24, 256), (256,)),
  'axial-resnet': ((8, 12, 64), (24, 512), (512,)),
  # A token for every pixel.
  'igpt': ((8, 12, 32), (96, 32), (32,)),
  'igpt-bert': ((8, 12, 32), (96, 32), (32,)),
}

WITH_KINKS = ('hybrid', 'resnet-2', 'axial-resnet')


class Architecture:
  """A small model with random parameters and images."""

  def __init__(self, name):
    fields = ARCHITECTURES[name]
    if fields.get('name', 'vit') in VITS:
      fields = ENCODER | fields
    self.name = name
    self.fields = fields
    self.size = (8, 12) if fields.get('name') == 'igpt' else SIZE
    self.model = variants.build(
      num_classes=CLASSES, image_size=self.size, **fields
    )
    rng = np.random.default_rng(0)
    self.params = random_params(self.model, self.size, rng)
    self.images = rng.uniform(-1, 1, (BATCH, *self.size, 3)).astype(np.float32)
    if name in WITH_KINKS:
      self.params, self.images = kinks.avoid(
        self.model, self.params, self.images, rng
      )
    # Stands for the gradient of a loss with respect to the logits.
    self.cotangent = rng.standard_normal((BATCH, CLASSES)).astype(np.float32)

  @functools.cached_property
  def compute(self):
    return self.compiled()

  @functools.cached_property
  def plain(self):
    """Logits, aux and gradients."""
    return self.compute(self.params, self.images)

  def compiled(self, **fields):
    model = self.model.clone(**fields)

    def loss(params, images):
      logits, aux = model.apply({'params': params}, images)
      total = jnp.sum(logits * self.cotangent)
      for name in ('logits_rotation', 'next_shot'):
        total += jnp.mean(jnp.square(aux.get(name, 0.0)))
      return total, (logits, aux)

    def compute(params, images):
      grads, (logits, aux) = jax.grad(loss, has_aux=True)(params, images)
      return logits, aux, grads

    return jax.jit(compute)


@functools.cache
def architecture(name):
  return Architecture(name)


@pytest.fixture(
  params=[
    pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))
    for name in ARCHITECTURES
  ]
)
def case(request):
  return architecture(request.param)


def random_params(model, size, rng):
  """Returns random parameters.

  Initial heads, class tokens, biases and the last scales of ResNets' units are
  zero. They would hide mistakes in the arrays that they multiply.
  """
  shapes = jax.eval_shape(
    lambda key: variants.init(model, key, size), jax.random.key(0)
  )

  def draw(path, shape):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    x = rng.standard_normal(shape.shape)
    if name.endswith('scale'):
      x = 1 + 0.3 * x
    elif name.endswith('bias'):
      x = 0.3 * x
    elif name.endswith('kernel'):
      inputs = shape.shape[:1] if 'query' in name else shape.shape[:-1]
      x = x * np.prod(inputs) ** -0.5
    return np.float32(0.5 * x if 'embedding' in path[-1].key else x)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def leaves(tree):
  return flax.traverse_util.flatten_dict(tree, sep='/')


def assert_close(got, want):
  """Compares results of `Architecture.compute`, or dictionaries."""
  got_leaves, want_leaves = (
    leaves(
      tree
      if isinstance(tree, dict)
      else dict(zip(('logits', 'aux', 'grads'), tree, strict=True))
    )
    for tree in (got, want)
  )
  assert got_leaves.keys() == want_leaves.keys()
  for name, x in want_leaves.items():
    # Some gradients are zero except for rounding.
    scale = max(np.abs(x).max(), 1e-2)
    np.testing.assert_allclose(
      got_leaves[name], x, rtol=0, atol=TOLERANCE * scale, err_msg=name
    )


@pytest.mark.fast('vit')
def test_outputs_are_as_documented(case):
  logits, aux, _ = case.plain
  assert logits.shape == (BATCH, CLASSES)
  assert logits.dtype == jnp.float32
  assert np.isfinite(logits).all()
  names = ('stem', 'tokens', 'pre_logits')
  more = {
    'deit': ('logits_cls', 'logits_dist'),
    'rotation': ('logits_rotation',),
    'video': ('next_shot',),
  }
  assert aux.keys() == {*names, *more.get(case.name, ())}
  for name, shape in zip(names, SHAPES[case.name], strict=True):
    assert aux[name].shape == (BATCH, *shape), name
    assert np.isfinite(aux[name]).all(), name


@pytest.mark.fast(
  'vit',
  'vit-representation',
  'vit-learned2d-every_layer',
  'deit',
  'vit5',
  'clip-gap',
)
def test_its_properties_are_those_of_its_outputs(case):
  """Compares grid, tokens, blocks and body with the shapes of outputs."""
  model, size = case.model, case.size

  def run(params, images):
    _, aux = model.apply({'params': params}, images, capture=('blocks',))
    return aux, [model.pool_block(x) for x in aux['blocks']]

  shapes, vectors = jax.eval_shape(run, case.params, case.images)
  L = model.num_tokens(size)
  h, w = model.grid(size)
  assert shapes['tokens'].shape[1] == L == len(model.extra_tokens) + h * w
  if model.attention:
    assert shapes['stem'].shape[1:3] == (h, w)
  assert len(vectors) == model.num_blocks
  assert vectors[-1].shape == (BATCH, shapes['tokens'].shape[-1])
  body = {k: v for k, v in case.params.items() if k not in model.task_params}
  (outputs, aux), wanted = jax.eval_shape(
    model.body().init_with_output, jax.random.key(0), case.images
  )
  assert outputs == aux['pre_logits']
  assert jax.tree.map(np.shape, body) == jax.tree.map(
    np.shape, wanted['params']
  )


def test_its_fields_make_it_again(case):
  model = case.model.clone(
    dtype=jnp.dtype('bfloat16'), scan=True, remat='cheap'
  )
  fields = json.loads(json.dumps(variants.fields_of(model)))
  assert variants.build(image_size=case.size, **fields) == model


@pytest.mark.fast('vit', 'vit-representation')
def test_every_parameter_gets_a_finite_gradient(case):
  _, _, grads = case.plain
  assert leaves(grads).keys() == leaves(case.params).keys()
  for name, grad in leaves(grads).items():
    assert np.isfinite(grad).all(), name
    if name.endswith('key/bias'):
      # It shifts all logits of a query equally, so the softmax stays the same.
      assert np.abs(grad).max() < 1e-6, name
    elif name == 'prediction/kernel':
      assert not grad.any(), name  # predicts pixels, not classes
    elif case.name == 'vit-relative' and name.endswith(
      'encoderblock_1/MultiHeadDotProductAttention_1/relative/relative_embedding'
    ):
      # The head reads only the class token, which has no offset.
      assert not grad.any(), name
    else:
      # A few channels never get past a ReLU.
      assert (np.abs(grad) > 1e-6).mean() > 0.9, name


# One program shows that none of these changes a number.
@pytest.mark.slow
def test_scan_remat_and_eight_devices_change_no_number(case):
  params = case.model.stack_layers(case.params)
  params, images = split(params, case.images, case.model.partitions)
  compute = case.compiled(scan=True, remat='nothing_saveable')
  logits, aux, grads = compute(params, images)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, grads)
  assert_close((logits, aux, case.model.unstack_layers(grads)), case.plain)


@pytest.mark.slow
@pytest.mark.parametrize('case', ['vit'], indirect=True)
def test_rematerialisation_outside_of_a_loop_changes_no_number(case):
  compute = case.compiled(remat='nothing_saveable')
  assert_close(compute(case.params, case.images), case.plain)


def split(params, images, partitions):
  """Shards images and most parameters over eight devices."""
  mesh = sharding.make_mesh(MESH)
  params = jax.device_put(
    params, sharding.tree_shardings(params, mesh, partitions)
  )
  on_one_device = sum(
    x.addressable_shards[0].data.size for x in jax.tree.leaves(params)
  )
  total = sum(x.size for x in jax.tree.leaves(params))
  assert on_one_device < 0.7 * total
  return params, sharding.global_batch({'images': images}, mesh)['images']


def recomputed(jaxpr):
  """Yields `prevent_cse` of each rematerialised layer."""
  for eqn in jaxpr.eqns:
    if 'prevent_cse' in eqn.params:
      yield eqn.params['prevent_cse']
    for inner in flops._subjaxprs(eqn.params):
      yield from recomputed(inner)


@pytest.mark.fast('vit-2-True', 'vit-2-False')
@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize(
  ('case', 'layers'),
  # The layers of a ResNet are units. The first of a stage is not in the loop.
  [('vit', 2), ('resnet-2', 4)],
  indirect=['case'],
)
def test_every_layer_is_computed_again(case, layers, scan):
  model = case.model.clone(scan=scan, remat='cheap')
  jaxpr = jax.make_jaxpr(lambda p, x: model.apply({'params': p}, x)[0])(
    flops.param_shapes(model, case.size), case.images
  )
  found = [*recomputed(jaxpr.jaxpr)]
  if not scan:
    assert found == [True] * layers
  else:  # a loop needs no barrier against CSE
    firsts = {'resnet-2': 2}.get(case.name, 0)
    assert sorted(found) == [False] + [True] * firsts


def test_kernels_are_matrices_outside_of_a_loop():
  """Biases keep the shape of heads; see `tpu_layout`."""
  case = architecture('vit')
  model = case.model.clone(scan=True)
  jaxpr = jax.make_jaxpr(lambda p, x: model.apply({'params': p}, x)[0])(
    flops.param_shapes(model, case.size), case.images
  )
  (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'scan')
  shapes = [x.aval.shape for x in loop.invars]
  assert shapes.count((2, 32, 32)) == 4 and shapes.count((2, 4, 8)) == 3


@pytest.mark.fast('vit')
@pytest.mark.parametrize('case', ['vit', 'hybrid'], indirect=True)
def test_stacking_is_undone_and_gives_what_a_scan_asks_for(case):
  stacked = case.model.stack_layers(case.params)
  back = case.model.unstack_layers(stacked)
  jax.tree.map(np.testing.assert_array_equal, back, case.params)
  wanted = jax.eval_shape(
    case.model.clone(scan=True).init, jax.random.key(0), case.images
  )['params']
  assert jax.tree.map(np.shape, stacked) == jax.tree.map(np.shape, wanted)


@pytest.mark.slow
@pytest.mark.parametrize('case', ['vit', 'resnet-2'], indirect=True)
def test_initial_parameters_do_not_depend_on_scan(case):
  models = (case.model, case.model.clone(scan=True))
  loop, scan = jax.jit(
    lambda key: [variants.init(model, key, case.size) for model in models],
  )(jax.random.key(7))
  jax.tree.map(
    np.testing.assert_array_equal, case.model.unstack_layers(scan), loop
  )
  # Layers start with different values.
  for name, x in leaves(case.model.stack_layers(loop)).items():
    if 'encoderblock/' in name and name.endswith('query/kernel'):
      assert np.abs(x[0] - x[1]).max() > 0.01


@pytest.mark.fast('vit5', 'clip-gap')
def test_bfloat16_is_close_to_float32(case):
  want, _, _ = case.plain
  model = case.model.clone(dtype=jnp.bfloat16)
  (got, aux), modules = jax.jit(
    lambda p, x: model.apply({'params': p}, x, capture_intermediates=True)
  )(case.params, case.images)
  assert got.dtype == jnp.float32
  for name, x in aux.items():
    assert x.dtype == ('float32' if 'logits' in name[:6] else 'bfloat16')
  results = flax.traverse_util.flatten_dict(modules['intermediates'])
  for (*path, _), result in results.items():
    # Logits, outputs of heads, and positions are float32.
    name = path[-1] if path else 'head'
    is_wide = 'head' in name or name in ('posembed_input', 'relative')
    first = jax.tree.leaves(result)[0]
    assert first.dtype == ('float32' if is_wide else 'bfloat16'), path
  # Rounding to eight bits has an error of 0.2 %, and some tens of errors add up
  # like a random walk. Errors seen are up to 1.3 %.
  error = np.abs(got - want).max() / np.abs(want).max()
  assert 1e-4 < error < 0.03


# Other position embeddings and axial layers know rows from columns.
@pytest.mark.fast('vit', 'clip-gap')
@pytest.mark.parametrize(
  'case', ['vit', 'clip-gap', 'hybrid', 'resnet-2'], indirect=True
)
def test_a_transposed_model_sees_in_the_transposed_image_the_same(case):
  def transpose(path, x):
    if x.ndim == 4 and path[-1].key == 'kernel':
      return x.swapaxes(0, 1)
    if path[-1].key == 'pos_embedding':
      X, L, D = x.shape
      grid = x[:, L - 24 :].reshape(X, 4, 6, D).swapaxes(1, 2)
      return np.concatenate([x[:, : L - 24], grid.reshape(X, 24, D)], axis=1)
    return x

  run = jax.jit(lambda p, x: case.model.apply({'params': p}, x)[0])
  images = case.images.swapaxes(1, 2)
  params = jax.tree_util.tree_map_with_path(transpose, case.params)
  want, _, _ = case.plain
  assert_close({'logits': run(params, images)}, {'logits': want})
  assert np.abs(run(case.params, images) - want).max() > 0.01


def test_images_of_a_batch_do_not_mix(case):
  logits, aux, _ = case.plain
  for i in (0, BATCH - 1):
    copies = np.repeat(case.images[i : i + 1], BATCH, axis=0)
    alone, alone_aux, _ = case.compute(case.params, copies)
    got = alone_aux | {'logits': alone}
    want = {k: x[i : i + 1] for k, x in (aux | {'logits': logits}).items()}
    assert_close(got, {k: np.repeat(x, BATCH, 0) for k, x in want.items()})
  # Different images have different logits.
  assert np.abs(logits[0] - logits[-1]).max() > 0.01


def config_of(case):
  config = digits.get_config()
  if case.model.kind == 'resnet':
    config_lib.choose_model(config, 'r50x1')
  if case.model.kind == 'igpt':
    config_lib.choose_model(config, 'igpt_s')
  config.model.update(case.fields)
  return config


@pytest.mark.fast('vit5')
@pytest.mark.parametrize('case', ['vit5', 'resnet-2', 'igpt'], indirect=True)
def test_saved_and_opened_scanned_layers_are_the_same(case, tmp_path):
  config, params = config_of(case), case.model.stack_layers(case.params)
  config.model.scan = True
  meta = {
    'config': json.loads(config.to_json()),
    'class_names': [str(i) for i in range(CLASSES)],
    'image_size': list(case.size),
  }
  store = Checkpoints(str(tmp_path), keep_last=1, best_metric='none')
  store.save(1, {'params': jax.device_put(params)}, meta, {})
  store.close()
  opened = opening.open_checkpoint(str(tmp_path))
  assert opened.model == case.model.clone(scan=True)
  assert opened.image_size == case.size
  jax.tree.map(np.testing.assert_array_equal, opened.params, params)
