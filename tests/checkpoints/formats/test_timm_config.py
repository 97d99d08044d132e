"""Configurations that contradict their arrays, or are of other models."""

import pytest

from tests.checkpoints.formats.timm_folder import TINY, TINY_BIT, Folder
from vit_jax.checkpoints import opening


@pytest.fixture
def folder(tmp_path):
  return Folder(tmp_path / 'x')


CONTRADICTIONS = {
  'sizes': (
    {
      'model_args__depth': 10**9,
      'model_args__embed_dim': 64,
      'model_args__mlp_ratio': 4,
    },
    r'\(vit_base_patch16_224\): model_args.depth is 1000000000, .* have 2; '
    'model_args.embed_dim is 64, .* have 48; .*mlp_ratio is 4, .* have 2.08',
  ),
  'grid': ({'model_args__no_embed_class': True}, 'no_embed_class .* have Fal'),
  'pool': (
    {'model_args__global_pool': 'map'},
    "architecture means pool 'map', but the arrays need 'cls' or 'gap'",
  ),
  'scale': ({'model_args__init_values': 1}, 'init_values is 1, and the array'),
  'unknown': (
    {'model_args__block_fn': 'x'},
    "block_fn is 'x'; this argument is not",
  ),
  'size': (
    {'model_args__img_size': 64},
    "64x64 pixels have 64 patches of 8, but 'pos_embed' has 17 tokens",
  ),
  'classes': ({'num_classes': 8}, 'num_classes is 8; the head has 7'),
  'names': (
    {'pretrained_cfg__label_names': ['cat']},
    r'label_names \(or labels\) must be a list of 7 names',
  ),
  'architecture': (
    {'model_args__embed_dim': None},
    "architecture is 'vit_base_patch16_224', whose width is 768; .* 48",
  ),
}


@pytest.mark.edge
@pytest.mark.parametrize('kind', CONTRADICTIONS)
def test_contradicting_configurations_are_refused(folder, kind):
  changes, message = CONTRADICTIONS[kind]
  folder.change_config(**changes)
  with pytest.raises(ValueError, match=message) as e:
    opening.open_checkpoint(str(folder))
  assert str(folder) in str(e.value)


@pytest.mark.edge
@pytest.mark.usefixtures('timm')
@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('vit_of_tomorrow', 'which timm .* does not know'),
    ('naflexvit_base_patch16_gap', 'and vit_jax does not .* of a NaFlexVit'),
    ('test_vit3', 'and vit_jax does not .* pooled registers'),
    ('vitamin_base_224', 'and vit_jax does not .* a GeGluMlp with GELU'),
  ],
)
def test_other_architectures_are_refused(folder, name, message):
  folder.change_config(architecture=name)
  with pytest.raises(ValueError, match=f"architecture is '{name}', {message}"):
    opening.open_checkpoint(str(folder))


@pytest.mark.usefixtures('timm')
def test_what_an_architecture_means_is_asked_of_timm(tmp_path):
  """Arguments override all else."""
  fields = {'patch_size': 8, 'depth': 1, 'mlp_dim': 8, 'heads': 16}
  folder = Folder(tmp_path / 'x', **fields, width=128, pool='gap')
  folder.change_config(
    architecture='vit_so400m_patch16_siglip_256',
    model_args__act_layer=None,
    model_args__num_heads=None,
    model_args__img_size=32,
  )
  model = opening.open_checkpoint(str(folder)).model
  assert (model.gelu, model.heads) == ('tanh', 16)
  assert model.layer_norm_epsilon == 1e-6


@pytest.mark.edge
@pytest.mark.parametrize(
  ('args', 'final_epsilon', 'message'),
  [
    ({'act_layer': 'relu'}, 1e-6, r'a Mlp with ReLU\(\)'),
    # Its gate comes last, unlike SwiGLU's.
    (
      {'mlp_layer': 'GluMlp', 'act_layer': 'silu'},
      1e-6,
      r'a GluMlp with SiLU\(\)',
    ),
    ({}, 1e-5, 'norms of different epsilons'),
  ],
)
def test_parts_that_no_name_has_yet_are_refused(
  folder, timm, monkeypatch, args, final_epsilon, message
):
  create = timm.create_model
  if 'mlp_layer' in args:
    args = args | {'mlp_layer': getattr(timm.layers, args['mlp_layer'])}

  def create_model(name, **kwargs):
    model = create('vit_tiny_patch16_224', **args, **kwargs)
    model.norm.eps = final_epsilon
    return model

  monkeypatch.setattr(timm, 'create_model', create_model)
  folder.change_config(architecture='vit_wee_patch16_reg1_gap_256')
  with pytest.raises(ValueError, match=message):
    opening.open_checkpoint(str(folder))


@pytest.mark.usefixtures('timm')
def test_a_norm_that_is_stated_has_the_epsilon_that_timm_gives_it(tmp_path):
  """The architecture itself, CLIP, has 1e-5."""
  folder = Folder(tmp_path / 'x', **TINY, pre_norm=True)
  folder.change_config(architecture='vit_base_patch32_clip_224')
  model = opening.open_checkpoint(str(folder)).model
  assert model.layer_norm_epsilon == 1e-5
  for name in ('layer_norm', 'LayerNormFp32'):
    folder.change_config(model_args__norm_layer=name)
    model = opening.open_checkpoint(str(folder)).model
    assert model.layer_norm_epsilon == 1e-6


def test_a_configuration_without_a_model_is_refused(folder):
  config = folder.config()
  del config['architecture']
  folder.put_config(config)
  with pytest.raises(ValueError, match='must have the key architecture'):
    opening.open_checkpoint(str(folder))


def test_older_configurations_are_read(folder):
  """The keys of pretrained_cfg were at the top, and some had other names."""
  config = folder.config()
  older = config['pretrained_cfg'] | {
    'architecture': config['architecture'],
    'model_args': config['model_args'],
  }
  older['labels'] = older.pop('label_names')
  want = opening.open_checkpoint(str(folder))
  folder.put_config(older)
  got = opening.open_checkpoint(str(folder))
  assert got.model == want.model
  assert got.class_names == want.class_names
  assert got.preprocessing == want.preprocessing


@pytest.mark.edge
def test_other_resnets_are_refused(tmp_path):
  folder = Folder(tmp_path / 'x', **TINY_BIT)
  for changes, message in (
    ({'model_args__global_pool': 'max'}, "global_pool is 'max', and vit_jax s"),
    ({'architecture': 'resnetv2_50'}, "'resnetv2_50'; it must match resnetv2_"),
  ):
    folder.change_config(**changes)
    with pytest.raises(ValueError, match=message):
      opening.open_checkpoint(str(folder))
