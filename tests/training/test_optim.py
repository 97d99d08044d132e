"""Schedules and optimizers against closed forms in float64 NumPy."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import config as config_lib
from vit_jax.models import variants
from vit_jax.training import optim

# float32 keeps seven digits; a few steps lose one or two.
RTOL = 1e-5

PEAK, WARMUP, TOTAL = 3e-3, 10, 50


MODEL = variants.build(
  num_classes=5,
  image_size=(8, 8),
  patch_size=4,
  width=8,
  depth=1,
  mlp_dim=8,
  heads=1,
)


def make(lr, model=MODEL, **fields):
  """Returns the optimizer of a config with these fields, without decay."""
  o = config_lib.base().optimizer
  o.update({'weight_decay': 0.0, **fields})
  return optim.make(o, lr, model)


def lr_in_numpy(decay, t, warmup=WARMUP, total=TOTAL):
  """The definition: p = clip((t - w) / (T - w), 0, 1), warm-up (t + 1) / w."""
  p = min(max((t - warmup) / (total - warmup), 0), 1)
  factor = {
    'linear': 1 - p,
    'cosine': 0.5 * (1 + math.cos(math.pi * p)),
    'constant': 1,
  }[decay]
  return PEAK * (min(1, (t + 1) / warmup) if warmup else 1) * factor


@pytest.mark.parametrize(
  ('decay', 'warmup'),
  [('linear', WARMUP), ('cosine', 0), ('constant', WARMUP)],
)
def test_schedule_is_the_closed_form_at_every_step(decay, warmup):
  lr = optim.schedule(PEAK, decay, warmup, TOTAL)
  steps = np.arange(TOTAL + 5)
  want = [lr_in_numpy(decay, t, warmup) for t in steps]
  got = np.array([lr(t) for t in steps])
  # Beyond the middle of a cosine 1 + cos loses digits.
  np.testing.assert_allclose(got, want, rtol=RTOL, atol=PEAK * 1e-6)
  traced = jax.jit(jax.vmap(lr))(steps)
  np.testing.assert_allclose(traced, want, rtol=RTOL, atol=PEAK * 1e-6)


def test_staircase_divides_by_ten_at_every_milestone():
  lr = optim.schedule(2.0, 'staircase', 4, 40, (10, 23))
  got = [float(lr(t)) for t in (1, 3, 9, 10, 22, 23, 39)]
  np.testing.assert_allclose(
    got, [1.0, 2.0, 2.0, 0.2, 0.2, 0.02, 0.02], rtol=RTOL
  )


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (('staircase', 1, 10), 'optimizer.milestones has 0 entries'),
    (('linear', 1, 10, (5,)), 'other decays need an empty list'),
    (('linear', 10, 10), 'warm-up of 10 steps does not fit a run of 10'),
  ],
)
def test_schedules_that_cannot_be_are_refused(args, message):
  with pytest.raises(ValueError, match=message):
    optim.schedule(1.0, *args)


def params():
  rng = np.random.default_rng(0)
  shapes = {
    'block': {
      'LayerNorm_0': {'scale': (4,), 'bias': (4,)},
      'Dense_0': {'kernel': (4, 3), 'bias': (3,)},
    },
    'cls': (1, 1, 4),
    'posembed_input': {'pos_embedding': (1, 5, 4)},
  }
  return jax.tree.map(
    lambda shape: rng.standard_normal(shape),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def gradients(n):
  rng = np.random.default_rng(1)
  return [
    jax.tree.map(lambda x: rng.standard_normal(x.shape), params())
    for _ in range(n)
  ]


def names(tree):
  return [
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]


def run(optimizer, grads):
  """Returns the parameters after every step, as flat lists."""
  p = jax.tree.map(jnp.float32, params())
  state = optimizer.init(p)
  history = []
  for g in grads:
    updates, state = optimizer.update(jax.tree.map(jnp.float32, g), state, p)
    p = jax.tree.map(jnp.add, p, updates)
    history.append(jax.tree.leaves(p))
  return history


def assert_history(got, want):
  for step, (xs, ys) in enumerate(zip(got, want, strict=True)):
    for name, x, y in zip(names(params()), xs, ys, strict=True):
      np.testing.assert_allclose(
        x, y, rtol=RTOL, atol=1e-6, err_msg=f'{name} at step {step}'
      )


def clipped(grads, norm):
  total = math.sqrt(sum((x**2).sum() for x in grads))
  return [x * min(1, norm / total) for x in grads]


def adam_in_numpy(grads, lr, b1, b2, weight_decay, clip=None, kept=np.float64):
  """Adam of 1412.6980 with the decoupled decay of 1711.05101, eq. by eq."""
  ps = jax.tree.leaves(params())
  is_kernel = [name.endswith('kernel') for name in names(params())]
  assert sum(is_kernel) == 1
  ms, vs = ([np.zeros_like(p) for p in ps] for _ in range(2))
  history = []
  for t, g in enumerate(grads):
    gs = jax.tree.leaves(g)
    gs = clipped(gs, clip) if clip else gs
    ms = [
      b1 * m.astype(kept).astype(np.float64) + (1 - b1) * g
      for m, g in zip(ms, gs, strict=True)
    ]
    vs = [b2 * v + (1 - b2) * g**2 for v, g in zip(vs, gs, strict=True)]
    ps = [
      p
      - lr(t)
      * (
        m / (1 - b1 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + 1e-8)
        + (weight_decay * p if kernel else 0)
      )
      for p, m, v, kernel in zip(ps, ms, vs, is_kernel, strict=True)
    ]
    history.append(ps)
  return history


@pytest.mark.parametrize(('weight_decay', 'clip'), [(0.0, 0.0), (0.3, 1.0)])
def test_adam_is_the_papers(weight_decay, clip):
  optimizer = make(
    name='adam',
    lr=optim.schedule(PEAK, 'linear', 3, 12),
    b1=0.8,
    b2=0.99,
    weight_decay=weight_decay,
    clip_norm=clip,
  )
  grads = gradients(12)
  want = adam_in_numpy(
    grads,
    lambda t: lr_in_numpy('linear', t, 3, 12),
    0.8,
    0.99,
    weight_decay,
    clip,
  )
  assert_history(run(optimizer, grads), want)


def test_sgd_with_momentum_is_the_recursion():
  """m = momentum m + g; p = p - lr m, with clipped gradients in m."""
  optimizer = make(
    name='sgd',
    lr=optim.schedule(PEAK, 'cosine', 2, 10),
    momentum=0.9,
    clip_norm=1.0,
  )
  grads = gradients(10)
  ps = jax.tree.leaves(params())
  ms = [np.zeros_like(p) for p in ps]
  want = []
  for t, g in enumerate(grads):
    gs = clipped(jax.tree.leaves(g), 1.0)
    ms = [0.9 * m + g for m, g in zip(ms, gs, strict=True)]
    ps = [
      p - lr_in_numpy('cosine', t, 2, 10) * m
      for p, m in zip(ps, ms, strict=True)
    ]
    want.append(ps)
  assert_history(run(optimizer, grads), want)


@pytest.mark.parametrize('name', ['adam', 'sgd'])
def test_momentum_is_kept_in_bfloat16(name):
  optimizer = make(
    name=name,
    lr=optim.schedule(0.1, 'constant', 0, 9),
    b1=0.9,
    b2=0.99,
    momentum_dtype='bfloat16',
  )
  grads = gradients(6)
  got = run(optimizer, grads)
  if name == 'adam':
    want = adam_in_numpy(
      grads, lambda t: 0.1, 0.9, 0.99, 0.0, kept=jnp.bfloat16
    )
  else:
    ps = jax.tree.leaves(params())
    ms = [np.zeros_like(p) for p in ps]
    want = []
    for g in map(jax.tree.leaves, grads):
      ms = [
        0.9 * m.astype(jnp.bfloat16).astype(np.float64) + g
        for m, g in zip(ms, g, strict=True)
      ]
      ps = [p - 0.1 * m for p, m in zip(ps, ms, strict=True)]
      want.append(ps)
  assert_history(got, want)
  kept = [x for x in jax.tree.leaves(optimizer.init(params())) if x.ndim]
  assert sum(x.dtype == jnp.bfloat16 for x in kept) == len(names(params()))


def test_only_kernels_decay_with_sgd():
  """With gradients of zero, decay is all that moves parameters."""
  # m = 0.9 m + 0.5 w; w = w - 0.1 m, three times from w = 1 and m = 0.
  factor = 0.731375
  zeros = [jax.tree.map(np.zeros_like, params())] * 3
  optimizer = make(
    name='sgd',
    lr=optim.schedule(0.1, 'constant', 0, 9),
    weight_decay=0.5,
  )
  final = run(optimizer, zeros)[-1]
  for key, got, start in zip(
    names(params()), final, jax.tree.leaves(params()), strict=True
  ):
    want = start * (factor if key.endswith('kernel') else 1)
    np.testing.assert_allclose(got, want, rtol=RTOL, err_msg=key)


LR = 0.1
FROZEN = ('^cls$', 'Dense_0/kernel')
FROZEN_NAMES = ('cls', 'block/Dense_0/kernel')


def constant(**fields):
  lr = optim.schedule(LR, 'constant', 0, 9)
  return make(lr=lr, **fields)


def test_frozen_parameters_stay_and_count_in_nothing():
  """Not in the norm; and the only kernel is frozen, so that none decays."""
  optimizer = constant(
    name='adam',
    b1=0.8,
    b2=0.99,
    frozen=FROZEN,
    weight_decay=0.3,
    clip_norm=1.0,
  )
  grads = gradients(5)
  got = run(optimizer, grads)
  # Without a gradient, Adam leaves a parameter as it is.
  for g in grads:
    g['cls'] *= 0
    g['block']['Dense_0']['kernel'] *= 0
  want = adam_in_numpy(grads, lambda t: LR, 0.8, 0.99, 0.0, clip=1.0)
  assert_history(got, want)
  for name, x, start in zip(
    names(params()), got[-1], jax.tree.leaves(params()), strict=True
  ):
    assert np.array_equal(x, np.float32(start)) == (name in FROZEN_NAMES), name


def test_frozen_parameters_have_no_state():
  state = constant(name='adam', frozen=FROZEN).init(params())
  kept = [path for path in names(state) if not path.endswith('count')]
  assert len(kept) == 2 * (len(names(params())) - 2)
  assert not any(path.endswith(('cls', 'Dense_0/kernel')) for path in kept)
  # The sharding rules go by the parameters' own paths at the end.
  assert sum(path.endswith('/posembed_input/pos_embedding') for path in kept)


def test_frozen_parameters_get_no_gradient_and_the_others_theirs():
  def loss(p, patterns):
    p = optim.stop_frozen(p, patterns)
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(p))

  p = jax.tree.map(jnp.float32, params())
  grads = jax.grad(loss)(p, FROZEN)
  for name, x, grad in zip(
    names(p), jax.tree.leaves(p), jax.tree.leaves(grads), strict=True
  ):
    factor = 0 if name in FROZEN_NAMES else 2
    np.testing.assert_array_equal(grad, factor * x)
  program = str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(p, ()))
  assert 'stop_gradient' not in program


def test_learning_rates_of_groups_are_multiplied():
  """The first match counts; decay, with Adam, goes along with the rate."""
  scales = (('^cls$', 0.0), ('kernel$', 0.5), ('(?i)dense_0/', 3.0))
  fields = {'name': 'adam', 'weight_decay': 0.3}
  grads = gradients(1)
  (plain,) = run(constant(**fields), grads)
  (got,) = run(constant(**fields, lr_scales=scales), grads)
  factors = {'cls': 0, 'block/Dense_0/kernel': 0.5, 'block/Dense_0/bias': 3}
  for path, x, y, start in zip(
    names(params()), got, plain, jax.tree.leaves(params()), strict=True
  ):
    want = start + factors.get(path, 1) * (y - start)
    np.testing.assert_allclose(x, want, rtol=RTOL, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'frozen': ('^cls$', 'Dense_7')},
      "'Dense_7' of .* matches no trainable parameter",
    ),
    ({'lr_scales': ('^scale', 2.0)}, 'give pairs of a pattern'),
    ({'lr_scales': (('bias', -2.0),)}, 'a factor of 0 or more'),
    # Nothing of it is left to learn at any rate.
    (
      {'frozen': ('cls',), 'lr_scales': (('cls', 2.0),)},
      "'cls' of .* no trainable",
    ),
    ({'frozen': ('(',)}, r"'\(' of .* is not a regular expression"),
  ],
)
def test_patterns_that_match_nothing_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(constant(name='adam', **fields).init, params())


LAYERED = {'patch_size': 4, 'width': 8, 'depth': 3, 'mlp_dim': 12, 'heads': 2}


def layered(pool):
  return variants.build(
    num_classes=5, image_size=(8, 8), pool=pool, norm_pooled=True, **LAYERED
  )


@pytest.mark.parametrize('pool', ['cls', 'map'])
def test_layers_before_others_learn_more_slowly(pool):
  model = layered(pool)
  p = jax.eval_shape(lambda: variants.init(model, jax.random.key(0), (8, 8)))
  factors = optim.layer_factors(model, 0.5)
  got = dict(zip(names(p), jax.tree.leaves(factors(p)), strict=True))
  before = {'cls', 'embedding', 'posembed_input'}
  for name, factor in got.items():
    if match := re.search(r'encoderblock_(\d)', name):
      assert factor == 0.5 ** (3 - int(match[1])), name
    else:
      first = bool(before & set(name.split('/')))
      assert factor == (1 / 16 if first else 1), name
  assert 1 / 16 in got.values() and 1 in got.values()


@pytest.mark.slow
def test_layers_in_a_scan_learn_as_those_in_a_loop():
  model = layered('cls')
  p = jax.jit(lambda key: variants.init(model, key, (8, 8)))(jax.random.key(0))
  stacked = model.clone(scan=True)
  stacked_p = model.stack_layers(p)
  lr = optim.schedule(LR, 'constant', 0, 9)
  found = []
  for m, params in ((model, p), (stacked, stacked_p)):
    given = {'lr': lr, 'model': m, 'weight_decay': 0.1}
    grads = jax.tree.map(jnp.ones_like, params)
    plain, scaled = (
      jax.jit(lambda g, p, o=o: o.update(g, o.init(p), p)[0])(grads, params)
      for o in (make(**given), make(**given, layer_decay=0.5))
    )
    for x, y, factor in zip(
      jax.tree.leaves(plain),
      jax.tree.leaves(scaled),
      jax.tree.leaves(optim.layer_factors(m, 0.5)(params)),
      strict=True,
    ):
      np.testing.assert_allclose(y, x * factor, rtol=1e-6)
    found.append(scaled)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
    found[0],
    model.unstack_layers(found[1]),
  )


def test_a_model_without_a_row_of_layers_has_no_layer_decay():
  model = variants.build(
    num_classes=5, image_size=(32, 32), name='resnet', layers=(1,), width=32
  )
  with pytest.raises(
    ValueError, match='layer_decay is 0.5, .* a resnet has no'
  ):
    optim.layer_factors(model, 0.5)
