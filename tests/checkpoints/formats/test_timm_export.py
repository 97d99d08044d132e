"""Models that timm lacks, and the names of those that it has."""

import re

import pytest

from tests.checkpoints.formats.timm_folder import HYBRID, TINY, TINY_BIT
from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints.formats import timm as convert
from vit_jax.checkpoints.formats import timm_config
from vit_jax.checkpoints.formats.table import Weights
from vit_jax.models import variants


def weights_of(**fields):
  """Returns a model without its arrays, which names and sizes do not need."""
  model = variants.build(num_classes=7, image_size=(32, 32), **fields)
  fields = variants.fields_of(model) | {'image_size': (32, 32)}
  return Weights({}, fields)


UNWRITABLE = {
  'deit with registers': (
    TINY | {'name': 'deit', 'registers': 2},
    'registers 2, only 0',
  ),
  'stem layers': (
    TINY | HYBRID | {'stem_layers': (1, 2)},
    r'hybrid with stem_layers \(1, 2\), only',
  ),
  'layers': (
    TINY_BIT | {'layers': (2, 2, 2, 2)},
    r'BiT with layers \(2, 2, 2, 2\), only',
  ),
}


@pytest.mark.edge
@pytest.mark.parametrize('kind', UNWRITABLE)
def test_models_that_timm_lacks_are_refused(tmp_path, kind):
  fields, message = UNWRITABLE[kind]
  with pytest.raises(ValueError, match=f'^timm has no (model with )?{message}'):
    convert.write(weights_of(**fields), str(tmp_path / 'x'), 'float32')
  assert list(tmp_path.iterdir()) == []


def test_the_mlp_has_the_width_that_timm_computes():
  """It multiplies and rounds down, where 11 * (15 / 11) is below 15."""
  for width, mlp_dim in ((11, 15), (11, 49), (48, 100)):
    fields = TINY | {'width': width, 'mlp_dim': mlp_dim, 'heads': 1}
    config = timm_config.config(weights_of(**fields), {})
    assert config['num_features'] == width
    args = config['model_args']
    assert int(width * args['mlp_ratio']) == mlp_dim


@pytest.mark.parametrize(
  ('width', 'patch', 'has_both'), [(192, 8, False), (384, 8, True)]
)
def test_a_name_is_one_that_timm_has(timm, width, patch, has_both):
  """Without a name for both width and patch size, the arguments state them."""
  fields = TINY | {'width': width, 'patch_size': patch}
  config = timm_config.config(weights_of(**fields), {})
  name, args = config['architecture'], config['model_args']
  assert timm.is_model(name)
  assert (f'_patch{patch}_' in name) == has_both
  assert (args['embed_dim'], args['patch_size']) == (width, patch)


@pytest.mark.parametrize(
  ('layers', 'width', 'name'),
  [
    ((3, 4, 6, 3), 64, 'resnetv2_50x1_bit'),
    ((3, 4, 6, 3), 192, 'resnetv2_50x3_bit'),
    ((3, 8, 36, 3), 64, 'resnetv2_152x2_bit'),
  ],
)
def test_timm_multiplies_widths_by_the_factor_of_the_name(layers, width, name):
  weights = weights_of(name='resnet', layers=layers, width=width)
  written = timm_config.config(weights, {})
  assert written['num_features'] == 32 * width
  assert written['architecture'] == name
  factor, args = int(name[-5]), written['model_args']
  if width == 64 * factor:
    assert args == {}
    return
  assert args['stem_chs'] * factor == width
  # Of BiT: four times as many behind a unit, twice as many in the next stage.
  widths = [4 * width, 8 * width, 16 * width, 32 * width]
  assert [x * factor for x in args['channels']] == widths


@pytest.mark.parametrize(
  'fields',
  [
    TINY,
    TINY | {'name': 'deit'},
    TINY | {'stem_width': 64},
    TINY | HYBRID | {'stem_layers': (2, 2, 2, 2)},
    TINY_BIT,
  ],
)
def test_the_ends_of_a_model_are_named_as_timm_does(timm, fields):
  written = timm_config.config(weights_of(**fields), {})
  theirs = timm.get_pretrained_cfg(written['architecture']).to_dict()
  for key in ('first_conv', 'classifier', 'fixed_input_size'):
    want = theirs[key]
    want = list(want) if isinstance(want, tuple) else want
    assert written['pretrained_cfg'][key] == want, key


@pytest.mark.parametrize('width', [384, 48])
def test_a_distilled_model_has_the_name_of_its_width(timm, torch, width):
  """If no name has the width, the file names the base model."""
  fields = TINY | {'name': 'deit', 'width': width}
  name = timm_config.config(weights_of(**fields), {})['architecture']
  assert re.fullmatch(r'deit_\w+_distilled_patch16_224', name)
  with torch.device('meta'):
    theirs = timm.create_model(name)
  assert theirs.embed_dim == (768 if width == 48 else width)


def test_what_deit_without_a_classifier_gives_is_said(tmp_path):
  fields = TINY | {'name': 'deit', 'num_classes': 0}
  weights = random_checkpoint(None, (32, 32), names=False, **fields).weights()
  (line,) = convert.write(weights, str(tmp_path / 'x'), 'float32')
  assert line.startswith('Without a head, the model returns')
