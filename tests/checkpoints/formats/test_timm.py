"""timm's directories and files: the same arrays and numbers both ways."""

import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints import timm_peer
from tests.checkpoints.formats.timm_folder import (
  HYBRID,
  TINY,
  TINY_BIT,
  assert_arrays_equal,
)
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from tests.models.test_timm import use_our_epsilons
from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats import timm as convert
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.models import posemb

# Sums of float32 in another order. Seen are 4.0e-6 at most.
TOLERANCE = 1e-5
# What float32 costs the convolutions of our side where sums are short, timm
# works in float64 there and with the originals' epsilons. Seen are 2.1e-5 at
# most.
RESNET_TOLERANCE = 3e-5
# With timm's own epsilons and in its float32. Seen are 3.2e-4 at most, nearly
# all of it the epsilons; of BiT 1e-4, nearly all of it float32.
UNCHANGED_TOLERANCE = {'hybrid': 1e-3, 'BiT': 2e-4}

TINY_16 = 'vit_tiny_patch16_224'
SMALL = {'img_size': 32, 'depth': 2}
SLIM = {'depth': 2, 'embed_dim': 64, 'num_heads': 4}
NARROW = {'stem_chs': 32, 'channels': [128, 256, 512, 1024]}
NO_TOKEN = {'class_token': False, 'fc_norm': False}
# Models of timm: name and arguments. The arrays and the numbers of BOTH are
# compared.
BOTH = {
  'DeiT, distilled': ('deit_tiny_distilled_patch16_224', SMALL),
  'attention pooling': (TINY_16, SMALL | NO_TOKEN | {'global_pool': 'map'}),
  'class token without position': (TINY_16, SMALL | {'no_embed_class': True}),
  'not square': (TINY_16, SMALL | {'img_size': [32, 48]}),
  'no bias, RMSNorm, normalised queries and keys': (
    TINY_16,
    SMALL | {'qkv_bias': False, 'norm_layer': 'rmsnorm', 'qk_norm': True},
  ),
}
# Only the arrays are compared.
ARRAYS = {
  'DeiT': ('deit_tiny_patch16_224', SMALL),
  'mean': (TINY_16, SMALL | NO_TOKEN | {'global_pool': 'avg'}),
  'other sizes': (
    'vit_base_patch16_224',
    {
      'img_size': 24,
      'patch_size': 8,
      'embed_dim': 36,
      'depth': 3,
      'num_heads': 2,
      'mlp_ratio': 37 / 36,
    },
  ),
  'no classes': (TINY_16, SMALL | {'num_classes': 0}),
  'hybrid': ('vit_small_r26_s32_224', {'img_size': 64, 'depth': 2}),
  'BiT': ('resnetv2_50x1_bit', NARROW),
}
# Only the numbers are compared, because we write these models differently.
# test_timm_sweep.py compares all other names.
NUMBERS = {
  'no positions': (TINY_16, SMALL | {'pos_embed': 'none'}),
  'hybrid of a root alone': (
    'vit_tiny_r_s16_p8_224',
    {'img_size': [64, 96], 'depth': 2},
  ),
  'mean, normalised': (TINY_16, SMALL | {'global_pool': 'avg'}),
  'mean beside a class token': (
    TINY_16,
    SMALL | {'global_pool': 'avg', 'fc_norm': False},
  ),
  'DINOv2 with registers': (
    'vit_small_patch14_reg4_dinov2',
    {'depth': 2, 'img_size': [28, 42]},
  ),
  'DINOv3': ('vit_small_patch16_dinov3', SLIM | {'img_size': [32, 48]}),
  'EVA-02': ('eva02_tiny_patch14_224', SLIM | {'img_size': [28, 42]}),
  'RoPE-ViT, columns before rows': (
    'vit_small_patch16_rope_ape_224',
    SLIM | {'img_size': [48, 32]},
  ),
  "OpenAI's CLIP": (
    'vit_base_patch32_clip_quickgelu_224',
    SLIM | {'img_size': 64},
  ),
  'register with positions': (TINY_16, SMALL | {'reg_tokens': 1}),
  'registers with positions': (
    TINY_16,
    SMALL | NO_TOKEN | {'global_pool': 'avg', 'reg_tokens': 3},
  ),
}


def resnet_of(kind):
  """Returns 'hybrid', 'BiT' or None."""
  found = [name for name in ('hybrid', 'BiT') if name in kind]
  return found[0] if found else None


def as_originals(timm, model, resnet):
  """Gives a model of timm the originals' epsilons and 64 bits."""
  use_our_epsilons(timm, model, {'hybrid': 1, 'BiT': 2}[resnet])
  model.double()
  model.register_forward_pre_hook(lambda _, args: (args[0].double(),))


def save_theirs(timm, torch, kind, folder):
  """Saves a model with random parameters as timm does, and returns it."""
  name, args = (BOTH | ARRAYS | NUMBERS)[kind]
  torch.manual_seed(0)
  model = timm.create_model(name, **{'num_classes': 5} | args)
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape)
  timm.models.save_for_hf(model, folder, safe_serialization=True)
  return model.eval()


def scaled(torch, images, mean, std):
  images = images / np.float32(255)
  images = (images - np.float32(mean)) / np.float32(std)
  return torch.from_numpy(images.transpose(0, 3, 1, 2).astype(np.float32))


@pytest.mark.parametrize('kind', BOTH | NUMBERS)
def test_theirs_gives_its_numbers_here(tmp_path, timm, torch, kind):
  model = save_theirs(timm, torch, kind, tmp_path / 'x')
  ours = opening.open_checkpoint(str(tmp_path / 'x'))
  images = random_images(ours.image_size)
  config = model.pretrained_cfg
  np.testing.assert_array_equal(ours.preprocessing.mean, config['mean'])
  np.testing.assert_array_equal(ours.preprocessing.std, config['std'])
  assert ours.preprocessing.interpolation == config['interpolation']
  if resnet_of(kind):
    as_originals(timm, model, resnet_of(kind))
  with torch.inference_mode():
    want = model(scaled(torch, images, config['mean'], config['std'])).numpy()
  difference = relative_difference(logits_of(ours, images), want)
  print(f'{difference:.1e} of the largest')
  assert difference < (RESNET_TOLERANCE if resnet_of(kind) else TOLERANCE)


@pytest.mark.fast('register with positions')
@pytest.mark.parametrize(
  'kind',
  ['DINOv2 with registers', 'DINOv3', 'EVA-02', 'register with positions'],
)
def test_theirs_gives_its_numbers_at_another_size(tmp_path, timm, torch, kind):
  """The other size is not square, and timm gets our resized positions.

  timm itself resizes them with bicubic interpolation.
  """
  model = save_theirs(timm, torch, kind, tmp_path / 'x')
  native = opening.open_checkpoint(str(tmp_path / 'x'))
  name, args = NUMBERS[kind]
  images_of = model.pretrained_cfg['mean'], model.pretrained_cfg['std']
  grid = (3, 5)
  size = tuple(native.model.patch_size * n for n in grid)
  theirs = timm.create_model(
    name, **{'num_classes': 5} | args | {'img_size': size}
  )
  state = model.state_dict()
  if 'pos_embed' in state:
    extra = 0 if model.no_embed_class else model.num_prefix_tokens
    old = native.model.grid(native.image_size)
    table = posemb.resize(state['pos_embed'].numpy(), old, grid, extra)
    state['pos_embed'] = torch.from_numpy(table)
  theirs.load_state_dict(state)
  images = random_images(size)
  with torch.inference_mode():
    want = theirs.eval()(scaled(torch, images, *images_of)).numpy()
  got = logits_of(transfer.resized(native, size), images)
  assert relative_difference(got, want) < TOLERANCE


@pytest.mark.parametrize('kind', BOTH | ARRAYS)
def test_theirs_read_and_written_is_the_same(tmp_path, timm, torch, kind):
  save_theirs(timm, torch, kind, tmp_path / 'theirs')
  ours = opening.open_checkpoint(str(tmp_path / 'theirs'))
  want = load_file(tmp_path / 'theirs' / 'model.safetensors')
  if kind == 'class token without position':
    # Ours has one for every token.
    cls = np.zeros((1, 1, want['pos_embed'].shape[-1]), np.float32)
    want['pos_embed'] = np.concatenate([cls, want['pos_embed']], 1)
  convert.write(ours.weights(), str(tmp_path / 'ours'), 'float32')
  assert_arrays_equal(load_file(tmp_path / 'ours/model.safetensors'), want)
  again = opening.open_checkpoint(str(tmp_path / 'ours'))
  assert again.model == ours.model
  assert again.image_size == ours.image_size
  assert again.preprocessing == ours.preprocessing
  config = json.loads((tmp_path / 'theirs/config.json').read_text())
  name = json.loads((tmp_path / 'ours/config.json').read_text())['architecture']
  if kind == 'DeiT':
    name = name.replace('vit', 'deit')
  assert name == config['architecture']


OURS = {
  'not square': ((32, 48), TINY),
  'attention pooling': ((32, 32), TINY | {'pool': 'map'}),
  'scan': ((32, 32), TINY | {'scan': True}),
  'distilled': ((32, 48), TINY | {'name': 'deit'}),
  'switches': (
    (32, 48),
    TINY
    | {
      'registers': 2,
      'norm': 'rms',
      'layer_scale': 0.1,
      'qkv_bias': False,
      'qk_norm': True,
      'attention_norm': True,
      'mlp_norm': True,
    },
  ),
  'mean, normalised': (
    (32, 32),
    TINY
    | {'pool': 'gap', 'norm_pooled': True, 'registers': 1, 'gelu': 'quick'},
  ),
  'hybrid': ((64, 96), TINY | HYBRID | {'stem_layers': (2, 2, 2, 2)}),
  'BiT': ((64, 96), TINY_BIT | {'scan': True}),
}


def test_other_layers_than_those_of_vit_are_refused(tmp_path, timm, torch):
  """Their arrays have the same names and shapes, but the outputs differ."""
  model = timm.create_model(
    'vit_base_patch16_rpn_224',
    **{'embed_dim': 64, 'depth': 2, 'num_heads': 2, 'num_classes': 5},
    **{'qkv_bias': True, 'fc_norm': False},
  )
  timm.models.save_for_hf(model, tmp_path / 'x', safe_serialization=True)
  with pytest.raises(ValueError, match='layers of type ResPostBlock'):
    opening.open_checkpoint(str(tmp_path / 'x'))


def test_the_originals_of_dinov2_are_read(tmp_path, timm, torch):
  """With their keys, and positions of the class token beside registers."""
  torch.manual_seed(0)
  name = 'vit_small_patch14_reg4_dinov2'
  model = timm.create_model(name, depth=2, img_size=28).eval()
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape)
  state = dict(model.state_dict())
  state['register_tokens'] = state.pop('reg_token')
  of_cls = torch.randn(1, 1, 384)
  state['pos_embed'] = torch.cat([of_cls, state['pos_embed']], 1)
  state['cls_token'] = state['cls_token'] - of_cls
  state['mask_token'] = torch.zeros(1, 384)
  torch.save(state, tmp_path / 'x.pth')
  ours = opening.open_checkpoint(str(tmp_path / 'x.pth'))
  images = random_images((28, 28))
  with torch.inference_mode():
    want = model(scaled(torch, images, (0.5,) * 3, (0.5,) * 3)).numpy()
  assert relative_difference(logits_of(ours, images), want) < TOLERANCE


def test_what_patches_leave_over_of_an_image_is_not_seen(
  tmp_path, timm, torch, caplog
):
  model = timm.create_model('vit_tiny_patch16_224', **SLIM, img_size=[50, 37])
  model.eval()
  timm.models.save_for_hf(model, tmp_path / 'x', safe_serialization=True)
  ours = opening.open_checkpoint(str(tmp_path / 'x'))
  assert ours.image_size == (48, 32)
  assert any('50x37 pixels, which patches of 16' in x for x in caplog.messages)
  images = random_images((50, 37))
  with torch.inference_mode():
    want = model(scaled(torch, images, (0.5,) * 3, (0.5,) * 3)).numpy()
  got = logits_of(ours, images[:, :48, :32])
  assert relative_difference(got, want) < TOLERANCE


NOTES = dict.fromkeys(
  ('BiT', 'hybrid'), ['timm has other epsilons than the original code']
)


@pytest.fixture
def changed_timm(timm, monkeypatch):
  """Gives a function that changes the ResNets that timm creates after it."""
  create = timm.create_model

  def change(resnet):
    def create_model(*args, **kwargs):
      model = create(*args, **kwargs)
      as_originals(timm, model, resnet)
      return model

    monkeypatch.setattr(timm, 'create_model', create_model)

  return change


def check_there(folder, checkpoint, resnet, changed_timm):
  """Compares our outputs with timm's; for a ResNet, with a changed timm too."""
  difference = compare_there(folder, checkpoint)
  print(f'{difference:.1e} of the largest')
  assert difference < UNCHANGED_TOLERANCE.get(resnet, TOLERANCE)
  if resnet:
    changed_timm(resnet)
    difference = compare_there(folder, checkpoint)
    print(f"{difference:.1e} with the originals' epsilons and float64")
    assert difference < RESNET_TOLERANCE


def compare_there(folder, checkpoint):
  """Returns the relative difference of timm's outputs and ours."""
  peer = timm_peer.open_peer(str(folder))
  assert peer.framework.startswith('timm ')
  assert peer.image_size == checkpoint.image_size
  images = random_images(checkpoint.image_size)
  return relative_difference(peer.run(images), logits_of(checkpoint, images))


@pytest.mark.fast('cls')
@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_before_a_norm_positions_take_the_bias_of_the_patches(
  tmp_path, timm, pool
):
  fields = TINY | {'pre_norm': True, 'pool': pool}
  checkpoint = random_checkpoint(None, (32, 48), **fields)
  weights = checkpoint.weights()
  convert.write(weights, str(tmp_path / 'x'), 'float32')
  assert 'embedding/bias' in weights.arrays
  assert 'patch_embed.proj.bias' not in load_file(
    tmp_path / 'x/model.safetensors'
  )
  assert compare_there(tmp_path / 'x', checkpoint) < TOLERANCE


@pytest.mark.fast(
  'not square',
  'attention pooling',
  'scan',
  'distilled',
  'switches',
  'mean, normalised',
)
@pytest.mark.parametrize('kind', OURS)
def test_ours_gives_its_numbers_there(tmp_path, changed_timm, kind):
  size, fields = OURS[kind]
  checkpoint = dataclasses.replace(
    random_checkpoint(None, size, **fields),
    preprocessing=Preprocessing(0, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 'bicubic'),
  )
  notes = convert.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  resnet = resnet_of(kind)
  starts = [re.split('[,.] ', note)[0] for note in notes]
  assert starts == NOTES.get(resnet, [])
  check_there(tmp_path / 'x', checkpoint, resnet, changed_timm)
  back = opening.open_checkpoint(str(tmp_path / 'x'))
  assert back.class_names == checkpoint.class_names
  assert back.preprocessing == dataclasses.replace(
    checkpoint.preprocessing, resize_like='torchvision'
  )
  assert back.model == checkpoint.model.clone(scan=False)
  assert_arrays_equal(back.weights().arrays, checkpoint.weights().arrays)


@pytest.mark.usefixtures('timm')
def test_two_bytes_a_weight(tmp_path):
  checkpoint = random_checkpoint(None, (32, 32), **TINY)
  convert.write(checkpoint.weights(), str(tmp_path / 'x'), 'bfloat16')
  stored = load_file(tmp_path / 'x/model.safetensors')
  assert {x.dtype for x in stored.values()} == {np.dtype('bfloat16')}
  rounded = opening.open_checkpoint(str(tmp_path / 'x'))
  arrays = checkpoint.weights().arrays
  assert_arrays_equal(
    rounded.weights().arrays,
    {key: x.astype('bfloat16').astype('float32') for key, x in arrays.items()},
  )
  assert compare_there(tmp_path / 'x', rounded) < TOLERANCE
