"""DINOv2, DINOv3, CLIP and SigLIP give the outputs of transformers.

The sizes are the saved one and another one that is not square.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoints.random_weights import (
  logits_of,
  random_images,
  relative_difference,
)
from vit_jax.checkpoints import opening, transfer

# Sums of float32 in another order.
TOLERANCE = 1e-5
SIZES = {
  'hidden_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 3,
  'image_size': 32,
  'patch_size': 8,
  'intermediate_size': 100,
}
DINOV2 = {k: x for k, x in SIZES.items() if k != 'intermediate_size'}
SIGLIP2 = {k: x for k, x in SIZES.items() if k != 'image_size'} | {
  'num_patches': 16
}
MAE = SIZES | {
  'decoder_hidden_size': 32,
  'decoder_num_hidden_layers': 1,
  'decoder_num_attention_heads': 2,
  'decoder_intermediate_size': 32,
}
FIVE = {'num_labels': 5}
TEXT = {'hidden_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 2}
BOTH = {'vision_config': SIZES, 'text_config': TEXT}
NAMES = ('ant', 'bee', 'cat', 'dog', 'eel')
KINDS = {
  'DINOv2': ('Dinov2Model', 'Dinov2Config', DINOV2),
  'with registers': (
    'Dinov2WithRegistersModel',
    'Dinov2WithRegistersConfig',
    DINOV2 | {'num_register_tokens': 3},
  ),
  'gated': (
    'Dinov2Model',
    'Dinov2Config',
    # SwiGLU ignores `hidden_act`.
    DINOV2 | {'use_swiglu_ffn': True, 'hidden_act': 'relu'},
  ),
  'DINOv3': (
    'DINOv3ViTModel',
    'DINOv3ViTConfig',
    SIZES | {'num_register_tokens': 4},
  ),
  'DINOv3 without registers': (
    'DINOv3ViTModel',
    'DINOv3ViTConfig',
    SIZES | {'num_register_tokens': 0},
  ),
  'DINOv3, gated, no bias': (
    'DINOv3ViTModel',
    'DINOv3ViTConfig',
    SIZES
    | {
      'num_hidden_layers': 1,
      'num_register_tokens': 2,
      'use_gated_mlp': True,
      'hidden_act': 'silu',
      'query_bias': False,
      'value_bias': False,
    },
  ),
  'CLIP': (
    'CLIPVisionModelWithProjection',
    'CLIPVisionConfig',
    SIZES | {'projection_dim': 20},
  ),
  'CLIP beside its text': (
    'CLIPModel',
    'CLIPConfig',
    BOTH | {'projection_dim': 20},
  ),
  'SigLIP': ('SiglipVisionModel', 'SiglipVisionConfig', SIZES),
  'SigLIP beside its text': ('SiglipModel', 'SiglipConfig', BOTH),
  'SigLIP that classifies': (
    'SiglipForImageClassification',
    'SiglipConfig',
    BOTH | {'id2label': dict(enumerate(NAMES))},
  ),
  'SigLIP 2': ('Siglip2VisionModel', 'Siglip2VisionConfig', SIGLIP2),
  'SigLIP 2 beside its text': (
    'Siglip2Model',
    'Siglip2Config',
    {'vision_config': SIGLIP2, 'text_config': TEXT},
  ),
}
# More models, which are compared at their own size only.
OTHERS = {
  'ViT': ('ViTForImageClassification', 'ViTConfig', SIZES | FIVE),
  'grey': (
    'ViTForImageClassification',
    'ViTConfig',
    SIZES | FIVE | {'num_channels': 1},
  ),
  'MAE': ('ViTMAEForPreTraining', 'ViTMAEConfig', MAE),
  'MSN': ('ViTMSNForImageClassification', 'ViTMSNConfig', SIZES | FIVE),
  'DINOv2 that classifies': (
    'Dinov2ForImageClassification',
    'Dinov2Config',
    DINOV2 | FIVE,
  ),
  'CLIP that classifies': (
    'CLIPForImageClassification',
    'CLIPConfig',
    BOTH | FIVE,
  ),
}


def save(transformers, torch, kind, folder, **options):
  """Saves a model with random parameters, and returns it."""
  model, config, fields = (KINDS | OTHERS)[kind]
  torch.manual_seed(0)
  model = getattr(transformers, model)(getattr(transformers, config)(**fields))
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape)
  model.save_pretrained(folder, **options)
  return model.eval()


def features(torch, model, ours, images):
  """Returns the output of transformers for images of our checkpoint."""
  p = ours.preprocessing
  pixels = (images / np.float32(255) - np.float32(p.mean)) / np.float32(p.std)
  given = {
    'pixel_values': torch.from_numpy(
      pixels.transpose(0, 3, 1, 2).astype(np.float32)
    )
  }
  name = type(model).__name__
  if name.startswith('Siglip2'):
    given = flexible(torch, given['pixel_values'], ours.model.patch_size)
  elif images.shape[1:3] != (32, 32) and 'INO' not in name.upper():
    given['interpolate_pos_encoding'] = True
  with torch.inference_mode():
    if hasattr(model, 'get_image_features'):
      found = model.get_image_features(**given)
      found = getattr(found, 'pooler_output', found)
    else:
      outputs = model(**given)
      found = next(
        outputs[name]
        for name in ('logits', 'image_embeds', 'pooler_output')
        if name in outputs
      )
  return found.numpy()


def flexible(torch, pixels_BCHW, patch):
  """Cuts images into patches as SigLIP 2's own processor, without padding."""
  from transformers.models.siglip2 import image_processing_siglip2

  B, _, H, W = pixels_BCHW.shape
  cut = image_processing_siglip2.convert_image_to_patches
  patches = torch.stack([cut(x, patch) for x in pixels_BCHW])
  return {
    'pixel_values': patches,
    'pixel_attention_mask': torch.ones(patches.shape[:2], dtype=torch.int32),
    'spatial_shapes': torch.tensor([[H // patch, W // patch]] * B),
  }


def with_positions(torch, model, ours):
  """Makes their model add our position embeddings instead of its own.

  transformers resizes positions in another way: bicubic, or with smoothing.
  """
  table = ours.params['Transformer'].get('posembed_input')
  if table is None:
    return
  table_1LD = torch.from_numpy(np.array(table['pos_embedding']))
  tower = getattr(model, 'vision_model', model)
  embeddings = tower.embeddings
  embeddings.interpolate_pos_encoding = lambda *_: table_1LD
  embeddings.resize_positional_embeddings = lambda *_, **__: table_1LD


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_theirs_gives_its_numbers_here(tmp_path, transformers, torch, kind):
  model = save(transformers, torch, kind, tmp_path / 'x')
  native = opening.open_checkpoint(str(tmp_path / 'x'))
  assert native.image_size == (32, 32)
  assert native.class_names == (NAMES if 'classifies' in kind else ())
  for size in [(32, 32)] + [(24, 40)] * ('beside' not in kind):
    ours = transfer.resized(native, size)
    if size != native.image_size:
      with_positions(torch, model, ours)
    images = random_images(size)
    want = features(torch, model, ours, images)
    got = logits_of(ours, images)
    assert got.shape == want.shape
    assert relative_difference(got, want) < TOLERANCE, size


@pytest.mark.fast('gated-False', 'ViT-False')
@pytest.mark.parametrize(
  ('kind', 'original'),
  [(kind, kind not in ('gated', 'ViT')) for kind in ('gated', *OTHERS)],
)
def test_others_give_their_numbers_under_both_names(
  tmp_path, transformers, torch, caplog, kind, original
):
  """The names of arrays in the original, and those of transformers 5."""
  place = tmp_path / 'x'
  model = save(transformers, torch, kind, place, save_original_format=original)
  ours = opening.open_checkpoint(str(place))
  assert ('grey' in caplog.text) == (kind == 'grey')
  images = random_images(ours.image_size)
  if kind == 'grey':
    images = np.repeat(images[..., :1], 3, axis=-1)
  p = ours.preprocessing
  pixels = (images / np.float32(255) - np.float32(p.mean)) / np.float32(p.std)
  pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
  if kind == 'grey':
    pixels = pixels[:, :1]
  if kind == 'MAE':
    model = model.vit
    model.embeddings.random_masking = lambda tokens, noise=None: (
      tokens,
      *2 * (torch.zeros(tokens.shape[:2]),),
    )
  with torch.inference_mode():
    outputs = model(pixels)
  want = outputs.logits if 'logits' in outputs else outputs[0][:, 0]
  got = logits_of(ours, images)
  assert relative_difference(got, want.numpy()) < TOLERANCE


def test_the_processor_of_siglip_2_is_read(
  tmp_path, transformers, torch, caplog
):
  save(transformers, torch, 'SigLIP 2', tmp_path / 'x')
  processor = {
    'image_processor_type': 'Siglip2ImageProcessor',
    'image_mean': [0.4, 0.5, 0.6],
    'patch_size': 8,
    'max_num_patches': 16,
  }
  (tmp_path / 'x/preprocessor_config.json').write_text(json.dumps(processor))
  ours = opening.open_checkpoint(str(tmp_path / 'x'))
  assert ours.preprocessing.mean == (0.4, 0.5, 0.6)
  assert ours.preprocessing.std == (0.5, 0.5, 0.5)
  assert ours.preprocessing.interpolation == 'bilinear'
  (warning,) = caplog.messages
  assert 'resizes the whole image to (32, 32)' in warning


@pytest.mark.parametrize('has_processor', [True, False])
def test_images_are_scaled_as_clips_are(
  tmp_path, transformers, torch, caplog, has_processor
):
  """The processor is in the file for images and text, or missing."""
  save(transformers, torch, 'CLIP', tmp_path / 'x')
  if has_processor:
    processor = transformers.CLIPImageProcessor(
      crop_size=32, size={'shortest_edge': 40}
    )
    stated = {'image_processor': processor.to_dict()}
    (tmp_path / 'x/processor_config.json').write_text(json.dumps(stated))
  found = opening.open_checkpoint(str(tmp_path / 'x')).preprocessing
  assert found.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
  assert found.std == pytest.approx((0.26862954, 0.26130258, 0.27577711))
  assert found.interpolation == 'bicubic'
  assert found.resize_small == (40 if has_processor else 0)
  told = 'has no preprocessor_config.json' in caplog.text
  assert told != has_processor


@pytest.mark.parametrize('kind', ['DINOv2', 'DINOv3', 'CLIP', 'SigLIP'])
def test_what_a_configuration_leaves_out_has_their_defaults(
  tmp_path, transformers, torch, kind
):
  save(transformers, torch, kind, tmp_path / 'x')
  left_out = ['hidden_act', 'layer_norm_eps', 'num_attention_heads']
  if kind == 'DINOv3':
    # The others have an embedding for each patch.
    left_out += ['image_size', 'rope_theta']
  change_config(tmp_path / 'x', dict.fromkeys(left_out))
  found = opening.open_checkpoint(str(tmp_path / 'x'))
  defaults = getattr(transformers, KINDS[kind][1])()
  model = found.model
  gelus = {'gelu': 'exact', 'quick_gelu': 'quick', 'gelu_pytorch_tanh': 'tanh'}
  assert model.gelu == gelus[defaults.hidden_act]
  assert model.layer_norm_epsilon == defaults.layer_norm_eps
  assert model.heads == defaults.num_attention_heads
  assert model.rope == getattr(defaults, 'rope_theta', 0)
  side = defaults.image_size if kind == 'DINOv3' else 32
  assert found.image_size == (side, side)


def change_config(folder, changes):
  place = folder / 'config.json'
  place.write_text(json.dumps(json.loads(place.read_text()) | changes))


@pytest.mark.edge
@pytest.mark.parametrize(
  ('kind', 'changes', 'message'),
  [
    (
      'SigLIP 2',
      {'patch_size': 16},
      'patch_size is 16, and .* has 192 values per patch',
    ),
    (
      'SigLIP 2',
      {'num_patches': 9},
      'num_patches is 9, and the arrays have 16',
    ),
    (
      'DINOv3, gated, no bias',
      {'hidden_act': 'gelu'},
      "'gelu'; it must be silu for a gated MLP",
    ),
  ],
)
def test_contradicting_configurations_are_refused(
  tmp_path, transformers, torch, kind, changes, message
):
  save(transformers, torch, kind, tmp_path / 'x')
  change_config(tmp_path / 'x', changes)
  with pytest.raises(ValueError, match=message):
    opening.open_checkpoint(str(tmp_path / 'x'))


@pytest.mark.edge
def test_missing_position_embeddings_are_named(tmp_path, transformers, torch):
  save(transformers, torch, 'DINOv2', tmp_path / 'x')
  place = tmp_path / 'x/model.safetensors'
  arrays = load_file(place)
  del arrays['embeddings.position_embeddings']
  save_file(arrays, place, {'format': 'pt'})
  with pytest.raises(ValueError, match='lacks the array .*pos_embedding'):
    opening.open_checkpoint(str(tmp_path / 'x'))
