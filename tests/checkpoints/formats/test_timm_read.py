"""Arrays that vit_jax does not support, and files without a configuration."""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoints.formats.timm_folder import (
  TINY,
  TINY_BIT,
  Folder,
  assert_arrays_equal,
)
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import npz, recognise, timm_config
from vit_jax.checkpoints.formats import timm as convert

TOLERANCE = 1e-5


@pytest.fixture
def folder(tmp_path):
  return Folder(tmp_path / 'x')


ONE = np.ones(1, np.float32)


@pytest.mark.edge
def test_unsupported_models_are_named(folder, timm, tmp_path):
  name = 'swin_tiny_patch4_window7_224'
  model = timm.create_model(name, depths=(1, 1, 1, 1), embed_dim=24)
  arrays = {key: x.numpy() for key, x in model.state_dict().items()}
  save_file(arrays, tmp_path / 'x.safetensors')
  with pytest.raises(ValueError, match='It looks like Swin'):
    opening.open_checkpoint(str(tmp_path / 'x.safetensors'))
  # Also in a directory, and by a single array.
  key = 'blocks.0.attn.rel_pos_bias'
  folder.change_arrays(**{key: ONE})
  with pytest.raises(ValueError, match=f'{key}.* It looks like BEiT, data2vec'):
    opening.open_checkpoint(str(folder))


@pytest.mark.edge
@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    # The first layer decides whether all layers have the array.
    ({'blocks.0.attn.qkv.bias': None}, "has the array 'blocks.1.attn.qkv.bias"),
    # Not a multiple of three.
    (
      {'blocks.1.attn.qkv.bias': np.zeros(145, np.float32)},
      r"'blocks.1.attn.qkv.bias \(query\)' of shape \(49,\), but \(48,\)",
    ),
    ({'attn_pool.latent': ONE}, "architecture means pool 'cls', .* need 'map'"),
    ({'cls_token': None}, "pool 'cls', but the arrays need 'gap'"),
  ],
)
def test_wrong_arrays_are_refused(folder, changes, message):
  folder.change_arrays(**changes)
  with pytest.raises(ValueError, match=message) as e:
    opening.open_checkpoint(str(folder))
  assert str(folder) in str(e.value)


def other(state, torch):
  """Returns zeros with the same names, which must not be read."""
  return {key: torch.zeros_like(x) for key, x in state.items()}


def under(prefix, state):
  return {prefix + key: x for key, x in state.items()}


# What training code saves around a state dict.
WRAPPERS = {
  'DDP and compile': lambda state, torch: {
    'model': under('module._orig_mod.', state)
  },
  'model_state_dict': lambda state, torch: {
    'model_state_dict': state,
    'optimizer_state_dict': torch.optim.Adam([torch.ones(2)]).state_dict(),
    'best_acc': np.float64(93.1),
    'best_epoch': np.int64(7),
    'class_weights': np.ones(3, np.float32),
  },
  'flags': lambda state, torch: {
    'model': state,
    'args': argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath('x')),
  },
}
# The same with arrays that are left out, and their names.
WRAPPERS_OF_MORE = {
  'Lightning, weighted loss': (
    lambda state, torch: {
      'state_dict': under('model.', state)
      | {'criterion.weight': torch.ones(5)},
      'hyper_parameters': collections.Counter(lr=1),
    },
    'state_dict.criterion.weight',
  ),
  'torchvision': (
    lambda state, torch: {
      'model': other(state, torch),
      'model_ema': under('module.', state) | {'n_averaged': torch.tensor(9)},
    },
    'model., model_ema.n_averaged',
  ),
  'DINO': (
    lambda state, torch: {
      'student': under('module.backbone.', other(state, torch)),
      'teacher': under('backbone.', state)
      | {'head.mlp.0.weight': torch.ones(2)},
    },
    'student.module.backbone., teacher.head.mlp.0.weight',
  ),
}


@pytest.mark.parametrize('name', [*WRAPPERS, *WRAPPERS_OF_MORE])
def test_files_without_a_configuration_are_read(tmp_path, torch, caplog, name):
  fields = TINY | {'width': 192, 'heads': 3, 'gelu': 'exact'}
  want = random_checkpoint(None, (32, 32), names=False, **fields)
  convert.write(want.weights(), str(tmp_path / 'x'), 'float32')
  stored = load_file(tmp_path / 'x/model.safetensors')
  state = {key: torch.tensor(x) for key, x in stored.items()}
  wrap, left_out = WRAPPERS_OF_MORE.get(name) or (WRAPPERS[name], None)
  torch.save(wrap(state, torch), tmp_path / 'x.pth')
  got = opening.open_checkpoint(str(tmp_path / 'x.pth'))
  assert got.model == want.model
  assert got.image_size == (32, 32)
  assert_arrays_equal(got.weights().arrays, want.weights().arrays)
  *more, warning = caplog.messages
  assert len(more) == bool(left_out)
  if left_out:
    assert f'leaves out {left_out}.' in more[0]
  assert 'does not store its configuration. vit_jax assumes' in warning
  assert 'images of 32x32 pixels' in warning
  assert 'without position embedding' not in warning


def test_the_pooling_of_a_file_alone_is_a_stated_assumption(
  tmp_path, timm, torch, caplog
):
  torch.manual_seed(0)
  model = timm.create_model(
    'vit_tiny_patch16_224',
    **{'global_pool': 'avg', 'fc_norm': False, 'num_classes': 5},
    **{'depth': 2, 'img_size': 32},
  ).eval()
  for x in model.parameters():
    torch.nn.init.normal_(x, std=0.1)
  file = str(tmp_path / 'x.pth')
  torch.save(model.state_dict(), file)
  alone = opening.open_checkpoint(file)
  (warning,) = caplog.messages
  assert "pool 'cls'" in warning
  assert 'convert FILE DIRECTORY --to=timm' in warning
  # As the warning says.
  convert.write(alone.weights(), str(tmp_path / 'x'), 'float32')
  place = tmp_path / 'x/config.json'
  config = json.loads(place.read_text())
  config['model_args']['global_pool'] = 'avg'
  place.write_text(json.dumps(config))
  stated = opening.open_checkpoint(str(tmp_path / 'x'))
  images = random_images((32, 32))
  with torch.inference_mode():
    scaled = torch.tensor(images).permute(0, 3, 1, 2) / 127.5 - 1
    want = model(scaled).numpy()
  assert relative_difference(logits_of(stated, images), want) < TOLERANCE
  assert relative_difference(logits_of(alone, images), want) > TOLERANCE
  config['model_args']['global_pool'] = 'max'
  place.write_text(json.dumps(config))
  with pytest.raises(ValueError, match="global_pool is 'max'; vit_jax"):
    opening.open_checkpoint(str(tmp_path / 'x'))


def test_a_mean_without_class_token_lacks_no_position(tmp_path, caplog):
  fields = TINY | {'width': 192, 'heads': 3, 'pool': 'gap'}
  folder = Folder(tmp_path / 'x', **fields)
  opening.open_checkpoint(f'{folder}/model.safetensors')
  (warning,) = caplog.messages
  assert 'does not store its configuration. vit_jax assumes' in warning
  assert 'without position embedding' not in warning
  # Nor does it matter whether it would have one.
  for without in (False, True):
    folder.change_config(model_args__no_embed_class=without)
    assert opening.open_checkpoint(str(folder)).model.pool == 'gap'


def test_a_norm_after_pooling_is_that_of_a_mean(tmp_path):
  """timm's classifiers of the class token lack this norm."""
  fields = TINY | {'width': 192, 'heads': 3, 'norm_pooled': True}
  folder = Folder(tmp_path / 'x', **fields)
  model = opening.open_checkpoint(f'{folder}/model.safetensors').model
  assert (model.pool, model.registers, model.norm_pooled) == ('gap', 1, True)


def test_what_patches_after_a_stem_leave_over_is_dropped(tmp_path, caplog):
  folder = Folder(tmp_path / 'x', (64, 64), **TINY | {'stem_width': 64})
  folder.change_config(model_args__img_size=[72, 64])
  assert opening.open_checkpoint(str(folder)).image_size == (64, 64)
  (warning,) = caplog.messages
  assert '72x64 pixels, which patches of 32 do not tile' in warning


@pytest.mark.parametrize(('name', 'first'), [('vit', 1), ('deit', 2)])
def test_a_class_token_without_position_is_told_by_the_square(
  tmp_path, caplog, name, first
):
  fields = TINY | {'name': name, 'width': 192, 'heads': 3}
  folder = Folder(tmp_path / 'x', **fields)
  positions = folder.arrays()['pos_embed']
  folder.change_arrays(pos_embed=positions[:, first:])
  got = opening.open_checkpoint(f'{folder}/model.safetensors')
  name = 'Transformer/posembed_input/pos_embedding'
  table = got.weights().arrays[name]
  assert got.image_size == (32, 32)
  (warning,) = caplog.messages
  assert 'images of 32x32 pixels' in warning
  assert 'a class token without position embedding' in warning
  np.testing.assert_array_equal(table[:, first:], positions[:, first:])
  assert not table[:, :first].any()
  assert len(caplog.messages) == 1


def test_old_files_with_a_representation_layer_are_read(tmp_path, caplog):
  """timm had Sequential(fc, act=Tanh) there."""
  want = random_checkpoint(None, (32, 32), names=False, **TINY | {'width': 192})
  convert.write(want.weights(), str(tmp_path / 'x'), 'float32')
  arrays = load_file(tmp_path / 'x/model.safetensors')
  rng = np.random.default_rng(0)
  weight, bias, head = (
    rng.normal(size=shape).astype(np.float32)
    for shape in ((10, 192), (10,), (7, 10))
  )
  arrays |= {
    'pre_logits.fc.weight': weight,
    'pre_logits.fc.bias': bias,
    'head.weight': head,
  }
  save_file(arrays, tmp_path / 'x.safetensors')
  got = opening.open_checkpoint(str(tmp_path / 'x.safetensors'))
  assert got.model.representation_size == 10
  images = random_images((32, 32))
  y = logits_of(
    dataclasses.replace(
      got,
      model=got.model.clone(num_classes=0, representation_size=0),
    ),
    images,
  )
  want = np.tanh(y @ weight.T + bias) @ head.T + arrays['head.bias']
  assert relative_difference(logits_of(got, images), want) < TOLERANCE


@pytest.mark.edge
@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({}, 'number of heads, and its width 48 is not .* Give a dir'),
    ({'pos_embed': None}, 'has neither .* nor an image size'),
    (
      {'pos_embed': np.ones((1, 12, 48), np.float32)},
      'position embeddings for 11 patches',
    ),
    ({'blocks.0.attn.q_bias': ONE}, 'like DeiT III, EVA, BEiT and RoPE-ViT'),
    (
      {'blocks.0.attn.qkv.bias': None},
      "lacks 'blocks.0.attn.qkv.bias': .* Give a directory with a config",
    ),
  ],
)
def test_files_that_do_not_say_enough_are_refused(folder, changes, message):
  folder.change_arrays(**changes)
  with pytest.raises(ValueError, match=f'model.safetensors.*{message}'):
    opening.open_checkpoint(f'{folder}/model.safetensors')


def test_the_configuration_that_an_error_shows_opens_the_file(folder):
  with pytest.raises(ValueError, match='such as {') as error:
    opening.open_checkpoint(f'{folder}/model.safetensors')
  shown = str(error.value).partition('such as ')[2].partition('. HEADS')[0]
  folder.put_config(json.loads(shown.replace('HEADS', str(TINY['heads']))))
  model = opening.open_checkpoint(str(folder)).model
  assert (model.width, model.heads) == (TINY['width'], TINY['heads'])


def test_a_perception_encoder_without_its_configuration_is_refused(tmp_path):
  """Its arrays do not show its rotary embeddings."""
  folder = Folder(tmp_path / 'x', **TINY | {'pool': 'map'})
  cls_11D = np.zeros((1, 1, TINY['width']), np.float32)
  folder.change_arrays(cls_token=cls_11D)
  with pytest.raises(ValueError, match='like the Perception Encoder'):
    opening.open_checkpoint(f'{folder}/model.safetensors')


def test_names_of_classes_without_a_head_are_left_out(tmp_path):
  folder = Folder(tmp_path / 'x', **TINY | {'num_classes': 0})
  folder.change_config(pretrained_cfg__label_names=['cat', 'dog'])
  assert opening.open_checkpoint(str(folder)).class_names == ()


def test_resnet_files_without_a_configuration_are_read(tmp_path, caplog):
  want = random_checkpoint(None, names=False, **TINY_BIT)
  convert.write(want.weights(), str(tmp_path / 'x'), 'float32')
  got = opening.open_checkpoint(str(tmp_path / 'x/model.safetensors'))
  assert got.model == want.model
  assert got.image_size == (224, 224)
  assert_arrays_equal(got.weights().arrays, want.weights().arrays)
  (warning,) = caplog.messages
  assert 'vit_jax assumes 224x224 pixels, bilinear' in warning


def test_an_architecture_may_have_a_tag(folder, monkeypatch):
  """A known architecture opens without timm."""
  monkeypatch.setitem(sys.modules, 'timm', None)
  before = opening.open_checkpoint(str(folder))
  name = folder.config()['architecture']
  folder.change_config(architecture=f'{name}.augreg_in21k')
  assert opening.open_checkpoint(str(folder)).model == before.model


def test_timm_reads_the_class_token_unless_told(tmp_path):
  """Even if the file has the norm of a mean."""
  given = Folder(tmp_path / 'x', **TINY, norm_pooled=True)
  config = given.config()
  del config['global_pool'], config['model_args']['global_pool']
  given.put_config(config)
  assert opening.open_checkpoint(str(given)).model.pool == 'cls'


ROTARY = {
  'RotaryEmbeddingDinoV3': ({}, (100.0, 0, (False, False))),
  'RotaryEmbeddingCat': (
    {'in_pixels': False, 'grid_indexing': 'xy', 'ref_feat_shape': [3, 3]},
    (10000.0, 3, (True, True)),
  ),
}


@pytest.mark.parametrize('name', ROTARY)
def test_rotary_embeddings_are_known_by_what_they_are(timm, name):
  given, want = ROTARY[name]
  kind = getattr(timm.layers, name)
  found = timm_config._rotation(kind(16, **given))
  assert tuple(found.values()) == want
  if 'ref_feat_shape' in given:
    # Without it, positions are counted in the image.
    counted = kind(16, **given | {'ref_feat_shape': None})
    assert timm_config._rotation(counted)['rope_side'] == -1
  # No name of timm has these settings.
  others = {'grid_offset': 0.5, 'temperature': None}
  if name == 'RotaryEmbeddingDinoV3':
    others |= {'normalize_coords': 'max', 'min_period': 1.0}
  else:
    others |= {
      'ref_feat_shape': (3, 4),
      'grid_type': 'centered',
      'linear_bands': True,
      'in_pixels': True,
    }
  for field, value in others.items():
    other = kind(16, **given)
    setattr(other, field, value)
    assert not timm_config._rotation(other)


def test_a_distilled_model_is_read_at_its_tokens(tmp_path):
  given = Folder(tmp_path / 'x', **TINY, name='deit')
  given.change_config(model_args__global_pool='avg')
  with pytest.raises(ValueError, match="'dist_token' but pool 'gap'"):
    opening.open_checkpoint(str(given))


def open_and_compare(path, model, images, torch):
  """Opens a file and compares logits of uint8 images with the model's."""
  ours = opening.open_checkpoint(str(path))
  p = ours.preprocessing
  pixels = (images / np.float32(255) - np.float32(p.mean)) / np.float32(p.std)
  pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
  with torch.inference_mode():
    want = model.eval()(pixels).numpy()
  assert relative_difference(logits_of(ours, images), want) < TOLERANCE
  return ours


def noisy(model, torch):
  torch.manual_seed(0)
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape)
  return model


def test_torchvisions_vit_is_read(tmp_path, timm, torch, caplog):
  from torchvision.models import vision_transformer

  model = vision_transformer.VisionTransformer(
    32, 8, 2, 3, 192, 100, num_classes=5, representation_size=20
  )
  torch.save(noisy(model, torch).state_dict(), tmp_path / 'x.pth')
  images = random_images((32, 32))
  ours = open_and_compare(tmp_path / 'x.pth', model, images, torch)
  assert ours.model.heads == 3
  assert ours.preprocessing.mean == (0.485, 0.456, 0.406)
  assert "pool 'cls'" in caplog.text


def test_torchvisions_larger_images_are_not_cut_from_smaller(tmp_path, torch):
  from torchvision.models import vision_transformer

  model = vision_transformer.VisionTransformer(320, 64, 1, 3, 192, 64)
  torch.save(model.state_dict(), tmp_path / 'x.pth')
  ours = opening.open_checkpoint(str(tmp_path / 'x.pth'))
  assert ours.preprocessing.resize_small == 320
  record = {'image': np.zeros((400, 500, 3), np.uint8), 'name': 'x'}
  assert ours.transform()(record)['image'].shape == (320, 320, 3)


def test_a_format_may_be_registered(tmp_path, monkeypatch):
  monkeypatch.setitem(recognise.ARCHIVES, 'mine', __name__)
  assert (
    recognise.format_of({'x': ONE}, recognise.ARCHIVES).__name__ == __name__
  )
  assert recognise.format_of({'y': ONE}, recognise.ARCHIVES) is npz


def matches(arrays):
  return 'x' in arrays


@pytest.mark.fast('vit_small_patch16_dinov3_qkvb-64')
@pytest.mark.parametrize(
  ('name', 'width'),
  [
    ('vit_small_patch16_dinov3_qkvb', 64),
    ('vit_huge_plus_patch16_dinov3', 96),
  ],
)
def test_the_originals_of_dinov3_are_read(
  tmp_path, timm, torch, caplog, name, width
):
  model = timm.create_model(
    name,
    **{'depth': 2, 'embed_dim': width, 'num_heads': 2, 'img_size': 224},
    global_pool='token',
  )
  state = {}
  for key, x in noisy(model, torch).state_dict().items():
    if 'fc1_g' in key or 'fc1_x' in key or 'fc2' in key:
      if 'huge' in name:
        for theirs, ours in (('fc1_g', 'w1'), ('fc1_x', 'w2'), ('fc2', 'w3')):
          key = key.replace(theirs, ours)
    key = key.replace('reg_token', 'storage_tokens').replace(
      'gamma_1', 'ls1.gamma'
    )
    state[key.replace('gamma_2', 'ls2.gamma')] = x
  for i in range(2):
    q = state.pop(f'blocks.{i}.attn.q_bias', None)
    if q is not None:
      v = state.pop(f'blocks.{i}.attn.v_bias')
      # A bias of keys is there, and masked.
      state[f'blocks.{i}.attn.qkv.bias'] = torch.cat([q, torch.ones(width), v])
      state[f'blocks.{i}.attn.qkv.bias_mask'] = torch.ones(3 * width)
  P = width // 2 // 4
  state['rope_embed.periods'] = 100 ** (torch.arange(P) / P)
  state['mask_token'] = torch.zeros(1, width)
  torch.save(state, tmp_path / 'x.pth')
  ours = open_and_compare(
    tmp_path / 'x.pth', model, random_images((224, 224)), torch
  )
  assert (ours.model.heads, ours.model.rope) == (2, 100)
  assert 'SAT-493M' in caplog.text


@pytest.mark.slow
def test_a_wrapper_of_transformers_is_read(tmp_path, transformers, torch):
  config = transformers.TimmWrapperConfig.from_dict(
    {
      'architecture': 'vit_tiny_patch16_224',
      'model_args': {'depth': 2, 'img_size': 32},
      'num_classes': 3,
      'label_names': ['ant', 'bee', 'cat'],
    }
  )
  model = transformers.TimmWrapperForImageClassification(config)
  noisy(model, torch).save_pretrained(tmp_path / 'x')
  images = random_images((32, 32))
  ours = open_and_compare(tmp_path / 'x', model.timm_model, images, torch)
  assert ours.class_names == ('ant', 'bee', 'cat')


def test_grey_images_are_read_and_more_channels_refused(tmp_path, timm, torch):
  grey, four = (
    timm.create_model(
      'vit_tiny_patch16_224', depth=2, img_size=32, in_chans=C, num_classes=5
    )
    for C in (1, 4)
  )
  for name, model in (('grey', grey), ('four', four)):
    timm.models.save_for_hf(
      noisy(model, torch), tmp_path / name, safe_serialization=True
    )
  ours = opening.open_checkpoint(str(tmp_path / 'grey'))
  images = np.repeat(random_images((32, 32))[..., :1], 3, axis=-1)
  p = ours.preprocessing
  pixels = (images[..., :1] / np.float32(255) - p.mean[0]) / p.std[0]
  pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
  with torch.inference_mode():
    want = grey.eval()(pixels).numpy()
  # They use only the first channel's mean and deviation.
  ours = dataclasses.replace(
    ours,
    preprocessing=dataclasses.replace(
      p, mean=(p.mean[0],) * 3, std=(p.std[0],) * 3
    ),
  )
  assert relative_difference(logits_of(ours, images), want) < TOLERANCE
  with pytest.raises(ValueError, match='for images of 4 channels; it must'):
    opening.open_checkpoint(str(tmp_path / 'four'))


def test_the_warning_about_grey_images_names_the_file(tmp_path, caplog):
  folder = Folder(tmp_path / 'x', **TINY | {'width': 192, 'heads': 3})
  kernel = folder.arrays()['patch_embed.proj.weight'][:, :1]
  folder.change_arrays(**{'patch_embed.proj.weight': kernel})
  path = f'{folder}/model.safetensors'
  opening.open_checkpoint(path)
  assert f'{path}: the model takes grey images' in caplog.text
