"""transformers' directories: the same arrays and the same numbers both ways."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints import hf_peer
from tests.checkpoints.formats.hf_folder import (
  QUERY,
  SIZE,
  TINY,
  TINY_BIT,
  drop,
  put,
)
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import hf, image_configs
from vit_jax.checkpoints.formats.table import Preprocessing

# Sums of float32 in another order.
TOLERANCE = 1e-5
# To the variance of kernels transformers adds 1e-8 and BiT 1e-10: up to 2.5e-5
# for kernels of 512 x 3 x 3 random numbers of variance 1/fan-in.
BIT_TOLERANCE = 3e-5


VIT_SIZES = {
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'intermediate_size': 48,
  'image_size': 32,
  'patch_size': 8,
  'num_labels': 5,
}


def vit_config(transformers, **changes):
  return transformers.ViTConfig(**VIT_SIZES | changes)


def ijepa_config(transformers, **changes):
  return transformers.IJepaConfig(**VIT_SIZES | changes)


def deit_config(transformers, **changes):
  return transformers.DeiTConfig(**VIT_SIZES | changes)


def bit_config(transformers, **changes):
  fields = {
    'embedding_size': 32,
    'hidden_sizes': [128, 256],
    'depths': [1, 2],
    'num_labels': 5,
  }
  return transformers.BitConfig(**fields | changes)


def save_theirs(torch, model, folder, **options):
  """Saves a model whose parameters are none of them zero or all alike."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape, generator=generator)
  model.save_pretrained(folder, **options)
  return model.eval()


THEIRS = {
  'ViT, whose defaults are those of DeiT': (
    'ViTForImageClassification',
    vit_config,
    {},
  ),
  'tanh, other epsilon, not square': (
    'ViTForImageClassification',
    vit_config,
    {'hidden_act': 'gelu_new', 'layer_norm_eps': 1e-3, 'image_size': [32, 48]},
  ),
  'no classes': ('ViTForImageClassification', vit_config, {'num_labels': 0}),
  'no biases': ('ViTForImageClassification', vit_config, {'qkv_bias': False}),
  'body with pooler': ('ViTModel', vit_config, {'pooler_output_size': 20}),
  'DeiT': ('DeiTForImageClassificationWithTeacher', deit_config, {}),
  'I-JEPA': ('IJepaForImageClassification', ijepa_config, {}),
  'body of I-JEPA': ('IJepaModel', ijepa_config, {'image_size': 224}),
  'BiT': ('BitForImageClassification', bit_config, {}),
  'body of BiT': ('BitModel', bit_config, {}),
  'BiT of five stages': (
    'BitForImageClassification',
    bit_config,
    {
      'hidden_sizes': [128 * 2**i for i in range(5)],
      'depths': [1] * 5,
      'output_stride': 64,
    },
  ),
}


def their_output(torch, model, pixels_BHWC):
  pixels = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2)
  with torch.inference_mode():
    outputs = model(pixels)
  if 'logits' in outputs:
    return outputs.logits.numpy()
  if model.config.model_type == 'ijepa':
    return outputs.last_hidden_state.mean(1).numpy()
  return outputs.pooler_output.flatten(1).numpy()


# Whose distillation token nobody reads: it is written as no model of theirs.
UNREAD = {
  # Of one patch: positions of it and of two tokens.
  'DeiT without a teacher': (
    'DeiTForImageClassification',
    deit_config,
    {'image_size': 8},
  ),
  'body of DeiT': ('DeiTModel', deit_config, {'image_size': [32, 48]}),
}


@pytest.mark.fast('tanh, other epsilon, not square', 'no biases')
@pytest.mark.parametrize('kind', THEIRS | UNREAD)
def test_theirs_gives_its_numbers_here(tmp_path, torch, transformers, kind):
  name, config, changes = (THEIRS | UNREAD)[kind]
  model = getattr(transformers, name)(config(transformers, **changes))
  save_theirs(torch, model, tmp_path / 'theirs')
  ours = opening.open_checkpoint(str(tmp_path / 'theirs'))
  images = random_images(ours.image_size)
  if 'Bit' in name:
    assert ours.image_size == (224, 224)
    images = images[:, :64, :96]
  p = ours.preprocessing
  published = (0.485, 0.456, 0.406) if name[:4] == 'DeiT' else (0.5, 0.5, 0.5)
  assert p.mean == published
  pixels = (images / 255 - np.array(p.mean)) / np.array(p.std)
  want = their_output(torch, model.eval(), pixels.astype(np.float32))
  tolerance = BIT_TOLERANCE if 'BiT' in kind else TOLERANCE
  assert relative_difference(logits_of(ours, images), want) < tolerance


@pytest.mark.fast(
  'ViT, whose defaults are those of DeiT',
  'tanh, other epsilon, not square',
  'no classes',
  'no biases',
  'body with pooler',
  'DeiT',
  'I-JEPA',
  'body of I-JEPA',
)
@pytest.mark.parametrize('kind', THEIRS)
def test_theirs_read_and_written_is_the_same(
  tmp_path, torch, transformers, kind
):
  name, config, changes = THEIRS[kind]
  model = getattr(transformers, name)(config(transformers, **changes))
  save_theirs(torch, model, tmp_path / 'theirs')
  ours = opening.open_checkpoint(str(tmp_path / 'theirs'))
  hf.write(ours.weights(), str(tmp_path / 'ours'), 'float32')
  want = load_file(tmp_path / 'theirs' / 'model.safetensors')
  got = load_file(tmp_path / 'ours' / 'model.safetensors')
  if kind == 'no classes':  # written as the body alone
    want = {key.removeprefix('vit.'): x for key, x in want.items()}
  assert got.keys() == want.keys()
  for key in want:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)
  again = opening.open_checkpoint(str(tmp_path / 'ours'))
  assert again.model == ours.model


OURS = {
  'ViT': (SIZE, TINY),
  'not square': ((32, 48), TINY),
  'exact GELU': (SIZE, TINY | {'gelu': 'exact', 'layer_norm_epsilon': 1e-12}),
  'scan': (SIZE, TINY | {'scan': True}),
  'distilled': ((32, 48), TINY | {'name': 'deit'}),
  'pooler': (SIZE, TINY | {'num_classes': 0, 'representation_size': 20}),
  'no head': (SIZE, TINY | {'num_classes': 0}),
  'mean': ((32, 48), TINY | {'pool': 'gap', 'gelu': 'exact'}),
  'no biases': (SIZE, TINY | {'qkv_bias': False}),
  'mean without head': (SIZE, TINY | {'pool': 'gap', 'num_classes': 0}),
  'BiT': ((64, 96), TINY_BIT),
  'BiT of five stages': ((64, 64), TINY_BIT | {'layers': (1,) * 5}),
  'BiT without head': ((64, 64), TINY_BIT | {'num_classes': 0}),
}


def check_ours_there(folder, checkpoint, dtype='float32'):
  """Returns the relative difference of the outputs, and the notes."""
  notes = hf.write(checkpoint.weights(), str(folder), dtype)
  peer = hf_peer.open_peer(str(folder))
  assert peer.framework.startswith('transformers ')
  assert peer.image_size == checkpoint.image_size
  images = random_images(checkpoint.image_size)
  difference = relative_difference(
    peer.run(images), logits_of(checkpoint, images)
  )
  return difference, notes


@pytest.mark.fast('not square', 'scan')
@pytest.mark.usefixtures('transformers')
@pytest.mark.parametrize('kind', OURS)
def test_ours_gives_its_numbers_there(tmp_path, kind):
  size, fields = OURS[kind]
  named = 'num_classes' not in fields
  checkpoint = random_checkpoint(None, size, names=named, **fields)
  checkpoint = dataclasses.replace(
    checkpoint,
    preprocessing=Preprocessing(
      # Of BiT only the processor knows a size: that of the crop, if it crops.
      resize_small=100 if kind == 'BiT' else 0,
      mean=(0.4, 0.5, 0.6),
      std=(0.2, 0.3, 0.4),
    ),
  )
  difference, notes = check_ours_there(tmp_path / 'x', checkpoint)
  assert difference < (BIT_TOLERANCE if 'BiT' in kind else TOLERANCE)
  expected = {'no head': ['pooler']} | {
    kind: ['variance of kernels'] for kind in OURS if 'BiT' in kind
  }
  assert len(notes) == len(expected.get(kind, []))
  for note, words in zip(notes, expected.get(kind, []), strict=True):
    assert words in note
  back = opening.open_checkpoint(str(tmp_path / 'x'))
  assert back.class_names == checkpoint.class_names
  assert back.preprocessing == dataclasses.replace(
    checkpoint.preprocessing, resize_like='transformers'
  )
  want = checkpoint.weights().arrays
  got = back.weights().arrays
  assert got.keys() == want.keys()
  for key in want:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)


@pytest.mark.slow
@pytest.mark.usefixtures('transformers')
@pytest.mark.parametrize(
  'variant', ['ti16', 's32', pytest.param('r50x1', marks=pytest.mark.slow)]
)
def test_named_models_give_their_numbers_there(tmp_path, variant):
  checkpoint = random_checkpoint(variant)
  difference, _ = check_ours_there(tmp_path / 'x', checkpoint)
  assert difference < TOLERANCE


def test_half_precision_is_written_and_read(tmp_path, torch, transformers):
  dtype = 'bfloat16'
  checkpoint = random_checkpoint(None, SIZE, **TINY)
  # The weights are rounded to 8 or 11 bits.
  assert check_ours_there(tmp_path / 'x', checkpoint, dtype)[0] < 0.03
  model = transformers.AutoModelForImageClassification.from_pretrained(
    tmp_path / 'x'
  )
  assert {x.dtype for x in model.parameters()} == {getattr(torch, dtype)}
  back = opening.open_checkpoint(str(tmp_path / 'x'))
  for name, x in checkpoint.weights().arrays.items():
    want = torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))
    np.testing.assert_array_equal(
      back.weights().arrays[name], want.float().numpy(), err_msg=name
    )


def test_a_sharded_directory_is_read(tmp_path, torch, transformers):
  model = transformers.ViTForImageClassification(vit_config(transformers))
  save_theirs(torch, model, tmp_path / 'whole')
  model.save_pretrained(tmp_path / 'sharded', max_shard_size='20KB')
  assert len(list((tmp_path / 'sharded').glob('*.safetensors'))) > 2
  whole, sharded = (
    opening.open_checkpoint(str(tmp_path / side)).weights().arrays
    for side in ('whole', 'sharded')
  )
  assert whole.keys() == sharded.keys()
  for key in whole:
    np.testing.assert_array_equal(sharded[key], whole[key], err_msg=key)


def test_classes_that_do_not_exclude_each_other_have_sigmoids(folder, tmp_path):
  path = tmp_path / 'several'
  shutil.copytree(folder.path, path)
  assert opening.open_checkpoint(str(path)).loss == 'softmax'
  config = json.loads((path / 'config.json').read_text())
  # The first is what transformers writes after training with a softmax.
  for kind, loss in [('single', 'softmax'), ('multi', 'sigmoid')]:
    config['problem_type'] = f'{kind}_label_classification'
    (path / 'config.json').write_text(json.dumps(config))
    opened = opening.open_checkpoint(str(path))
    assert opened.loss == loss
  np.testing.assert_allclose(opened.probabilities(np.zeros((1, 4))), 0.5)


@pytest.mark.edge
def test_an_existing_target_is_refused(folder):
  before = sorted(folder.path.parent.rglob('*'))
  with pytest.raises(FileExistsError, match='vit exists already'):
    hf.write(folder.checkpoint.weights(), str(folder.path), 'float32')
  assert sorted(folder.path.parent.rglob('*')) == before


@pytest.mark.edge
@pytest.mark.usefixtures('transformers')
@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (drop(f'{QUERY}.weight'), 'missing_keys.*layers.1.attention.q_proj.weight'),
    (put('vit.extra', (3,)), 'unexpected_keys.*vit.extra'),
    (put('vit.layernorm.weight', (3,)), 'mismatched_keys.*layernorm.weight'),
  ],
)
def test_the_peer_makes_nothing_up(folder, change, words):
  folder.change_arrays(change)
  with pytest.raises(ValueError, match=words) as e:
    hf_peer.open_peer(str(folder.path))
  assert str(folder.path) in str(e.value)


@pytest.mark.usefixtures('transformers')
def test_the_peer_runs_what_says_little(folder, bit_folder):
  """No name of a class and no processor; one that only knows a side."""
  folder.change_config(architectures=...)
  (folder.path / image_configs.FILE).unlink()
  images = random_images(SIZE)
  peer = hf_peer.open_peer(str(folder.path))
  assert peer.image_size == SIZE
  want = logits_of(folder.open(), images)
  assert relative_difference(peer.run(images), want) < TOLERANCE
  stated = {
    'image_processor_type': 'BitImageProcessor',
    'do_center_crop': False,
  }
  (bit_folder.path / image_configs.FILE).write_text(json.dumps(stated))
  assert hf_peer.open_peer(str(bit_folder.path)).image_size == (224, 224)
