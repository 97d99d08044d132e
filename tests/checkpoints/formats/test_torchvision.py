"""ResNets of torchvision: the same logits, and the backbone of DETR."""

import json

import jax
import numpy as np
import pytest

from configs import finetune
from tests.checkpoints.random_weights import logits_of
from vit_jax.checkpoints import from_init, opening, transfer
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.experiment import CheckedConfig
from vit_jax.models import flops, variants

TOLERANCE = 1e-4


@pytest.fixture(scope='module')
def peer(torch):
  """A small ResNet of bottlenecks with random weights and statistics."""
  resnet = pytest.importorskip('torchvision.models').resnet
  torch.manual_seed(0)
  model = resnet.ResNet(resnet.Bottleneck, (1, 2, 1, 1), num_classes=5).eval()
  for name, x in model.state_dict().items():
    if name.endswith('running_var') or (x.ndim == 1 and 'weight' in name):
      x.uniform_(0.5, 1.5)
    elif name.endswith(('running_mean', 'bias')):
      x.normal_(std=0.1)
  return model


@pytest.fixture(scope='module')
def file(torch, peer, tmp_path_factory):
  path = tmp_path_factory.mktemp('torchvision') / 'resnet.pth'
  torch.save(peer.state_dict(), path)
  return str(path)


def test_logits_are_torchvisions(torch, peer, file):
  checkpoint = opening.open_checkpoint(file)
  assert checkpoint.model.layers == (1, 2, 1, 1)
  assert checkpoint.image_size == (224, 224)
  assert checkpoint.preprocessing.resize_small == 256
  images = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3))
  images = images.astype(np.uint8)
  mean, std = checkpoint.preprocessing.mean, checkpoint.preprocessing.std
  assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)
  x_BHWC = ((images / 255 - mean) / std).astype(np.float32)
  with torch.no_grad():
    want = peer(torch.from_numpy(x_BHWC.transpose(0, 3, 1, 2).copy())).numpy()
  got = logits_of(checkpoint, images)
  assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


def test_it_becomes_the_backbone_of_detr(file):
  checkpoint = opening.open_checkpoint(file)
  size = (64, 64)
  model = variants.build(
    name='detr',
    num_classes=3,
    image_size=size,
    backbone_layers=(1, 2, 1, 1),
    encoder_layers=1,
    decoder_layers=1,
    scan=True,
  )
  shapes = flops.param_shapes(model, size)
  fresh = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  params = transfer.to_new_task(checkpoint, model, size, fresh)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, fresh)
  found = params['backbone']['block1']['unit1']['bn1']
  want = checkpoint.params['block1']['unit1']['bn1']
  jax.tree.map(np.testing.assert_array_equal, found, want)


def test_a_directory_of_timm_says_what_its_images_are(
  torch, file, tmp_path, caplog
):
  opening.open_checkpoint(file)
  assert (
    'does not store its configuration. vit_jax assumes bilinear resizing'
    in caplog.text
  )
  caplog.clear()
  save_file = pytest.importorskip('safetensors.torch').save_file
  save_file(torch.load(file), tmp_path / 'model.safetensors')
  config = {
    'architecture': 'resnet50',
    'num_classes': 5,
    'pretrained_cfg': {
      'input_size': [3, 160, 160],
      'crop_pct': 0.95,
      'interpolation': 'bicubic',
      'mean': [0.4, 0.4, 0.4],
      'std': [0.2, 0.2, 0.2],
      'label_names': list('abcde'),
    },
  }
  (tmp_path / 'config.json').write_text(json.dumps(config))
  checkpoint = opening.open_checkpoint(str(tmp_path))
  assert checkpoint.image_size == (160, 160)
  assert checkpoint.preprocessing.mean == (0.4, 0.4, 0.4)
  assert checkpoint.preprocessing.interpolation == 'bicubic'
  assert checkpoint.class_names == tuple('abcde')
  assert 'does not store' not in caplog.text
  # Without a word on images they are those that timm assumes.
  bare = {'architecture': 'tv_resnet50'}
  (tmp_path / 'config.json').write_text(json.dumps(bare))
  checkpoint = opening.open_checkpoint(str(tmp_path))
  assert checkpoint.image_size == (224, 224)
  assert checkpoint.preprocessing == Preprocessing(
    256,
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
    'bicubic',
    resize_like='torchvision',
  )
  # Of the same arrays, with other layers between.
  for change, message in (
    ({'architecture': 'resnetaa50'}, "architecture is 'resnetaa50'"),
    ({'architecture': 'resnet50d'}, "architecture is 'resnet50d'"),
    ({'model_args': {'aa_layer': 'blur'}}, "model_args.aa_layer is 'blur'"),
  ):
    (tmp_path / 'config.json').write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
      opening.open_checkpoint(str(tmp_path))


def test_what_a_training_put_before_the_names_is_left_out(
  torch, file, tmp_path
):
  arrays = {f'module.{key}': x for key, x in torch.load(file).items()}
  torch.save({'state_dict': arrays}, tmp_path / 'checkpoint.pth')
  found, want = (
    opening.open_checkpoint(path).params
    for path in (str(tmp_path / 'checkpoint.pth'), file)
  )
  jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.edge
@pytest.mark.parametrize(
  'change, message',
  [
    ({'layer1.0.se.weight': (3,)}, 'layer1.0.se.weight'),
    ({'fc.weight': (5,)}, "'fc.weight' must have 2"),
  ],
)
def test_another_resnet_is_refused(torch, file, tmp_path, change, message):
  arrays = torch.load(file)
  arrays |= {key: torch.zeros(shape) for key, shape in change.items()}
  torch.save(arrays, tmp_path / 'other.pth')
  with pytest.raises(ValueError, match=message):
    opening.open_checkpoint(str(tmp_path / 'other.pth'))


def test_it_can_be_fine_tuned_from(file):
  """A config can train it although its statistics are frozen."""
  config = finetune.get_config(f'{file},cifar10')
  from_init.resolve(config)
  CheckedConfig(config)
  assert config.model.version == 0
