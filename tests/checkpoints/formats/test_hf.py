"""transformers' directories: the same arrays and the same numbers both ways."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints import hf_peer
from tests.checkpoints.formats.hf_folder import SIZE, TINY, TINY_BIT
from tests.checkpoints.random_weights import (
  logits_of,
  random_checkpoint,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import hf
from vit_jax.checkpoints.formats.table import Preprocessing

# Sums of float32 in another order.
TOLERANCE = 1e-5
# To the variance of kernels transformers adds 1e-8 and BiT 1e-10: up to 2.5e-5
# for kernels of 512 x 3 x 3 random numbers of variance 1/fan-in.
BIT_TOLERANCE = 3e-5


VIT = {
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'intermediate_size': 48,
  'image_size': 32,
  'patch_size': 8,
  'num_labels': 5,
}
BIT = {
  'embedding_size': 32,
  'hidden_sizes': [128, 256],
  'depths': [1, 2],
  'num_labels': 5,
}
# The names of the model and its config, and the fields of the config.
THEIRS = {
  'tanh, other epsilon, not square': (
    'ViTForImageClassification',
    'ViTConfig',
    VIT
    | {
      'hidden_act': 'gelu_new',
      'layer_norm_eps': 1e-3,
      'image_size': [32, 48],
    },
  ),
  'no classes': (
    'ViTForImageClassification',
    'ViTConfig',
    VIT | {'num_labels': 0},
  ),
  'no biases': (
    'ViTForImageClassification',
    'ViTConfig',
    VIT | {'qkv_bias': False},
  ),
  'body with pooler': (
    'ViTModel',
    'ViTConfig',
    VIT | {'pooler_output_size': 20},
  ),
  'DeiT': ('DeiTForImageClassificationWithTeacher', 'DeiTConfig', VIT),
  'I-JEPA': ('IJepaForImageClassification', 'IJepaConfig', VIT),
  'BiT': ('BitForImageClassification', 'BitConfig', BIT),
}
# More models, which are only read. Nothing reads the distillation tokens.
ONLY_READ = {
  # With one patch: positions of it and of two tokens.
  'DeiT without a teacher': (
    'DeiTForImageClassification',
    'DeiTConfig',
    VIT | {'image_size': 8},
  ),
  'body of DeiT': ('DeiTModel', 'DeiTConfig', VIT | {'image_size': [32, 48]}),
  'body of I-JEPA': ('IJepaModel', 'IJepaConfig', VIT),
  'body of BiT': ('BitModel', 'BitConfig', BIT),
}


def save_theirs(torch, transformers, kind, folder, **options):
  """Saves a model with random parameters, and returns it."""
  model, config, fields = (THEIRS | ONLY_READ)[kind]
  model = getattr(transformers, model)(getattr(transformers, config)(**fields))
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape, generator=generator)
  model.save_pretrained(folder, **options)
  return model.eval()


def their_output(torch, model, pixels_BHWC):
  pixels = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2)
  with torch.inference_mode():
    outputs = model(pixels)
  if 'logits' in outputs:
    return outputs.logits.numpy()
  if model.config.model_type == 'ijepa':
    return outputs.last_hidden_state.mean(1).numpy()
  return outputs.pooler_output.flatten(1).numpy()


@pytest.mark.fast('tanh, other epsilon, not square', 'no biases')
@pytest.mark.parametrize('kind', THEIRS | ONLY_READ)
def test_theirs_gives_its_numbers_here(tmp_path, torch, transformers, kind):
  model = save_theirs(torch, transformers, kind, tmp_path / 'theirs')
  ours = opening.open_checkpoint(str(tmp_path / 'theirs'))
  images = random_images(ours.image_size)
  if 'BiT' in kind:
    assert ours.image_size == (224, 224)
    images = images[:, :64, :96]
  p = ours.preprocessing
  assert p.mean == (
    (0.485, 0.456, 0.406) if 'DeiT' in kind else (0.5, 0.5, 0.5)
  )
  pixels = (images / 255 - np.array(p.mean)) / np.array(p.std)
  want = their_output(torch, model, pixels.astype(np.float32))
  tolerance = BIT_TOLERANCE if 'BiT' in kind else TOLERANCE
  assert relative_difference(logits_of(ours, images), want) < tolerance


@pytest.mark.parametrize('kind', THEIRS)
def test_theirs_read_and_written_is_the_same(
  tmp_path, torch, transformers, kind
):
  save_theirs(torch, transformers, kind, tmp_path / 'theirs')
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
  'not square': ((32, 48), TINY),
  'scan': (SIZE, TINY | {'scan': True}),
  'distilled': ((32, 48), TINY | {'name': 'deit'}),
  'pooler': (SIZE, TINY | {'num_classes': 0, 'representation_size': 20}),
  'no head': (SIZE, TINY | {'num_classes': 0}),
  'mean': (
    (32, 48),
    TINY | {'pool': 'gap', 'gelu': 'exact', 'layer_norm_epsilon': 1e-12},
  ),
  'BiT': ((64, 64), TINY_BIT | {'layers': (1,) * 5}),
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
  assert difference < (BIT_TOLERANCE if kind == 'BiT' else TOLERANCE)
  expected = {'no head': 'pooler', 'BiT': 'variance of kernels'}
  assert len(notes) == (kind in expected)
  assert expected.get(kind, '') in ''.join(notes)
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


def test_half_precision_is_written_and_read(tmp_path, torch, transformers):
  checkpoint = random_checkpoint(None, SIZE, **TINY)
  # The weights are rounded to 8 bits.
  assert check_ours_there(tmp_path / 'x', checkpoint, 'bfloat16')[0] < 0.03
  model = transformers.AutoModelForImageClassification.from_pretrained(
    tmp_path / 'x'
  )
  assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
  back = opening.open_checkpoint(str(tmp_path / 'x'))
  for name, x in checkpoint.weights().arrays.items():
    want = torch.from_numpy(np.ascontiguousarray(x)).bfloat16()
    np.testing.assert_array_equal(
      back.weights().arrays[name], want.float().numpy(), err_msg=name
    )


def test_a_sharded_directory_is_read(tmp_path, torch, transformers):
  model = save_theirs(torch, transformers, 'no biases', tmp_path / 'whole')
  model.save_pretrained(tmp_path / 'sharded', max_shard_size='20KB')
  assert len(list((tmp_path / 'sharded').glob('*.safetensors'))) > 2
  whole, sharded = (
    opening.open_checkpoint(str(tmp_path / side)).weights().arrays
    for side in ('whole', 'sharded')
  )
  assert whole.keys() == sharded.keys()
  for key in whole:
    np.testing.assert_array_equal(sharded[key], whole[key], err_msg=key)


def test_classes_that_do_not_exclude_each_other_have_sigmoids(folder):
  assert folder.open().loss == 'softmax'
  # The first is what transformers writes after training with a softmax.
  for kind, loss in [('single', 'softmax'), ('multi', 'sigmoid')]:
    folder.change_config(problem_type=f'{kind}_label_classification')
    opened = folder.open()
    assert opened.loss == loss
  np.testing.assert_allclose(opened.probabilities(np.zeros((1, 4))), 0.5)
