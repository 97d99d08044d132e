"""config.json of transformers, written and read."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints.formats.hf_folder import (
  SIZE,
  TINY,
  TINY_BIT,
  Folder,
  drop,
  put,
)
from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import hf, hf_families, image_configs

# What BitConfig works out of its other values, and writes nevertheless.
DERIVED = {'out_features', 'out_indices', 'stage_names', 'drop_path_rate'}
FOR_TRAINING = {
  'attention_probs_dropout_prob',
  'hidden_dropout_prob',
  'initializer_range',
}


@pytest.mark.parametrize('fields', [TINY, TINY_BIT], ids=['vit', 'bit'])
def test_the_configuration_is_what_transformers_would_write(
  tmp_path, transformers, fields
):
  checkpoint = random_checkpoint(None, SIZE, **fields)
  hf.write(checkpoint.weights(), str(tmp_path / 'ours'), 'float32')
  model, report = transformers.AutoModelForImageClassification.from_pretrained(
    tmp_path / 'ours', output_loading_info=True
  )
  assert not any(report.values())
  model.save_pretrained(tmp_path / 'theirs')
  ours, theirs = (
    json.loads((tmp_path / side / 'config.json').read_text())
    for side in ('ours', 'theirs')
  )
  theirs.pop('transformers_version')
  if fields is TINY_BIT:
    for key in DERIVED:
      theirs.pop(key)
  else:
    # Of whoever trains it on.
    for key in FOR_TRAINING:
      assert ours[key] == getattr(transformers.ViTConfig(), key)
  assert ours == theirs
  processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'ours')
  processor.save_pretrained(tmp_path / 'theirs')
  ours, theirs = (
    json.loads((tmp_path / side / image_configs.FILE).read_text())
    for side in ('ours', 'theirs')
  )
  assert ours == theirs


def test_class_names(tmp_path, transformers):
  """Two classes may share a name; numbered names count as missing."""
  names = ('crane', 'crane', 'LABEL_2', 'été', '4', '', 'x')
  checkpoint = dataclasses.replace(
    random_checkpoint(None, SIZE, **TINY), class_names=names
  )
  hf.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  assert opening.open_checkpoint(str(tmp_path / 'x')).class_names == names
  config = transformers.AutoConfig.from_pretrained(tmp_path / 'x')
  assert config.id2label == dict(enumerate(names))
  unnamed = random_checkpoint(None, SIZE, names=False, **TINY)
  hf.write(unnamed.weights(), str(tmp_path / 'y'), 'float32')
  assert opening.open_checkpoint(str(tmp_path / 'y')).class_names == ()
  config = transformers.AutoConfig.from_pretrained(tmp_path / 'y')
  assert config.num_labels == 7
  # Whatever their order in the file is.
  config = {'id2label': {'1': 'crane', '0': 'heron'}}
  assert hf_families.class_names(config, 2, 'x') == ('heron', 'crane')


# A change of config.json or of the arrays, and the error.
REFUSED = {
  'model_type': ({'model_type': 'swin'}, "model_type is 'swin'"),
  'activation': (
    {'hidden_act': 'relu'},
    "hidden_act is 'relu'.*gelu_pytorch_tanh, .*, quick_gelu",
  ),
  'sizes': (
    {'num_hidden_layers': 10**9, 'hidden_size': 64},
    'vit.: hidden_size is 64, .*have 32; num_hidden_layers is 1000000000, and '
    'the arrays have 2',
  ),
  'image size': (
    {'image_size': 64},
    "of 64x64 pixels have 64 patches of 8, but '.*' has 17 tokens",
  ),
  'heads': ({'num_attention_heads': 5}, 'width 32.*model.heads 5'),
  'class names': ({'id2label': {'0': 'a', '1': 'b'}}, 'id2label.*0 to 6'),
  'no embedding': (
    drop('vit.embeddings.patch_embeddings.projection.weight'),
    'embedding/kernel.*missing',
  ),
  'left over': (
    put('vit.encoder.layer.0.lambda_1', (32,)),
    'array .vit.encoder.layer.0.lambda_1',
  ),
}


@pytest.mark.edge
@pytest.mark.parametrize(('change', 'message'), REFUSED.values(), ids=REFUSED)
def test_bad_directories_are_refused_by_key(folder, change, message):
  if callable(change):
    folder.change_arrays(change)
  else:
    folder.change_config(**change)
  with pytest.raises(ValueError, match=message) as e:
    folder.open()
  assert str(folder.path) in str(e.value)


@pytest.mark.edge
def test_another_bit_is_refused_by_key(bit_folder):
  bit_folder.change_config(num_groups=16, depths=[1, 10**9, 1])
  message = 'depths is .*the arrays have .1, 2, 1.*num_groups is 16.*only 32'
  with pytest.raises(ValueError, match=message):
    bit_folder.open()


def test_deit_without_distillation_is_a_vit(folder):
  want = folder.open().weights().arrays
  folder.change_config(model_type='deit')
  folder.change_arrays(
    lambda arrays: {
      f'de{key.removeprefix("v")}' if key.startswith('vit.') else key: x
      for key, x in arrays.items()
    }
  )
  arrays = load_file(folder.path / 'model.safetensors')
  assert 'deit.embeddings.cls_token' in arrays
  got = folder.open().weights().arrays
  for key in want:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)


def test_what_a_configuration_leaves_out_has_their_defaults(
  folder, transformers
):
  folder.change_config(
    hidden_act=..., layer_norm_eps=..., qkv_bias=..., id2label=...
  )
  folder.change_config(patch_size=[8, 8])
  defaults = transformers.ViTConfig()
  model = folder.open().model
  assert (model.gelu, defaults.hidden_act) == ('exact', 'gelu')
  assert model.layer_norm_epsilon == defaults.layer_norm_eps == 1e-12
  folder.change_config(image_size=...)
  with pytest.raises(ValueError, match='224x224 pixels have 784 patches'):
    folder.open()
  folder.change_config(image_size=32, num_attention_heads=...)
  with pytest.raises(ValueError, match='model.heads 12'):
    folder.open()
  assert (defaults.num_attention_heads, defaults.image_size) == (12, 224)


def test_the_stride_of_a_bit_is_32_unless_stated(tmp_path, transformers):
  """Four stages have this stride, five stages have 64."""
  assert transformers.BitConfig().output_stride == 32
  for stages in (4, 5):
    fields = TINY_BIT | {'layers': (1,) * stages}
    checkpoint = random_checkpoint(None, (64, 64), **fields)
    folder = Folder(tmp_path / str(stages), checkpoint)
    folder.change_config(output_stride=...)
    if stages == 4:
      assert folder.open().model.layers == (1,) * 4
      continue
    with pytest.raises(ValueError, match='output_stride is 32, .* have 64'):
      folder.open()


@pytest.mark.edge
@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      TINY | {'pool': 'gap', 'representation_size': 20, 'num_classes': 0},
      'representation_size 20.*--head=drop',
    ),
    (TINY_BIT | {'version': 1}, 'version 1, only 2.*onnx'),
  ],
)
def test_what_transformers_has_no_model_for_is_refused(
  tmp_path, fields, message
):
  checkpoint = random_checkpoint(None, (64, 64), **fields)
  with pytest.raises(ValueError, match=message):
    hf.write(checkpoint.weights(), str(tmp_path / 'x'), 'float32')
  assert not list(tmp_path.iterdir())
