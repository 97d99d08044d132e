"""Names of models, their fields, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from vit_jax import config
from vit_jax.models import variants

TI = {'depth': 12, 'width': 192, 'mlp_dim': 768, 'heads': 3}
S = {'depth': 12, 'width': 384, 'mlp_dim': 1536, 'heads': 6}
HALF_B = {'depth': 12, 'width': 384, 'mlp_dim': 1536, 'heads': 12}
B = {'depth': 12, 'width': 768, 'mlp_dim': 3072, 'heads': 12}
L = {'depth': 24, 'width': 1024, 'mlp_dim': 4096, 'heads': 16}
R50 = (3, 4, 6, 3)


def build(variant, **fields):
  kwargs = {'num_classes': 1000, 'image_size': (224, 224)}
  return variants.build(**(kwargs | variants.fields(variant) | fields))


def resnet(layers, width, version=2, axial=False):
  return {
    'name': 'resnet',
    'layers': layers,
    'width': width,
    'version': version,
    'axial': axial,
  }


def hybrid(size, layers, patch_size):
  return size | {
    'name': 'vit',
    'patch_size': patch_size,
    'stem_width': 64,
    'stem_layers': layers,
  }


NAMES = {
  'l16': L | {'name': 'vit', 'patch_size': 16},
  'l/16': L | {'name': 'vit', 'patch_size': 16},
  'l7': L | {'name': 'vit', 'patch_size': 7},
  'halfb32': HALF_B | {'name': 'vit', 'patch_size': 32},
  'r50x1': resnet(R50, 64),
  'r101x1': resnet((3, 4, 23, 3), 64),
  'r152x2': resnet((3, 8, 36, 3), 128),
  'r200x3': resnet((3, 24, 36, 3), 192),
  'r26x12': resnet((2, 2, 2, 2), 768),
  'axial_r50x1': resnet(R50, 64, version=1, axial=True),
  'axial_b16': B
  | {'name': 'vit', 'patch_size': 16, 'axial': True, 'pool': 'gap'},
  'r50+b32': hybrid(B, R50, 1),
  # Stage 4 is moved into stage 3.
  'r50+b16': hybrid(B, (3, 4, 9), 1),
  'r50+l/16': hybrid(L, (3, 4, 9), 1),
  'r26+s32': hybrid(S, (2, 2, 2, 2), 1),
  # The root and no stage: patches of 8 of its feature map, and the attribute's
  # default for the units.
  'r+ti16': TI | {'name': 'vit', 'patch_size': 8, 'stem_width': 64},
}


@pytest.mark.parametrize('name', NAMES)
def test_a_name_stands_for_its_fields(name):
  assert variants.fields(name) == NAMES[name]


def test_g_and_G_differ():
  small, large = variants.fields('g14'), variants.fields('G14')
  assert (small['width'], large['width']) == (1408, 1664)


@pytest.mark.parametrize('variant', variants.PUBLISHED)
def test_every_published_model_can_be_built(variant):
  model = build(variant)
  fields = variants.fields(variant)
  fields.pop('name')
  for name, value in fields.items():
    assert getattr(model, name) == value


@pytest.mark.parametrize(
  ('variant', 'grid'),
  [
    ('b16', (14, 14)),
    ('b32', (7, 7)),
    ('h14', (16, 16)),
    # Four times the tokens with stage 4 moved into stage 3 (section 4.1).
    ('r50+b16', (14, 14)),
    ('r50+b32', (7, 7)),
    ('r50+l32', (7, 7)),
    ('r26+s32', (7, 7)),
    # The name counts the root's convolution and forgets its pooling.
    ('r+ti16', (7, 7)),
    ('axial_b16', (14, 14)),
  ],
)
def test_tokens_are_those_of_the_name(variant, grid):
  model = build(variant)
  assert model.grid((224, 224)) == grid
  assert model.grid((224, 448)) == (grid[0], 2 * grid[1])
  stem = jax.eval_shape(
    lambda key, x: model.init_with_output(key, x)[0][1]['stem'],
    jax.random.key(0),
    jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
  )
  assert stem.shape == (1, *grid, model.width)


@pytest.mark.parametrize(
  ('name', 'hint'),
  [
    ('l15x', 'l16'),
    ('k16', 'b16'),
    ('vit_l16', 'l16'),
    ('L16', 'G14|l16'),
    ('', 'Valid: G14'),
    ('b', 'Did you mean .*b16'),
    ('b0', 'Did you mean .*b8'),
    ('b016', 'Did you mean .*b16'),
    ('b16 ', 'Did you mean .*b16'),
    ('r50', 'Did you mean .*r50x1'),
    ('r50x0', 'Did you mean .*r50x1'),
    ('r50x1.5', 'Did you mean .*r50x1'),
    ('r51x1', 'Did you mean .*r50x1'),
    ('r50+b8', 'Did you mean .*r50.b16'),
    ('r49+b16', 'Did you mean .*r50.b16'),
    ('r50-b16', 'Did you mean .*r50.b16'),
    ('r+ti1', 'Did you mean .*r.ti16'),
    ('axial_r50+b16', 'Did you mean .*r50.b16'),
    ('axial_axial_b16', 'Did you mean .*axial_b16'),
    ('axialb16', 'Did you mean .*axial_b16'),
  ],
)
def test_a_misspelt_variant_names_the_nearest(name, hint):
  with pytest.raises(ValueError, match=hint) as e:
    variants.fields(name)
  assert str(e.value).startswith(f'No model variant {name!r}. ')
  assert 'as in l16' in str(e.value)


def module_fields(module):
  """Returns the fields that a config sets: all but the number of classes."""
  return {f.name for f in dataclasses.fields(module)} - {
    'num_classes',
    'parent',
  }


def test_the_base_config_has_the_fields_of_a_vit():
  model = config.base().model.to_dict()
  assert model.keys() == module_fields(variants.ViT)
  with_defaults = variants.defaults('vit')
  assert model | with_defaults == model
  without = {'patch_size', 'width', 'depth', 'mlp_dim', 'heads'}
  assert model.keys() - with_defaults.keys() == without


def test_a_chosen_resnet_has_the_fields_of_a_resnet():
  chosen = config.base()
  config.choose_model(chosen, 'r50x1')
  assert set(chosen.model) == module_fields(variants.ResNet)
  built = variants.build(
    num_classes=5, image_size=(32, 32), **chosen.model.to_dict()
  )
  assert built == variants.ResNet(num_classes=5, layers=R50)
  assert variants.defaults('resnet').keys() == (
    module_fields(variants.ResNet) - {'layers'}
  )


def test_there_and_back_between_architectures():
  want, got = config.base(), config.base()
  for variant in ('r50x1', 'axial_r50x1', 'b16'):
    config.choose_model(got, variant)
  config.choose_model(want, 'b16')
  assert got.model.to_dict() == want.model.to_dict()


def test_lists_as_json_has_them_make_the_same_model():
  want, got = build('r50x1'), build('r50x1', layers=list(R50))
  assert got == want
  # Which jit asks for.
  assert hash(got) == hash(want)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'name': 'resnt'}, r"model.name is 'resnt'. Did you mean resnet\?"),
    ({'pool': 'gapp'}, r"model.pool is 'gapp'. Did you mean gap or map\?"),
    ({'posemb': 'sincos'}, r"model.posemb is 'sincos'. Did you mean sincos2d"),
    ({'posemb_at': 'every'}, "model.posemb_at is 'every'. Did you mean every_"),
    ({'remat': 'dots'}, "model.remat is 'dots'. .*dots_saveable"),
    ({'dtype': 'float16'}, "model.dtype is 'float16': use float32 or bfloat16"),
    ({'heads': 5}, 'width 192 is not a multiple of model.heads 5'),
    ({'patch_size': 0}, 'model.patch_size is 0: it must be at least 1'),
    ({'width': 0}, 'model.width is 0: it must be at least 1'),
    ({'depth': 0}, 'model.depth is 0: it must be at least 1'),
    ({'mlp_dim': -1}, 'model.mlp_dim is -1: it must be at least 1'),
    ({'heads': 0}, 'model.heads is 0: it must be at least 1'),
    ({'depth': 10**9}, 'model.depth is 1,000,000,000: at most 1,000 layers'),
    ({'layer_norm_epsilon': 0.0}, 'model.layer_norm_epsilon is 0.0: it must'),
    ({'gelu': 'erf'}, "model.gelu is 'erf'"),
    ({'axial': True}, "model.pool is 'cls': axial .* Use 'gap' or 'map'"),
    (
      {'width': 27, 'posemb': 'learned2d'},
      "model.width 27 is not a multiple of 2, which model.posemb 'learned2d'",
    ),
    (
      {'width': 54, 'posemb': 'sincos2d'},
      "model.width 54 is not a multiple of 4, which model.posemb 'sincos2d'",
    ),
    (
      {'posemb': 'none', 'posemb_at': 'every_layer'},
      "model.posemb_at is 'every_layer', but with model.posemb 'none' nothing",
    ),
    (
      {'posemb': 'relative', 'posemb_at': 'shared'},
      "model.posemb_at is 'shared', but with model.posemb 'relative' nothing",
    ),
    ({'stem_layers': (1,)}, r'stem_layers is \(1,\) and model.stem_width 0'),
    (
      {'stem_width': 64, 'stem_layers': (1, 0)},
      r'model.stem_layers is \(1, 0\): every stage has at least one unit',
    ),
    ({'stem_width': 33}, 'model.stem_width is 33: GroupNorm wants a multiple'),
    ({'stem_width': -32}, 'model.stem_width is -32: GroupNorm wants'),
    (
      {'image_size': (224, 230)},
      '16x16 pixels do not tile an image of 224x230',
    ),
    (
      {'image_size': (230, 224)},
      '16x16 pixels do not tile an image of 230x224',
    ),
    # The stem leaves an eighth of a side.
    (
      {'stem_width': 64, 'stem_layers': (1, 1), 'image_size': (64, 96)},
      '128x128 pixels do not tile an image of 64x96',
    ),
  ],
)
def test_fields_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build('ti16', **fields)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'layers': (10**9,)}, 'at most 1,000 units are built'),
    ({'layers': ()}, 'model.layers is empty: a ResNet has at least one stage'),
    ({'layers': (3, 0)}, r'model.layers is \(3, 0\): every stage has at least'),
    ({'layers': [3, -1]}, r'model.layers is \(3, -1\): every stage has'),
    ({'width': 16}, 'model.width is 16: GroupNorm wants a multiple of 32'),
    ({'width': 48}, 'model.width is 48: GroupNorm wants a multiple of 32'),
    ({'width': 0}, 'model.width is 0: GroupNorm wants a multiple of 32'),
    ({'version': 3}, 'model.version is 3: use 0, 1 or 2'),
    ({'remat': 'all'}, "model.remat is 'all'"),
    ({'dtype': 'half'}, "model.dtype is 'half'"),
  ],
)
def test_resnets_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build('r50x1', **fields)


def test_an_axial_resnet_takes_widths_that_its_heads_can_share():
  """32 channels are 8 heads with values of 4 and keys of 2."""
  assert build('axial_r50x1', width=32).width == 32


def test_a_resnet_takes_images_of_any_size():
  assert build('r50x1', image_size=(3, 1001)).width == 64


def test_every_remat_policy_exists():
  for name in variants.REMAT_POLICIES:
    model = build('ti16').clone(remat=name, depth=1)
    shape = jax.eval_shape(
      lambda x, m=model: m.init_with_output(jax.random.key(0), x)[0][0],
      jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
    )
    assert shape.shape == (1, 1000)
