"""DETR of transformers and of its original."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from tests.projects.detr.conftest import random_detr
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import (
  hf,
  table,
  tensors,
)
from vit_jax.convert import __main__ as convert
from vit_jax.convert import orbax
from vit_jax.projects.detr import hf_format as detr_keys

# Of the largest output, float32 on both sides, behind a ResNet.
TOLERANCE = 1e-4
SIZE = (64, 96)
FIELDS = {
  'name': 'detr',
  'num_queries': 5,
  'width': 64,
  'heads': 4,
  'mlp_dim': 48,
  'encoder_layers': 1,
  'decoder_layers': 2,
  'backbone_layers': (1, 2, 1, 1),
  'backbone_width': 32,
}
MASKS = {'masks': True, 'heads': 8}


def make(**fields):
  return dataclasses.replace(
    random_detr(SIZE, **(FIELDS | fields)),
    preprocessing=table.Preprocessing(
      mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
  )


def write(checkpoint, folder):
  hf.write(checkpoint.weights(), str(folder), 'float32')


def assert_same(got, want):
  assert got.model == want.model
  assert got.preprocessing == want.preprocessing
  assert got.class_names == want.class_names
  got, want = got.weights().arrays, want.weights().arrays
  assert got.keys() == want.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(got[key], x, err_msg=key)


def assert_close(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape
  assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


def padded(torch):
  """Returns normalised images and where they are padded, ours and theirs."""
  x = np.random.default_rng(1).standard_normal((2, *SIZE, 3), np.float32)
  outside = np.zeros((2, *SIZE), bool)
  outside[1, 40:], outside[1, :, 70:] = True, True
  x[outside] = 0
  return (
    x,
    outside,
    torch.from_numpy(x.transpose(0, 3, 1, 2).copy()),
    torch.from_numpy(~outside).long(),
  )


@pytest.mark.slow
@pytest.mark.parametrize('task', ['ObjectDetection', 'Segmentation'])
def test_theirs_gives_its_numbers_here(tmp_path, torch, transformers, task):
  """A ResNet and a batch that is padded; every array away from its start."""
  resnet = transformers.ResNetConfig(
    embedding_size=32,
    hidden_sizes=[128, 256, 512, 1024],
    depths=[1, 2, 1, 1],
    out_features=['stage1', 'stage2', 'stage3', 'stage4'],
  )
  config = transformers.DetrConfig(
    use_timm_backbone=False,
    backbone_config=resnet,
    d_model=64,
    num_queries=5,
    encoder_layers=2,
    decoder_layers=1,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    num_labels=6,
  )
  torch.manual_seed(0)
  model = getattr(transformers, f'DetrFor{task}')(config).eval()
  with torch.no_grad():
    for key, x in model.state_dict().items():
      if x.is_floating_point():
        x.mul_(1 + 0.1 * torch.rand_like(x))
        if not key.endswith('running_var'):
          x.add_(0.02 * torch.randn_like(x))
  model.save_pretrained(tmp_path)
  checkpoint = opening.open_checkpoint(str(tmp_path))
  assert checkpoint.image_size == (800, 1333)
  assert checkpoint.model.masks == (task == 'Segmentation')
  x, outside, pixels, mask = padded(torch)
  with torch.inference_mode():
    want = model(pixel_values=pixels, pixel_mask=mask)
  logits, aux = jax.jit(
    lambda p, *xs: checkpoint.model.apply({'params': p}, *xs)
  )(checkpoint.params, x, outside)
  assert_close(logits, want.logits)
  assert_close(aux['boxes'][-1], want.pred_boxes)
  if task == 'Segmentation':
    assert_close(aux['mask_logits'], want.pred_masks)


@pytest.mark.fast('fields0')
@pytest.mark.parametrize('fields', [{}, MASKS | {'width': 128}])
def test_transformers_runs_what_is_written(
  tmp_path, torch, transformers, fields
):
  checkpoint = make(**fields)
  write(checkpoint, tmp_path / 'x')
  task = 'Segmentation' if fields else 'ObjectDetection'
  model, report = getattr(transformers, f'DetrFor{task}').from_pretrained(
    tmp_path / 'x', output_loading_info=True
  )
  assert not any(report.values())
  x, outside, pixels, mask = padded(torch)
  with torch.inference_mode():
    want = model.eval()(pixel_values=pixels, pixel_mask=mask)
  logits, aux = jax.jit(
    lambda p, *xs: checkpoint.model.apply({'params': p}, *xs)
  )(checkpoint.params, x, outside)
  assert_close(logits, want.logits)
  assert_close(aux['boxes'][-1], want.pred_boxes)


@pytest.mark.slow
def test_a_wrong_box_fails_the_check(tmp_path, capsys):
  checkpoint = make(backbone='plain', backbone_layers=(1, 1))
  whole, wrong = str(tmp_path / 'x'), str(tmp_path / 'y')
  orbax.write(checkpoint, whole, 'float32')
  params = jax.tree.map(np.array, checkpoint.params)
  params['bbox_embed']['layers_2']['bias'] += 1
  changed = dataclasses.replace(checkpoint, params=params)
  orbax.write(changed, wrong, 'float32')
  assert convert.main(['--check', whole, wrong]) == 1
  out = capsys.readouterr().out
  assert 'ABOVE' in out and re.search(r'the same for (\d+) of \1\n', out)


@pytest.mark.parametrize('fields', [{}, MASKS | {'width': 128}])
def test_a_directory_has_every_array_of_the_model(tmp_path, fields):
  checkpoint = make(**fields)
  write(checkpoint, tmp_path / 'x')
  assert_same(opening.open_checkpoint(str(tmp_path / 'x')), checkpoint)


def test_keys_of_a_dilated_model_are_those_of_timm(tmp_path):
  """And what its directory does not say is as in the published models."""
  checkpoint = make(dilation=True, heads=8)
  arrays = table.ours_to_file(
    checkpoint.weights().arrays, detr_keys.table_of(detr_keys.TIMM, '')
  )
  body = 'model.backbone.conv_encoder.model'
  assert {
    f'{body}.conv1.weight',
    f'{body}.bn1.running_mean',
    f'{body}.layer2.1.bn3.running_var',
    f'{body}.layer2.0.downsample.0.weight',
    f'{body}.layer2.0.downsample.1.bias',
    'model.decoder.layers.1.encoder_attn.q_proj.bias',
    'model.decoder.layers.1.encoder_attn_layer_norm.weight',
    'model.encoder.layers.0.fc1.weight',
    'class_labels_classifier.weight',
  } <= arrays.keys()
  names = dict(enumerate(checkpoint.class_names))
  config = {'model_type': 'detr', 'dilation': True, 'id2label': names}
  path = str(tmp_path / 'x')
  tensors.write_folder(path, {'config.json': config}, arrays, 'float32')
  back = opening.open_checkpoint(path)
  assert_same(back, checkpoint)
  assert back.image_size == (800, 1333)


@pytest.mark.parametrize(
  ('stated', 'size'),
  [
    ({'size': {'shortest_edge': 64, 'longest_edge': 96}}, (64, 96)),
    # As older versions wrote it.
    ({'size': 64, 'max_size': 96}, (64, 96)),
    ({'size': {'height': 96, 'width': 64}}, (96, 64)),
  ],
)
def test_the_sizes_of_a_processor_are_read(folder, stated, size):
  place = folder / 'preprocessor_config.json'
  images = json.loads(place.read_text()) | stated
  place.write_text(json.dumps(images))
  assert opening.open_checkpoint(str(folder)).image_size == size


@pytest.mark.fast('DETR-R50-DC5.safetensors-fields0')
@pytest.mark.parametrize(
  ('name', 'fields'),
  [
    ('DETR-R50-DC5.safetensors', {'heads': 8, 'dilation': True}),
    ('detr-r50-panoptic.safetensors', MASKS | {'width': 128, 'heads': 16}),
  ],
)
def test_files_of_the_original_open(tmp_path, name, fields, caplog):
  checkpoint = make(names=False, **fields)
  prefix = 'detr.' if 'masks' in fields else ''
  arrays = table.ours_to_file(
    checkpoint.weights().arrays,
    detr_keys.table_of(detr_keys.ORIGINAL, prefix),
  )
  for key in (
    'backbone.0.body.layer2.1.bn3.running_var',
    'backbone.0.body.layer2.0.downsample.1.weight',
    'transformer.decoder.layers.1.multihead_attn.in_proj_bias',
    'transformer.encoder.layers.0.self_attn.out_proj.weight',
    'query_embed.weight',
    'bbox_embed.layers.2.bias',
  ):
    assert f'{prefix}{key}' in arrays
  # As torch.nn.MultiheadAttention has them, one after another.
  attention = 'decoder_layer1/multihead_attn'
  key = f'{prefix}transformer.decoder.layers.1.multihead_attn.in_proj_bias'
  ours = checkpoint.weights().arrays
  for i, part in enumerate(('query', 'key', 'value')):
    want = ours[f'{attention}/{part}/bias'].ravel()
    np.testing.assert_array_equal(np.split(arrays[key], 3)[i], want)
  # The name of the file says it, and not that of its folder.
  path = str(tmp_path / 'dc5' / name)
  (tmp_path / 'dc5').mkdir()
  tensors.write_safetensors(path, arrays)
  back = opening.open_checkpoint(path)
  assert back.image_size == (800, 1333)
  assert_same(back, checkpoint)
  assert f'The last stage of {path} is read as' in caplog.text
  is_dilated = 'its name contains "dc5"' in caplog.text
  assert is_dilated == checkpoint.model.dilation


def test_a_pth_file_of_training_opens(tmp_path, torch):
  """As the original saves it: parameters beside flags and the optimizer's."""
  checkpoint = make(names=False, heads=8)
  arrays = table.ours_to_file(
    checkpoint.weights().arrays, detr_keys.table_of(detr_keys.ORIGINAL, '')
  )
  model = {key: torch.from_numpy(x.copy()) for key, x in arrays.items()}
  # Where it was trained with a BatchNorm that is not frozen.
  model['backbone.0.body.bn1.num_batches_tracked'] = torch.tensor(7)
  path = tmp_path / 'checkpoint.pth'
  torch.save({'model': model, 'epoch': 3}, path)
  assert_same(opening.open_checkpoint(str(path)), checkpoint)


@pytest.fixture
def folder(tmp_path):
  write(make(), tmp_path / 'x')
  return tmp_path / 'x'


@pytest.mark.edge
@pytest.mark.parametrize(
  ('file', 'change', 'message'),
  [
    ('config.json', {'activation_function': 'gelu'}, "'gelu'.*'relu'"),
    (
      'config.json',
      {'decoder_attention_heads': 2},
      'heads is 2, .* only 4',
    ),
    ('preprocessor_config.json', {'size': {'height': -1}}, 'size is'),
  ],
)
def test_what_is_no_model_here_is_refused(folder, file, change, message):
  config = json.loads((folder / file).read_text())
  (folder / file).write_text(json.dumps(config | change))
  with pytest.raises(ValueError, match=message):
    opening.open_checkpoint(str(folder))
