"""MAE is the paper's: its loss and gradients are those of PyTorch.

The model below is written from arXiv 2111.06377, section 3 and appendix A.1,
with nothing of the package but the parameters.
"""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from configs import digits, mae
from tests.conftest import PEERS
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening, transfer
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops, posemb
from vit_jax.objectives.objective import Facts
from vit_jax.training import optim

try:
  import torch
  from torch.nn import functional as F
except ImportError:
  torch = None

needs_torch = pytest.mark.skipif(torch is None, reason=PEERS)

SIZE, P, HEADS = 16, 4, 4


def config_of(**changes):
  config = digits.get_config()
  config_lib.choose_objective(config, 'mae')
  config.model.update(depth=2, width=32, mlp_dim=48, heads=HEADS)
  config.model.update(patch_size=P, pool='cls', posemb='sincos2d')
  config.objective.update(decoder_width=16, decoder_depth=1, decoder_heads=2)
  config.data.image_size = str(SIZE)
  config.best_metric = 'test/loss'
  config.update_from_flattened_dict(changes)
  return config


def objective_of(**changes):
  config = config_of(**changes)
  experiment = Experiment(CheckedConfig(config), Facts((), 100))
  params = jax.device_get(experiment.new_params())
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: x + np.float32(0.1 * rng.standard_normal(x.shape)), params
  )
  return experiment.objective, params


def batch_of(objective, count=3):
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)
  return objective.augment({'image': images}, jax.random.key(0))


def norm(x, p):
  return F.layer_norm(x, x.shape[-1:], p['scale'], p['bias'], 1e-6)


def dense(x, p):
  matrix = p['kernel'].reshape(x.shape[-1], -1)
  return x @ matrix + p['bias'].reshape(-1)


def block(x, p, heads):
  B, L, D = x.shape
  a, y = p['MultiHeadDotProductAttention_1'], norm(x, p['LayerNorm_0'])
  q, k, v = (
    dense(y, a[name]).reshape(B, L, heads, -1).transpose(1, 2)
    for name in ('query', 'key', 'value')
  )
  weights = torch.softmax(q @ k.transpose(2, 3) / (D // heads) ** 0.5, -1)
  y = (weights @ v).transpose(1, 2).reshape(B, L, D)
  x = x + dense(y, a['out'])
  y = dense(norm(x, p['LayerNorm_2']), p['MlpBlock_3']['Dense_0'])
  y = F.gelu(y, approximate='tanh')
  return x + dense(y, p['MlpBlock_3']['Dense_1'])


def encoder(x, p, heads):
  for i in range(len(p) - 1):
    x = block(x, p[f'encoderblock_{i}'], heads)
  return norm(x, p['encoder_norm'])


def patches_of(images):
  """Cuts images BHWC into patches, pixels of each by row, column and RGB."""
  B, g = len(images), SIZE // P
  x = images.reshape(B, g, P, g, P, 3).permute(0, 1, 3, 2, 4, 5)
  return x.reshape(B, g * g, P * P * 3)


def theirs(params, images, order, visible, normalized):
  """Returns the loss of the paper in float64."""
  p, d = params, params['decoder']
  B, L = order.shape
  patches = patches_of(images)
  table, of_decoder = (
    torch.tensor(np.asarray(posemb.sincos2d((4, 4), D)), dtype=torch.float64)
    for D in (32, 16)
  )
  x = dense(patches, p['embedding']) + table
  rows = torch.arange(B)[:, None]
  x = x[rows, order[:, :visible]]
  x = torch.cat([p['cls'].expand(B, 1, -1), x], dim=1)
  x = dense(encoder(x, p['Transformer'], HEADS), d['embedding'])
  full = d['mask_embedding'].expand(B, L, -1).clone()
  full[rows, order[:, :visible]] = x[:, 1:]
  x = torch.cat([x[:, :1], full + of_decoder], dim=1)
  predicted = dense(encoder(x, d['Transformer'], 2), d['prediction'])[:, 1:]
  if normalized:
    mean, var = patches.mean(-1, True), patches.var(-1, keepdim=True)
    patches = (patches - mean) / (var + 1e-6) ** 0.5
  errors = ((predicted - patches) ** 2).mean(-1)
  is_hidden = torch.ones(B, L, dtype=torch.float64)
  is_hidden[rows, order[:, :visible]] = 0
  return (errors * is_hidden).sum() / is_hidden.sum()


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize('normalized', [True, False])
def test_loss_and_gradients_are_the_papers(normalized):
  objective, params = objective_of(**{'objective.normalized': normalized})
  assert objective.visible == 4
  batch = batch_of(objective)

  def loss(params):
    return objective.loss(params, batch, jax.random.key(1))[0]

  got, grads = jax.jit(jax.value_and_grad(loss))(params)
  leaves, structure = jax.tree.flatten(params)
  tensors = [
    torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in leaves
  ]
  want = theirs(
    jax.tree.unflatten(structure, tensors),
    torch.tensor(np.asarray(batch['image'], np.float64)),
    torch.tensor(np.asarray(batch['order'], np.int64)),
    4,
    normalized,
  )
  want.backward()
  assert float(got) == pytest.approx(want.item(), rel=1e-5)
  for (path, x), tensor in zip(
    jax.tree_util.tree_leaves_with_path(grads), tensors, strict=True
  ):
    wanted = tensor.grad.numpy()
    np.testing.assert_allclose(
      x,
      wanted,
      rtol=0,
      atol=1e-4 * max(np.abs(wanted).max(), 1e-3),
      err_msg=jax.tree_util.keystr(path),
    )


def test_the_masking_follows_from_the_seed():
  objective = CheckedConfig(config_of()).objective
  images = np.zeros((64, SIZE, SIZE, 3), np.uint8)
  one, same, other = (
    np.asarray(objective.augment({'image': images}, jax.random.key(i))['order'])
    for i in (0, 0, 1)
  )
  np.testing.assert_array_equal(one, same)
  assert (one != other).any()
  np.testing.assert_array_equal(
    np.sort(one, axis=1), np.tile(range(16), (64, 1))
  )
  assert len(np.unique(one, axis=0)) == 64  # each image its own
  seen = np.bincount(one[:, :4].ravel(), minlength=16)
  assert seen.min() > 4 and seen.max() < 32  # 16 on average


@pytest.mark.slow
def test_a_quarter_of_the_patches_takes_a_quarter_of_the_encoders_work():
  config = mae.get_config('l16')
  objective = CheckedConfig(config, jax.devices()[:1]).objective
  whole = flops.forward_flops(objective.model.body(), (224, 224))
  seen = objective.images_seen
  assert 1 / seen > 2.5
  # 8 layers of width 512 on all patches are 10 GFLOPs of 62 + 10.
  assert seen * flops.forward_flops(objective.model, (224, 224)) < 0.45 * whole


@pytest.mark.slow
def test_labels_come_later():
  """Its body starts a classifier, and the decoder stays behind."""
  objective, params = objective_of()
  checkpoint = opening.Checkpoint('mae', objective.model, params, (SIZE, SIZE))
  config = config_of()
  config_lib.choose_objective(config, 'classification')
  config.best_metric = 'test/accuracy'
  names = tuple(map(str, range(10)))
  made = Experiment(CheckedConfig(config), Facts(names, 100))
  found = made.params_from(checkpoint)
  assert 'decoder' not in found and 'head' in found
  jax.tree.map(
    np.testing.assert_array_equal, found['Transformer'], params['Transformer']
  )
  body = transfer.with_head(checkpoint, 'drop')
  images = np.random.default_rng(0).uniform(0, 255, (2, SIZE, SIZE, 3))
  _, aux = jax.jit(objective.model.apply)(
    {'params': params}, checkpoint.normalize(images)
  )
  np.testing.assert_allclose(
    body.logits(images), aux['pre_logits'], rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize(
  'field, value',
  [
    ('model.posemb', 'relative'),
    ('model.rope', 100.0),
    ('model.pool', 'map'),
    ('objective.decoder_heads', 3),
    ('objective.rate', 1.0),
  ],
)
def test_what_cannot_work_is_refused(field, value):
  with pytest.raises(ValueError, match=field):
    CheckedConfig(config_of(**{field: value}))


def test_adapters_are_of_the_encoder_alone():
  objective, params = objective_of()
  made = optim.new_adapters(
    objective.model, params, 2, 'query/kernel$', jax.random.key(0)
  )
  found = {'/'.join(path) for path in flatten_dict(made)}
  assert any(x.startswith('Transformer/') for x in found)
  assert not any('lora' in x for x in found if x.startswith('decoder/'))
