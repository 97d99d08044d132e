"""Names of models, their fields, and refusals."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax import config
from vit_jax.models import variants
from vit_jax.models.model import REMAT

TI = {'depth': 12, 'width': 192, 'mlp_dim': 768, 'heads': 3}
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
  'l/16': L | {'name': 'vit', 'patch_size': 16},
  'halfb32': HALF_B | {'name': 'vit', 'patch_size': 32},
  'r152x2': resnet((3, 8, 36, 3), 128),
  'axial_r50x1': resnet(R50, 64, version=1, axial=True),
  'axial_b16': B
  | {'name': 'vit', 'patch_size': 16, 'axial': True, 'pool': 'gap'},
  'r50+b32': hybrid(B, R50, 1),
  # Stage 4 is moved into stage 3.
  'r50+b16': hybrid(B, (3, 4, 9), 1),
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


@pytest.mark.fast('b16-grid0')
@pytest.mark.parametrize(
  ('variant', 'grid'),
  [
    ('b16', (14, 14)),
    # Four times the tokens with stage 4 moved into stage 3 (section 4.1).
    ('r50+b16', (14, 14)),
    # The name counts the root's convolution and forgets its pooling.
    ('r+ti16', (7, 7)),
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
    ('k16', 'b16'),
    ('r50x0', 'Did you mean .*r50x1'),
    ('r50+b8', 'Did you mean .*r50.b16'),
    ('deit_tiny_patch16_224', 'Did you mean ti16'),
  ],
)
def test_a_misspelt_variant_names_the_nearest(name, hint):
  with pytest.raises(ValueError, match=hint) as e:
    variants.fields(name)
  assert str(e.value).startswith(f'Unknown model variant {name!r}. ')


def test_there_and_back_between_architectures():
  want, got = config.base(), config.base()
  for variant in ('r50x1', 'axial_r50x1', 'b16'):
    config.choose_model(got, variant)
  config.choose_model(want, 'b16')
  assert got.model.to_dict() == want.model.to_dict()


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'name': 'resnt'}, r"model.name is 'resnt'. Did you mean resnet\?"),
    ({'dtype': 'float16'}, "model.dtype is 'float16': use float32 or bfloat16"),
    ({'patch_size': 0}, 'model.patch_size is 0; it must be at least 1'),
    ({'gelu': 'x'}, "model.gelu is 'x'; it must be one of tanh"),
    ({'heads': 5}, 'width 192 is not a multiple of model.heads 5'),
    ({'rope': 10.0, 'heads': 32}, 'a head has width 6, but rotary embeddings'),
    (
      {'rope_registers': 5.0, 'rope': 1.0, 'registers': 5},
      'must be a square such as 4, but it is 5',
    ),
    (
      {'rope_registers': 5.0, 'rope': 1.0, 'registers': 0},
      'must be a square such as 4, but it is 0',
    ),
    ({'name': 'deit', 'pool': 'map'}, "model.pool is 'map', which DeiT"),
    ({'layers': (1,)}, "is 'vit'; .* does not have the field model.layers"),
    ({'image_size': (0, 16)}, 'do not tile an image of 0x16'),
    ({'axial': True}, "model.pool is 'cls', which axial .* Use 'gap' or 'map'"),
    (
      {'width': 27, 'posemb': 'learned2d'},
      "model.width 27 is not a multiple of 2, which model.posemb 'learned2d'",
    ),
    (
      {'width': 54, 'posemb': 'sincos2d'},
      "model.width 54 is not a multiple of 4, which model.posemb 'sincos2d'",
    ),
    (
      {'posemb': 'relative', 'posemb_at': 'shared'},
      "posemb_at is 'shared', which model.posemb 'relative' does not support",
    ),
    (
      {'image_size': (224, 230)},
      '16x16 pixels do not tile an image of 224x230',
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


def test_the_limits_of_fields_are_valid():
  for variant, fields in (
    ('ti16', {'depth': 1000}),
    ('ti16', {'rope': 10.0, 'registers': 4, 'rope_registers': 5.0}),
    ('ti16', {'name': 'deit', 'registers': 3}),
    ('r50x1', {'width': 32, 'version': 0}),
    ('igpt_s', {'image_size': (256, 256)}),
    ('igpt_s', {'image_size': (1, 1), 'palette': (-1.0, 0.0, 1.0) * 2}),
    ('detr_r50', {'encoder_layers': 1000, 'num_queries': 2**20}),
    # Only DETR's masks need a width that groups divide.
    ('detr_r50', {'width': 72}),
  ):
    model = build(variant, **fields)
    fields.pop('image_size', None)
    fields.pop('name', None)
    assert {k: getattr(model, k) for k in fields} == fields


@pytest.mark.parametrize(
  ('fields', 'stride'),
  [
    ({}, 32),
    ({'dilation': True}, 16),
    ({'backbone_layers': (1, 1)}, 8),
    ({'backbone': 'plain'}, 16),
    ({'backbone': 'plain', 'backbone_layers': (1, 1), 'dilation': True}, 2),
  ],
)
def test_places_of_detr_are_those_of_its_last_map(fields, stride):
  model = build('detr_r50', **fields)
  assert model.stride == stride
  size = (3 * stride + 1, 5 * stride)
  assert model.grid(size) == (4, 5)


def test_a_body_is_as_if_there_were_no_head():
  for variant, fields in (
    ('ti16', {'representation_size': 8}),
    ('ti16', {'name': 'rotation_vit'}),
    ('ti16', {'name': 'video_vit', 'representation_size': 8}),
    ('ti16', {'name': 'deit', 'registers': 2}),
    ('r50x1', {'version': 1}),
  ):
    model = build(variant, head_bias=-10.0, **fields)
    fields.pop('representation_size', None)
    if fields.get('name') != 'deit':
      fields.pop('name', None)
    assert model.body() == build(variant, num_classes=0, **fields)


@pytest.mark.parametrize('name', ['vit', 'masked_vit', 'deit'])
def test_a_config_of_a_model_is_that_of_its_body(name):
  """It has the model's values, but not its task or classes."""
  own = {'registers': 3, 'layer_scale': 0.1, 'dtype': 'bfloat16'}
  if name == 'vit':
    own |= {'representation_size': 20, 'head_bias': -10.0}
  classes = 0 if name == 'masked_vit' else 7
  model = build('ti16', name=name, num_classes=classes, **own)
  found = variants.config_of(model)
  assert found['name'] == {'deit': 'deit'}.get(name, 'vit')
  known = variants.defaults(found['name'])
  assert found == known | TI | {'patch_size': 16} | own | {
    'name': found['name']
  }


@pytest.mark.parametrize(
  ('before', 'chosen', 'variant', 'stays', 'goes'),
  [
    (
      'b16',
      {'pool': 'gap', 'dropout': 0.1, 'posemb': 'none', 'head_bias': -10.0},
      'l32',
      ('pool', 'dropout', 'posemb', 'head_bias'),
      ('patch_size', 'width'),
    ),
    ('axial_b16', {'dropout': 0.1}, 'l32', ('dropout',), ('axial', 'pool')),
    ('r50+b16', {}, 'l32', (), ('stem_width', 'stem_layers', 'patch_size')),
    (
      'b16',
      {'dtype': 'bfloat16', 'scan': True, 'head_bias': -10.0, 'remat': 'cheap'},
      'r50x1',
      ('dtype', 'scan', 'head_bias', 'remat'),
      ('width',),
    ),
    ('b16', {'dropout': 0.3}, 'detr_r50', (), ('dropout', 'width')),
    ('r50x1', {'version': 1}, 'r101x1', (), ('version', 'layers')),
  ],
)
def test_what_a_config_chose_stays_as_far_as_it_means_the_same(
  before, chosen, variant, stays, goes
):
  fields = variants.fields(before)
  old = variants.defaults(fields['name']) | fields | chosen
  new = variants.carry_over(old, variant)
  wanted = variants.fields(variant)
  assert new.keys() == (variants.defaults(wanted['name']) | wanted).keys()
  for field in stays:
    assert new[field] == old[field], field
  plain = variants.defaults(wanted['name']) | wanted
  for field in goes:
    assert new[field] == plain[field] != old[field], field


def test_kernels_that_are_used_in_bfloat16_alone_are_cast():
  params = {
    'embedding': {'kernel': 0.0},
    'Transformer': {
      'encoderblock_0': {
        'MlpBlock_3': {'Dense_0': {'kernel': 0.0, 'bias': 0.0}}
      },
      'encoder_norm': {'scale': 0.0},
    },
    'head': {'kernel': 0.0},
  }
  params = jax.tree.map(lambda x: jnp.full((1,), x), params)
  cast = variants.cast_kernels(build('ti16', dtype='bfloat16'), params)
  dense = cast['Transformer']['encoderblock_0']['MlpBlock_3']['Dense_0']
  assert dense['kernel'].dtype == jnp.bfloat16
  dense.pop('kernel')
  assert {x.dtype for x in jax.tree.leaves(cast)} == {jnp.dtype('float32')}
  same = variants.cast_kernels(build('ti16'), params)
  assert {x.dtype for x in jax.tree.leaves(same)} == {jnp.dtype('float32')}


def test_every_remat_policy_exists():
  for name in REMAT:
    model = build('ti16').clone(remat=name, depth=1)
    shape = jax.eval_shape(
      lambda x, m=model: m.init_with_output(jax.random.key(0), x)[0][0],
      jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
    )
    assert shape.shape == (1, 1000)
