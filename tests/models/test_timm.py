"""ResNets and hybrids against timm's, with random weights carried over.

timm differs from the published models in these points. The tests change timm's
models to match:

- GroupNorm: timm's epsilon is 1e-5 everywhere; the originals' is 1e-6 in
  version 1, the one of the hybrids.
- Standardised kernels, version 2: timm adds 1e-8 to the variance, we 1e-10.
- Standardised kernels, version 1: timm adds 1e-8 to the variance, the originals
  1e-5 to the deviation. No epsilon turns one into the other, so timm's is
  switched off and its outputs shrink by what the originals' takes away.
- GELU: timm's is exact, the originals' the tanh approximation.

The weights are so small that all of these points matter. No weight keeps its
initial zero or one, because a last scale of zero would hide the rest of a unit.
"""

import re

import jax
import numpy as np
import pytest
from flax import traverse_util

from vit_jax.models import variants

# Maximum error, relative to the largest value. Our models compute in float32,
# timm's in float64. Errors seen are at most 4e-6.
TOLERANCE = 1e-5
CLASSES = 7

# From our names to timm's, applied in this order. Ours count from 1.
RESNET_NAMES = (
  (r'(block|unit)(\d+)/', lambda m: f'{m[1]}s/{int(m[2]) - 1}/'),
  (r'^blocks/(\d+)/units/', r'stages/\1/blocks/'),
  (r'^conv_root/', 'stem/conv/'),
  (r'^gn_root/', 'stem/norm/'),
  (r'^gn_final/', 'norm/'),
  (r'conv_proj/', 'downsample/conv/'),
  (r'gn_proj/', 'downsample/norm/'),
  (r'gn(\d)/', r'norm\1/'),
  (r'(kernel|scale)$', 'weight'),
)
VIT_NAMES = (
  *RESNET_NAMES,
  (r'^(stem|stages)/', r'patch_embed/backbone/\1/'),
  (r'^embedding/', 'patch_embed/proj/'),
  (r'^cls$', 'cls_token'),
  (r'^Transformer/posembed_input/pos_embedding$', 'pos_embed'),
  (r'^Transformer/encoder_norm/', 'norm/'),
  (r'^Transformer/encoderblock_', 'blocks/'),
  (r'LayerNorm_0/', 'norm1/'),
  (r'LayerNorm_2/', 'norm2/'),
  (r'MultiHeadDotProductAttention_1/out/', 'attn/proj/'),
  (r'MultiHeadDotProductAttention_1/', 'attn/'),
  (r'MlpBlock_3/Dense_0/', 'mlp/fc1/'),
  (r'MlpBlock_3/Dense_1/', 'mlp/fc2/'),
)


def random_params(model, size):
  """Returns random arrays by path."""
  rng = np.random.default_rng(0)

  def draw(path, shape):
    x = rng.standard_normal(shape)
    if re.search(r'conv\w*/kernel$', path):
      # Channels with means and deviations of their own, 1e-4 to 1e-2.
      x += rng.standard_normal(shape[-1])
      x *= 10 ** rng.uniform(-4, -2, shape[-1])
    elif re.search(r'(query|key|value)/kernel$', path):
      x *= shape[0] ** -0.5
    elif path.endswith('kernel'):
      x *= np.prod(shape[:-1]) ** -0.5
    elif re.search(r'Transformer/.*scale$', path):
      x = 1 + 0.3 * x
    else:
      x *= 0.02
    return np.float32(x)

  tree = jax.eval_shape(
    lambda key: variants.init(model, key, size), jax.random.key(0)
  )
  flat = traverse_util.flatten_dict(tree, sep='/')
  return {path: draw(path, leaf.shape) for path, leaf in flat.items()}


def to_timm(params):
  """Returns the same arrays under timm's names and in its shapes."""
  is_vit = 'cls' in params
  out = {}
  for path, x in params.items():
    if path.endswith('out/kernel'):
      x = x.reshape(-1, x.shape[-1])
    elif re.search(r'(query|key|value)/kernel$', path):
      x = x.reshape(x.shape[0], -1)
    elif re.search(r'(query|key|value)/bias$', path):
      x = x.reshape(-1)
    if path.endswith('kernel'):
      x = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T
    for pattern, new in VIT_NAMES if is_vit else RESNET_NAMES:
      path = re.sub(pattern, new, path)
    out[path.replace('/', '.')] = x
  for name in [name for name in out if '.query.' in name]:
    parts = [name.replace('query', part) for part in ('query', 'key', 'value')]
    out[name.replace('query', 'qkv')] = np.concatenate(
      [out.pop(part) for part in parts]
    )
  if not is_vit:
    # BiT's head is a 1x1 convolution.
    out['head.fc.weight'] = out.pop('head.weight')[:, :, None, None]
    out['head.fc.bias'] = out.pop('head.bias')
  elif 'patch_embed.backbone.stages.0.blocks.0.conv1.weight' not in out:
    # timm's names leave out the stem if the backbone is only a stem.
    out = {name.replace('backbone.stem', 'backbone'): out[name] for name in out}
  return out


def use_our_epsilons(timm, theirs, version):
  """Changes the points that the docstring of this file lists."""

  def shrink(conv, _, y):
    deviation = conv.weight.std((1, 2, 3), correction=0)
    return y * (deviation / (deviation + 1e-5))[:, None, None]

  for module in theirs.modules():
    if isinstance(module, timm.layers.GroupNormAct):
      module.eps = {1: 1e-6, 2: 1e-5}[version]
    elif isinstance(module, timm.layers.StdConv2d):
      module.eps = 1e-10
    elif isinstance(module, timm.layers.StdConv2dSame):
      module.eps = 1e-20
      module.register_forward_hook(shrink)


def carry_over(ours, theirs, size, torch):
  """Fills both models alike.

  Returns:
    A random batch of images BCHW for theirs, and logits and `aux` of ours.
  """
  params = random_params(ours, size)
  # Strict: every array has one counterpart.
  theirs.load_state_dict(
    {name: torch.tensor(x) for name, x in to_timm(params).items()}
  )
  theirs.eval().double()
  images = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3))
  images = images.astype(np.float32)
  logits, aux = jax.jit(
    lambda p, x: ours.apply({'params': p}, x, capture=('blocks',))
  )(traverse_util.unflatten_dict(params, sep='/'), images)
  return torch.tensor(images.transpose(0, 3, 1, 2)).double(), logits, aux


def assert_equal(name, got, want):
  want = want.numpy()
  assert got.shape == want.shape, name
  error = np.abs(got - want).max() / np.abs(want).max()
  assert error < TOLERANCE, f'{name} differs by {error:.1e} of its largest'


@pytest.mark.fast('2')
@pytest.mark.parametrize('version', [1, 2])
def test_small_resnet_equals_timm(timm, torch, version):
  # One odd and one even side, because their padding differs.
  size = (50, 71)
  fields = {
    'name': 'resnet',
    'layers': (1, 2, 1, 1),
    'width': 32,
    'version': version,
  }
  theirs = timm.models.ResNetV2(
    layers=fields['layers'],
    width_factor=fields['width'] / 64,
    num_classes=CLASSES,
    preact=version == 2,
    stem_type={1: 'same', 2: 'fixed'}[version],
    conv_layer={1: timm.layers.StdConv2dSame, 2: timm.layers.StdConv2d}[
      version
    ],
  )
  ours = variants.build(num_classes=CLASSES, image_size=size, **fields)
  use_our_epsilons(timm, theirs, version)
  images, logits, aux = carry_over(ours, theirs, size, torch)
  with torch.no_grad():
    x = theirs.stem(images)
    assert_equal('root', aux['stem'], x.permute(0, 2, 3, 1))
    for i, stage in enumerate(theirs.stages):
      x = stage(x)
      assert_equal(f'stage {i}', aux['blocks'][i], x.permute(0, 2, 3, 1))
    features = theirs.forward_features(images).permute(0, 2, 3, 1).flatten(1, 2)
    assert_equal('features', aux['tokens'], features)
    assert_equal('logits', logits, theirs(images))


@pytest.mark.fast('r+ti16-vit_tiny_r_s16_p8_224')
@pytest.mark.parametrize(
  ('variant', 'name'),
  [
    ('r+ti16', 'vit_tiny_r_s16_p8_224'),
    ('r26+s32', 'vit_small_r26_s32_224'),
  ],
)
def test_hybrid_equals_timm(timm, torch, variant, name):
  """Two layers are enough, because other tests compare encoders."""
  size = (64, 96)
  fields = variants.fields(variant) | {'depth': 2}
  ours = variants.build(num_classes=CLASSES, image_size=size, **fields)
  theirs = timm.create_model(
    name, num_classes=CLASSES, img_size=size, depth=2, act_layer='gelu_tanh'
  )
  use_our_epsilons(timm, theirs, version=1)
  images, logits, aux = carry_over(ours, theirs, size, torch)
  with torch.no_grad():
    patches = aux['stem'].reshape(2, -1, fields['width'])
    assert_equal('patches', patches, theirs.patch_embed(images))
    assert_equal('tokens', aux['tokens'], theirs.forward_features(images))
    assert_equal('logits', logits, theirs(images))
