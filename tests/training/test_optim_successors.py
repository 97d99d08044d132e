"""LAMB, Muon and SAM against their recursions in float64, and LAMB of timm."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from configs import digits
from tests.checkpoints.random_weights import random_arrays
from vit_jax import config as config_lib
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import variants
from vit_jax.objectives.objective import Facts
from vit_jax.training import optim

LR, B1, B2, DECAY, STEPS = 0.03, 0.8, 0.95, 0.3, 4
RTOL = 1e-5
FIELDS = {'patch_size': 4, 'width': 8, 'depth': 2, 'mlp_dim': 12, 'heads': 2}
MODELS = {
  'ViT': FIELDS,
  'scan': FIELDS | {'scan': True},
  'hybrid': FIELDS
  | {'stem_width': 32, 'stem_layers': (2,), 'patch_size': 1, 'depth': 1},
}
OUTPUTS = {'query': 2, 'key': 2, 'value': 2}


def model_of(kind):
  return variants.build(num_classes=5, image_size=(8, 8), **MODELS[kind])


def trees(kind):
  """Returns parameters and a gradient for each step, by path, in float64."""
  drawn = [
    random_arrays(model_of(kind), (8, 8), seed) for seed in range(STEPS + 1)
  ]
  return [{k: x.astype(np.float64) for k, x in tree.items()} for tree in drawn]


def run(kind, params, grads, **fields):
  """Returns what the optimizer makes of parameters, by path."""
  o = config_lib.base().optimizer
  o.update({'weight_decay': 0.0, **fields})
  lr = optim.schedule(LR, 'constant', 0, 9)
  optimizer = optim.make(o, lr, model_of(kind))

  def tree(arrays):
    as_float32 = {name: jnp.float32(x) for name, x in arrays.items()}
    return traverse_util.unflatten_dict(as_float32, sep='/')

  params = tree(params)
  state = optimizer.init(params)
  for g in grads:
    updates, state = jax.jit(optimizer.update)(tree(g), state, params)
    params = optax.apply_updates(params, updates)
  return traverse_util.flatten_dict(params, sep='/')


def adam(grads):
  """Returns Adam's direction after each gradient (1412.6980)."""
  m = v = 0.0
  for t, g in enumerate(grads, 1):
    m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
    yield m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + 1e-8)


def layers_of(name, x):
  """Returns the parts of a stack, or the array itself."""
  return list(x) if '/encoderblock/' in name else [x]


def muon(grads):
  """Returns Muon's direction of matrices after each gradient."""
  a, b, c = 3.4445, -4.7750, 2.0315
  m = 0.0
  for t, g in enumerate(grads, 1):
    m = 0.9 * m + (1 - 0.9) * g
    x = 0.9 * m / (1 - 0.9 ** (t + 1)) + (1 - 0.9) * g / (1 - 0.9**t)
    x = x / np.linalg.norm(x)
    for _ in range(5):
      # Of either side the shorter product, which gives the same.
      s = x @ x.T if len(x) <= len(x.T) else x.T @ x
      p = b * s + c * s @ s
      x = a * x + (p @ x if len(x) <= len(x.T) else x @ p)
    yield x * 0.2 * np.sqrt(max(x.shape))


def matrix_shape(name, shape):
  n = OUTPUTS.get(name.split('/')[-2], 1)
  return int(np.prod(shape[:-n])), int(np.prod(shape[-n:]))


def expected(name, p, grads, kind):
  """Returns one parameter, of one layer, after all gradients."""
  is_kernel = name.endswith('/kernel')
  hidden = re.search('encoderblock|unit', name)
  shape = p.shape
  if kind == 'muon' and is_kernel and hidden:
    matrix = matrix_shape(name, shape)
    directions = muon([g.reshape(matrix) for g in grads])
  else:
    directions = adam(grads)
  for u in directions:
    u = u.reshape(shape)
    if is_kernel:
      u = u + DECAY * p
      if kind == 'lamb':
        u = u * np.linalg.norm(p) / np.linalg.norm(u)
    p = p - LR * u
  return p


@pytest.mark.parametrize(
  ('name', 'kind'),
  [
    ('lamb', 'scan'),
    ('muon', 'ViT'),
    ('muon', 'scan'),
    pytest.param('muon', 'hybrid', marks=pytest.mark.slow),
  ],
)
def test_steps_are_those_of_the_recursion(name, kind):
  params, *grads = trees(kind)
  got = run(
    kind,
    params,
    grads,
    name=name,
    b1=B1,
    b2=B2,
    momentum=0.9,
    weight_decay=DECAY,
  )
  assert got.keys() == params.keys()
  for path, x in params.items():
    parts = zip(
      layers_of(path, x),
      *(layers_of(path, g[path]) for g in grads),
      strict=True,
    )
    want = [expected(path, p, gs, name) for p, *gs in parts]
    want = np.stack(want) if '/encoderblock/' in path else want[0]
    error = np.abs(got[path] - want).max() / np.abs(want).max()
    # Five products of matrices one after the other lose a digit.
    assert error < (1e-4 if name == 'muon' else RTOL), path


def test_lamb_is_that_of_timm(timm, torch):
  """Which leaves what does not decay to Adam, too."""
  from timm.optim import Lamb

  params, *grads = trees('ViT')
  got = run('ViT', params, grads, name='lamb', b1=B1, b2=B2, weight_decay=DECAY)
  theirs = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in params.items()}
  kernels, others = (
    [x for k, x in theirs.items() if k.endswith('/kernel') == wanted]
    for wanted in (True, False)
  )
  groups = [
    {'params': kernels, 'weight_decay': DECAY},
    {'params': others, 'weight_decay': 0.0},
  ]
  optimizer = Lamb(groups, lr=LR, betas=(B1, B2), eps=1e-8, max_grad_norm=None)
  for g in grads:
    for k, x in theirs.items():
      x.grad = torch.tensor(g[k])
    optimizer.step()
  for k, x in theirs.items():
    want = x.detach().numpy()
    assert np.abs(got[k] - want).max() < RTOL * np.abs(want).max(), k


def test_lamb_moves_kernels_of_zero_as_adam_does():
  params, grad, *_ = trees('ViT')
  zeros = {k: 0 * x for k, x in params.items()}
  got, want = (run('ViT', zeros, [grad], name=x) for x in ('lamb', 'adam'))
  for k, x in want.items():
    np.testing.assert_allclose(got[k], x, rtol=RTOL, err_msg=k)


@pytest.mark.parametrize('name', ['lamb', 'muon'])
def test_gradients_of_zero_leave_numbers(name):
  params, grad, *_ = trees('ViT')
  zeros = {k: 0 * x for k, x in grad.items()}
  moved = run('ViT', params, [zeros, zeros], name=name)
  for k, x in params.items():
    np.testing.assert_array_equal(moved[k], np.float32(x), err_msg=k)


@pytest.mark.fast('lamb')
@pytest.mark.parametrize('name', ['lamb', 'muon'])
def test_other_fields_go_with_them(name):
  """Frozen layers stay, rates of groups and a momentum of two bytes hold."""
  params, *grads = trees('ViT')
  fields = {'name': name, 'weight_decay': DECAY, 'momentum_dtype': 'bfloat16'}
  plain = run('ViT', params, grads[:1], **fields)
  got = run(
    'ViT',
    params,
    grads[:1],
    **fields,
    frozen=('encoderblock_0/',),
    lr_scales=(('encoderblock_1/', 0.5),),
  )
  for k, x in params.items():
    factor = 0 if 'block_0/' in k else 0.5 if 'block_1/' in k else 1
    want = x + factor * (plain[k] - x)
    np.testing.assert_allclose(got[k], want, rtol=RTOL, atol=1e-6, err_msg=k)


SAM = 0.5


def experiment_of(**changes):
  config = digits.get_config()
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2)
  config.data.image_size = '8'
  config.update(total='4 steps', batch_size=8)
  config.optimizer.update(
    name='sgd', lr=LR, momentum=0.0, clip_norm=0.0, decay='constant'
  )
  config.optimizer.warmup = '0 steps'
  config.optimizer.weight_decay = 0.0
  config.update_from_flattened_dict(changes)
  facts = Facts(tuple(map(str, range(10))), 1437)
  return Experiment(CheckedConfig(config, jax.devices()[:1]), facts)


def batch_of(made):
  rng = np.random.default_rng(0)
  return {
    name: rng.integers(0, 10, x.shape).astype(x.dtype)
    for name, x in made.objective.batch_shapes(8).items()
  }


@pytest.mark.slow
def test_sam_takes_the_gradient_uphill():
  """As `optax.contrib.sam` does with the gradient's function."""
  made = experiment_of(**{'optimizer.sam': SAM, 'accum_steps': 4})
  params, batch = made.new_params(), batch_of(made)
  start = jax.device_get(params)

  @jax.jit
  def gradient(params, _):
    def loss(params):
      key = jax.random.key(0)
      rows = made.objective.augment(batch, key)
      return made.objective.loss(params, rows, key)[0]

    return jax.grad(loss)(params)

  theirs = optax.contrib.sam(
    optax.sgd(LR),
    optax.chain(optax.contrib.normalize(), optax.sgd(SAM)),
    opaque_mode=True,
  )
  updates, _ = theirs.update(
    gradient(start, 0), theirs.init(start), start, grad_fn=gradient
  )
  state, metrics = made.train_step()(made.start(params), {}, batch, np.int32(0))
  jax.tree.map(
    lambda x, old, u: np.testing.assert_allclose(
      x - old, u, rtol=1e-4, atol=1e-3 * np.abs(u).max() + 1e-7
    ),
    jax.device_get(state.params),
    start,
    jax.device_get(updates),
  )
  # What is shown is of where the parameters are.
  plain = experiment_of(accum_steps=4)
  _, want = plain.train_step()(
    plain.start(plain.new_params()), {}, batch, np.int32(0)
  )
  np.testing.assert_allclose(metrics['loss'], want['loss'], rtol=1e-6)


def test_sam_goes_as_far_whatever_the_length_of_the_gradient():
  """Of all parameters together: the sides are 3, 4 and 5."""
  tree = {'a': jnp.ones(2), 'b': jnp.full(1, -2.0)}
  for scale in (1e-4, 1.0, 1e4):
    grads = {'a': jnp.array([3 * scale, 0.0]), 'b': jnp.array([-4 * scale])}
    found = optim.sharpest(tree, grads, SAM)
    np.testing.assert_allclose(found['a'], [1 + 0.6 * SAM, 1], rtol=1e-6)
    np.testing.assert_allclose(found['b'], [-2 - 0.8 * SAM], rtol=1e-6)


def test_sam_stays_put_where_there_is_no_gradient():
  tree = {'a': jnp.ones(3), 'b': jnp.zeros(2)}
  zeros = jax.tree.map(jnp.zeros_like, tree)
  jax.tree.map(
    np.testing.assert_array_equal, optim.sharpest(tree, zeros, SAM), tree
  )
