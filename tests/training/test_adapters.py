"""LoRA is the paper's: W + A B, of which A, B and the head are trained."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from configs import digits
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import PEERS
from vit_jax.checkpoints import adapters, opening
from vit_jax.convert import convert, orbax
from vit_jax.data import sources
from vit_jax.models import flops
from vit_jax.tools.plan import aot
from vit_jax.training import optim, preemption

try:
  import torch
except ImportError:
  torch = None

needs_torch = pytest.mark.skipif(torch is None, reason=PEERS)

train = importlib.import_module('vit_jax.train')

FIELDS = {'patch_size': 8, 'width': 16, 'depth': 2, 'mlp_dim': 32, 'heads': 2}
SIZE = (16, 16)


@pytest.fixture
def base(tmp_path):
  checkpoint = random_checkpoint(None, SIZE, 5, **FIELDS)
  orbax.write(checkpoint, str(tmp_path / 'base'), 'float32')
  return opening.open_checkpoint(str(tmp_path / 'base'))


def config_of(base, **changes):
  config = digits.get_config()
  config.model.update(FIELDS)
  config.init = base.path
  config.data.image_size = '16'
  config.optimizer.update(lora=2, lr=0.01, warmup='0 steps')
  config.update(total='6 steps', eval_every='6 steps', batch_size=64)
  config.update_from_flattened_dict(changes)
  return config


def experiment_of(config):
  facts = train.facts_of(config, sources.open_source('digits', 'train'))
  return train.Experiment(train.CheckedConfig(config), facts)


@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_forward_and_gradients_are_those_of_peft(base, tmp_path, transformers):
  """Of a whole ViT of transformers, from the same matrices."""
  peft = pytest.importorskip('peft', exc_type=ImportError)
  rng = np.random.default_rng(0)
  trained = optim.new_adapters(
    base.model, base.params, 3, '(query|value)/kernel$', jax.random.key(0)
  )
  trained = jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal(x.shape) / 4, jnp.float32),
    trained,
  )
  body = adapters.body_of(base.model, base.params)
  trained['head'] = base.params['head']
  images_BHWC = rng.standard_normal((2, *SIZE, 3)).astype(np.float32)
  weights_BC = rng.standard_normal((2, 5)).astype(np.float32)

  def loss(trained):
    params = adapters.merged(body, trained)
    logits_BC, _ = base.model.apply({'params': params}, images_BHWC)
    return jnp.sum(logits_BC * weights_BC), logits_BC

  (_, got_BC), grads = jax.value_and_grad(loss, has_aux=True)(trained)

  convert.convert(base, str(tmp_path / 'hf'), to='hf')
  theirs = peft.get_peft_model(
    transformers.ViTForImageClassification.from_pretrained(tmp_path / 'hf'),
    peft.LoraConfig(r=3, lora_alpha=3, target_modules=['q_proj', 'v_proj']),
  )
  pairs = []
  for name, module in theirs.named_modules():
    own = {'q_proj': 'query', 'v_proj': 'value'}.get(name.rpartition('.')[2])
    if own:
      layer = int(re.search(r'layers?\.(\d+)\.', name)[1])
      path = (
        *('Transformer', f'encoderblock_{layer}'),
        *('MultiHeadDotProductAttention_1', own, 'kernel'),
      )
      for ours, kind in ((adapters.A, 'lora_A'), (adapters.B, 'lora_B')):
        weight = getattr(module, kind)['default'].weight
        pairs.append(((*path, ours), weight))
  assert len(pairs) == 8
  flat, flat_grads = map(traverse_util.flatten_dict, (trained, grads))
  with torch.no_grad():
    for path, weight in pairs:
      weight.copy_(torch.tensor(np.asarray(flat[path]).T))
  pixels = torch.tensor(images_BHWC.transpose(0, 3, 1, 2))
  want_BC = theirs(pixels).logits
  (want_BC * torch.tensor(weights_BC)).sum().backward()
  np.testing.assert_allclose(got_BC, want_BC.detach(), rtol=1e-4, atol=1e-5)
  for path, weight in pairs:
    np.testing.assert_allclose(
      flat_grads[path], weight.grad.T, rtol=1e-3, atol=1e-4, err_msg=str(path)
    )


@needs_torch
@pytest.mark.parametrize('scan', [False, True])
def test_forward_and_gradients_are_those_of_pytorch(base, scan):
  """The queries of one layer are x W + (x A) B, as in peft."""
  model = base.model.clone(scan=scan)
  params = model.stack_layers(base.params) if scan else base.params
  trained = optim.new_adapters(
    model, params, 3, '(query|Dense_0)/kernel$', jax.random.key(0)
  )
  count = 2 if scan else 4
  leaves = jax.tree_util.tree_leaves_with_path(trained)
  assert sum(path[-1].key == adapters.A for path, _ in leaves) == count
  rng = np.random.default_rng(0)
  trained = jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal(x.shape) / 4, jnp.float32),
    trained,
  )
  body = adapters.body_of(model, params)
  block = 'MultiHeadDotProductAttention_1', 'query', 'kernel'
  layer = 'encoderblock' if scan else 'encoderblock_1'

  def at(tree):
    for name in ('Transformer', layer, *block):
      tree = tree[name]
    return tree

  own, w = at(trained), np.asarray(at(params))
  a, b = (np.asarray(own[name]) for name in (adapters.A, adapters.B))
  if scan:
    a, b, w = a[1], b[1], w[1]
  x, y = rng.standard_normal((2, 5, 16))

  def loss(trained):
    kernel = at(adapters.merged(body, trained))
    kernel = kernel[1] if scan else kernel
    return jnp.sum(jnp.asarray(y) * jnp.tanh(x @ kernel.reshape(16, 16)))

  got, grads = jax.value_and_grad(loss)(trained)
  ta, tb = (torch.tensor(z.astype(float), requires_grad=True) for z in (a, b))
  tx, ty, tw = (torch.tensor(z.astype(float)) for z in (x, y, w))
  want = (ty * torch.tanh(tx @ tw.reshape(16, 16) + tx @ ta @ tb)).sum()
  want.backward()
  assert float(got) == pytest.approx(want.item(), rel=1e-5)
  for name, tensor in ((adapters.A, ta), (adapters.B, tb)):
    found = at(grads)[name]
    np.testing.assert_allclose(
      found[1] if scan else found, tensor.grad, rtol=1e-4, atol=1e-5
    )


def test_adapters_change_nothing_at_first(base):
  trained = optim.new_adapters(
    base.model, base.params, 2, 'value/kernel$', jax.random.key(0)
  )
  body = adapters.body_of(base.model, base.params)
  jax.tree.map(
    np.testing.assert_array_equal, adapters.merged(body, trained), base.params
  )


@pytest.mark.slow
def test_a_run_trains_and_saves_adapters_and_head_alone(
  base, tmp_path, preempt_at, monkeypatch
):
  config, whole, parts = config_of(base), tmp_path / 'whole', tmp_path / 'parts'
  train.train(config, str(whole))
  preempt_at(3)
  with pytest.raises(preemption.Preempted):
    train.train(config, str(parts))
  preempt_at(None)
  train.train(config, str(parts))
  one, other = (opening.open_checkpoint(str(path)) for path in (whole, parts))
  jax.tree.map(np.testing.assert_array_equal, one.params, other.params)

  kernels, others = [], []
  for path, x in jax.tree_util.tree_leaves_with_path(one.params['Transformer']):
    was = base.params['Transformer']
    for key in path:
      was = was[key.key]
    names = [key.key for key in path]
    adapted = names[-1] == 'kernel' and names[-2] in ('query', 'value')
    (kernels if adapted else others).append((x, was))
  assert len(kernels) == 4
  assert all((x != was).any() for x, was in kernels)
  for x, was in others:
    np.testing.assert_array_equal(x, was)
  assert one.params['head']['kernel'].any()

  saved = opening.saving.read_arrays(whole / 'checkpoints/6/params')
  count = sum(x.size for x in jax.tree.leaves(saved))
  assert count == 4 * 2 * (16 + 16) + 16 * 10 + 10
  body = adapters.body_of(base.model, base.params)
  jax.tree.map(
    np.testing.assert_array_equal, adapters.merged(body, saved), one.params
  )

  # The path of the start is relative to the folder of the training.
  monkeypatch.chdir(tmp_path)
  config.init = 'base'
  train.train(config, 'near')
  monkeypatch.chdir('/')
  near = opening.open_checkpoint(str(tmp_path / 'near'))
  jax.tree.map(np.testing.assert_array_equal, near.params, one.params)

  # Another start would be another model.
  more = jax.tree.map(lambda x: x + np.float32(1), base.params)
  changed = dataclasses.replace(base, params=more)
  orbax.write(changed, str(tmp_path / 'new'), 'float32')
  (tmp_path / 'base').rename(tmp_path / 'old')
  (tmp_path / 'new').rename(tmp_path / 'base')
  with pytest.raises(ValueError, match='base.* has changed since'):
    opening.open_checkpoint(str(whole))


def test_adapters_are_planned_and_refused_where_they_cannot_work(
  base, monkeypatch
):
  config = config_of(base)
  experiment = experiment_of(config)
  aot.training(experiment).lower()
  state = experiment.state_shapes
  trained = sum(x.size for x in jax.tree.leaves(state.params))
  assert trained < flops.count_params(base.model, SIZE) / 5
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
  assert moments < 2.1 * trained
  for pattern in ('nothing/kernel$', '*kernel'):
    config.optimizer.lora_on = pattern
    with pytest.raises(
      ValueError, match='lora_on is ' + re.escape(repr(pattern))
    ):
      experiment_of(config)
  monkeypatch.setattr(
    type(base.model), 'optional_params', {'registers': ['registers']}
  )
  config = config_of(base, **{'model.registers': 2})
  experiment = experiment_of(config)
  with pytest.raises(ValueError, match='base.* has only a part of the model'):
    experiment.params_from(base)
  config = config_of(base, **{'optimizer.frozen': ('^(?!head/)',)})
  with pytest.raises(ValueError, match='which matches all adapters'):
    experiment_of(config)
  with pytest.raises(ValueError, match='lora is 2, but init is empty'):
    train.train(config_of(base, init=''), 'x')
