"""DINO is the original's: loss, centre and teacher are those of PyTorch.

The formulas below are those of arXiv 2104.14294, section 3, and of its code:
`DINOLoss`, `DINOHead`, `cosine_scheduler` and the update of the teacher.
"""

import importlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits, dino
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import PEERS
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening, transfer
from vit_jax.data import sources
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.objectives.objective import Facts
from vit_jax.projects.self_supervised import dino_model
from vit_jax.training import sharding

try:
  import torch
  from torch.nn import functional as F
except ImportError:
  torch = None

needs_torch = pytest.mark.skipif(torch is None, reason=PEERS)

train = importlib.import_module('vit_jax.train')

STEPS, FREEZE, WARMUP, BATCH = 20, 5, 8, 8
SETTINGS = {
  'prototypes': 24,
  'hidden': 32,
  'bottleneck': 16,
  'small_views': 3,
  'small_size': '8',
  'momentum': 0.9,
  'teacher_temperature': 0.07,
  'temperature_warmup': f'{WARMUP} steps',
  'freeze_last': f'{FREEZE} steps',
  'last_scale': True,
}


def config_of(**changes):
  config = digits.get_config()
  config_lib.choose_objective(config, 'dino')
  config.model.update(depth=1, width=16, mlp_dim=32, heads=2, patch_size=4)
  config.objective.update(SETTINGS)
  config.data.image_size = '16'
  config.batch_size = BATCH
  config.total = f'{STEPS} steps'
  config.optimizer.update(
    name='sgd', lr=0.5, warmup='0 steps', weight_decay=0.0
  )
  config.best_metric = 'test/loss'
  config.update_from_flattened_dict(changes)
  return config


def experiment():
  checked = CheckedConfig(config_of(), jax.devices()[:1])
  return Experiment(checked, Facts((), 99))


def head(y, p):
  """Returns DINOHead's logits of representations."""
  for i in range(3):
    x = F.gelu(y) if i else y
    y = x @ p[f'layer_{i}']['kernel'] + p[f'layer_{i}']['bias']
  weight = torch.nn.functional.normalize(p['kernel'], dim=0) * p['scale']
  return F.normalize(y, dim=-1) @ weight


def original_loss(student, teacher, center, temperature):
  """Returns DINOLoss of lists of logits by view, and their new centre."""
  out = [x / 0.1 for x in student]
  q = [F.softmax((x - center) / temperature, -1).detach() for x in teacher]
  terms = [
    torch.sum(-q[i] * F.log_softmax(out[v], -1), -1).mean()
    for i in range(2)
    for v in range(len(out))
    if v != i
  ]
  center = center * 0.9 + torch.cat(teacher).mean(0, keepdim=True) * 0.1
  return sum(terms) / len(terms), center


def to_torch(tree):
  return jax.tree.map(lambda x: torch.tensor(np.asarray(x, np.float64)), tree)


@pytest.mark.slow
@needs_torch
def test_twenty_steps_are_the_originals():
  made = experiment()
  objective = made.objective
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: x + np.float32(0.1 * rng.standard_normal(x.shape)),
    jax.device_get(made.new_params()),
  )
  state, step_of = made.start(made.place(params)), made.train_step()
  teacher, center = to_torch(params), torch.zeros(1, 24, dtype=torch.float64)
  before, apply = params, jax.jit(objective.model.apply)

  def representations(params, views, size):
    """Returns those of the body, which other tests compare, by view."""
    params = transfer.at_size(objective.model, params, (16, 16), size)
    y = [apply({'params': params}, x)[0] for x in views]
    return to_torch(y)

  for step in range(STEPS):
    batch = {
      'image': rng.integers(0, 256, (BATCH, 2, 16, 16, 3), np.uint8),
      'small': rng.integers(0, 256, (BATCH, 3, 8, 8, 3), np.uint8),
    }
    key = jax.random.split(jax.random.fold_in(made._keys()[1], step))[0]
    views = {
      name: np.moveaxis(np.asarray(x), 1, 0)
      for name, x in objective.augment(batch, key).items()
    }
    student = to_torch(before['projection'])
    outputs = [
      head(y, student)
      for name, size in (('image', (16, 16)), ('small', (8, 8)))
      for y in representations(before, views[name], size)
    ]
    of_teacher = [
      head(y, teacher['projection'])
      for y in representations(
        jax.tree.map(lambda x: np.float32(x), teacher), views['image'], (16, 16)
      )
    ]
    temperature = 0.04 + 0.03 * min(step / WARMUP, 1)
    loss, center = original_loss(outputs, of_teacher, center, temperature)
    placed = sharding.global_batch(batch, made.mesh)
    state, metrics = step_of(state, {}, placed, np.int32(step))
    assert float(metrics['loss']) == pytest.approx(loss.item(), rel=1e-4)

    after = jax.device_get(state.params)
    m = 1 + 0.5 * (0.9 - 1) * (1 + np.cos(np.pi * step / STEPS))
    teacher = jax.tree.map(
      lambda t, s, m=m: m * t + (1 - m) * s, teacher, to_torch(after)
    )
    for name in ('kernel', 'scale'):
      moved = after['projection'][name] != before['projection'][name]
      assert moved.any() == (step >= FREEZE), (step, name)
    before = after
  found = jax.device_get(state.objective_state)
  assert found['steps'] == STEPS
  np.testing.assert_allclose(found['center'], center[0], rtol=1e-4, atol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    found['teacher'],
    jax.tree.map(lambda x: x.numpy(), teacher),
  )


@needs_torch
@pytest.mark.slow
def test_gradients_are_the_originals():
  """Of the projection, whose inputs are given."""
  made = experiment()
  objective = made.objective
  rng = np.random.default_rng(0)
  params = jax.device_get(made.new_params())
  state = objective.new_state(params) | {'steps': jnp.int32(FREEZE)}
  state['center'] = jnp.asarray(rng.standard_normal(24) / 10, jnp.float32)
  batch = {
    'image': rng.standard_normal((BATCH, 2, 16, 16, 3)).astype(np.float32),
    'small': rng.standard_normal((BATCH, 3, 8, 8, 3)).astype(np.float32),
  }

  def loss(params):
    key = jax.random.key(0)
    return objective.loss_and_seen(params, {}, state, batch, key)[0]

  got = jax.jit(jax.grad(loss))(params)['projection']
  student = jax.tree.map(
    lambda x: x.requires_grad_(), to_torch(params['projection'])
  )
  small = transfer.at_size(objective.model, params, (16, 16), (8, 8))
  y = [
    *np.moveaxis(_representations(objective, params, batch['image']), 1, 0),
    *np.moveaxis(_representations(objective, small, batch['small']), 1, 0),
  ]
  logits = [head(torch.tensor(x, dtype=torch.float64), student) for x in y]
  want, _ = original_loss(
    logits,
    [x.detach() for x in logits[:2]],
    torch.tensor(np.asarray(state['center'], np.float64)),
    float(objective.temperature_at(FREEZE)),
  )
  want.backward()
  jax.tree.map(
    lambda x, t: np.testing.assert_allclose(
      x, t.grad, rtol=0, atol=1e-4 * float(t.grad.abs().max())
    ),
    got,
    student,
  )


def _representations(objective, params, views):
  B, V, *rest = views.shape
  y, _ = objective.model.apply({'params': params}, views.reshape(-1, *rest))
  return np.asarray(y).reshape(B, V, -1)


@needs_torch
def test_hidden_layers_of_the_head_are_standardised():
  head = dino_model.Projection(24, 32, 16, True, True, jnp.float32)
  y = np.random.default_rng(0).standard_normal((BATCH, 12)) + 5
  params = head.init(jax.random.key(0), y)['params']
  p, x = to_torch(params), torch.tensor(y)
  for i in range(3):
    if i:
      x = F.gelu(F.batch_norm(x, None, None, training=True))
    x = x @ p[f'layer_{i}']['kernel'] + p[f'layer_{i}']['bias']
  weight = F.normalize(p['kernel'], dim=0) * p['scale']
  want = F.normalize(x, dim=-1) @ weight
  got = head.apply({'params': params}, y)
  np.testing.assert_allclose(got, want, atol=2e-5)


def test_views_are_large_and_small():
  transform = experiment().objective.train_transform()
  record = dict(sources.open_source('digits', 'train')[0])
  noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  record['image'] = noise
  one, same, other = (
    transform(record, np.random.default_rng(i)) for i in (0, 0, 1)
  )
  assert one['image'].shape == (2, 16, 16, 3)
  assert one['small'].shape == (3, 8, 8, 3)
  for name, x in one.items():
    np.testing.assert_array_equal(x, same[name])
    assert (x != other[name]).any() and (x[0] != x[1]).any()
  boxes = [
    transform.small.random_box(64, 64, np.random.default_rng(i))
    for i in range(200)
  ]
  areas = [x.height * x.width / 64**2 for x in boxes]
  assert 0.04 < min(areas) < 0.12 and 0.3 < max(areas) < 0.45


@pytest.mark.slow
def test_the_result_is_the_teacher(tmp_path):
  config = config_of(
    total='6 steps', eval_every='6 steps', checkpoint_every='3 steps'
  )
  metrics = train.train(config, str(tmp_path))
  checkpoint = opening.open_checkpoint(str(tmp_path))
  older, last = (
    tmp_path / f'checkpoints/{step}/objective_state' for step in (3, 6)
  )
  state = opening.saving.read_arrays(last, {'teacher': checkpoint.params})
  jax.tree.map(
    np.testing.assert_array_equal, checkpoint.params, state['teacher']
  )
  config.eval_only = True
  found = train.evaluate_only(config, str(tmp_path))
  assert found['test/loss'] == pytest.approx(metrics['test/loss'], rel=1e-5)
  shutil.rmtree(last)
  shutil.copytree(older, last)
  with pytest.raises(ValueError, match='of objective_state differ from their'):
    opening.open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
  'field, value, said',
  [
    ('objective.small_size', '9', 'small_size'),
    ('objective.small_area', (0.5, 0.2), 'small_area'),
    ('objective.momentum', 1.5, 'momentum'),
  ],
)
def test_what_cannot_work_is_refused(field, value, said):
  with pytest.raises(ValueError, match=said):
    CheckedConfig(config_of(**{field: value}))


def test_the_published_recipe_is_built():
  config = dino.get_config('s16')
  objective = CheckedConfig(config, jax.devices()[:1]).objective
  assert objective.model.last_scale and objective.small_views == 8
  assert objective.images_seen == pytest.approx(4.1, abs=0.1)


def test_a_representation_layer_is_dropped():
  """It belongs to the task, like the projection."""
  fields = dict(patch_size=4, width=16, depth=1, mlp_dim=16, heads=2)
  own = {'name': 'dino_vit', 'prototypes': 24, 'hidden': 8, 'bottleneck': 8}
  checkpoint = random_checkpoint(
    None, (16, 16), 0, False, **fields, **own, representation_size=8
  )
  fresh = random_checkpoint(None, (16, 16), 3, **fields)
  params = transfer.to_new_task(checkpoint, fresh.model, (16, 16), fresh.params)
  assert jax.tree.structure(params) == jax.tree.structure(fresh.params)
