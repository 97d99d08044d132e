"""Names, published sizes, and refusals."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax.models import flops, variants


def vit(variant, **kwargs):
  kwargs = {'num_classes': 1000, 'image_size': (224, 224)} | kwargs
  return variants.build(**kwargs, **variants.fields(variant))


# Exact counts of timm's models of the same shape with 1,000 classes, which
# round to what the paper and its successors print.
PUBLISHED = {
  'ti16': (5_717_416, '6M'),
  's16': (22_050_664, '22M'),
  's32': (22_878_952, '23M'),
  'b16': (86_567_656, '87M'),
  'b32': (88_224_232, '88M'),
  'l16': (304_326_632, '304M'),
  'l32': (306_535_400, '307M'),
  'h14': (632_045_800, '632M'),
  'g14': (1_012_611_432, '1013M'),
  'G14': (1_844_440_680, '1844M'),
}


@pytest.mark.parametrize('variant', PUBLISHED)
def test_parameter_count_is_the_published_one(variant):
  count, rounded = PUBLISHED[variant]
  got = flops.count_params(vit(variant), (224, 224))
  assert got == count
  assert f'{got / 1e6:.0f}M' == rounded


@pytest.mark.parametrize('variant', PUBLISHED)
def test_parameter_count_is_the_closed_form(variant):
  """Equations 1 to 4, term by term."""
  f = variants.fields(variant)
  D, M, P = f['width'], f['mlp_dim'], f['patch_size']
  layer = 4 * (D * D + D) + (D * M + M) + (M * D + D) + 2 * 2 * D
  tokens = (224 // P) ** 2 + 1
  want = (P * P * 3 * D + D) + D + tokens * D + f['depth'] * layer + 2 * D
  want += D * 1000 + 1000
  assert flops.count_params(vit(variant), (224, 224)) == want


@pytest.mark.parametrize('variant', ['b32', 'l16', 'h14'])
def test_flops_are_the_closed_form(variant):
  model = vit(variant)
  f = variants.fields(variant)
  D, M, P = f['width'], f['mlp_dim'], f['patch_size']
  N = (224 // P) ** 2
  L = N + 1
  layer = L * (4 * D * D + 2 * D * M) + 2 * L * L * D
  want = 2 * (N * P * P * 3 * D + f['depth'] * layer + D * 1000)
  assert flops.forward_flops(model, (224, 224)) == want


def test_flops_of_a_convolution():
  """Stem 7x7/2 on 64 px, then 4x4 patches of its 16x16 output."""
  model = variants.build(
    num_classes=0,
    image_size=(64, 64),
    patch_size=4,
    width=48,
    depth=1,
    mlp_dim=1,
    heads=1,
    stem_width=64,
  )
  without = model.clone(stem_width=0)
  stem = 2 * 32 * 32 * 7 * 7 * 3 * 64
  tokens = 16
  embedding = 2 * tokens * 4 * 4 * 64 * 48
  embedding_without = 2 * tokens * 4 * 4 * 3 * 48
  difference = flops.forward_flops(model, (64, 64)) - flops.forward_flops(
    without, (16, 16)
  )
  assert difference == stem + embedding - embedding_without


def test_l16_takes_the_compute_of_table_6():
  """783 exaFLOPs: 3 x forward x 7 epochs of 303M images, 18,291 classes."""
  model = vit('l16', num_classes=18_291)
  exaflops = 3 * flops.forward_flops(model, (224, 224)) * 7 * 303e6 / 1e18
  assert exaflops == pytest.approx(783, rel=0.001)


def test_any_patch_size_and_a_slash_are_read():
  assert variants.fields('l/7') == variants.fields('l16') | {'patch_size': 7}


@pytest.mark.parametrize(
  ('name', 'hint'),
  [('l15x', 'l16'), ('k16', 'b16'), ('vit_l16', 'l16'), ('', 'Valid:')],
)
def test_a_misspelt_variant_names_the_nearest(name, hint):
  with pytest.raises(ValueError, match=hint):
    variants.fields(name)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'pool': 'gapp'}, "model.pool is 'gapp'. Did you mean gap"),
    ({'remat': 'dots'}, "model.remat is 'dots'"),
    ({'dtype': 'float16'}, "model.dtype is 'float16'"),
    ({'heads': 5}, 'width 192 is not a multiple of model.heads 5'),
    ({'depth': 0}, 'model.depth is 0'),
    ({'image_size': (224, 230)}, 'do not tile an image of 224x230'),
  ],
)
def test_fields_that_cannot_work_are_refused(fields, message):
  good = {'num_classes': 10, 'image_size': (224, 224)}
  with pytest.raises(ValueError, match=message):
    variants.build(**(good | variants.fields('ti16') | fields))


def test_counting_allocates_nothing():
  """G/14 would be 7 GB."""
  before = len(jax.live_arrays())
  flops.count_params(vit('G14'), (224, 224))
  assert len(jax.live_arrays()) <= before + 1  # the random key


def test_every_remat_policy_exists():
  for name in variants.remat_policies():
    model = vit('ti16').clone(remat=name, depth=1)
    shape = jax.eval_shape(
      lambda x, m=model: m.init_with_output(jax.random.key(0), x)[0][0],
      jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32),
    )
    assert shape.shape == (1, 1000)
