"""Names of PyTorch's modules, and how they lay out what is multiplied."""

import numpy as np
import pytest

from vit_jax.checkpoints.formats import torch_table

MODULES = {
  'cls': 'cls_token',
  'embedding': 'proj',
  'query': 'attn.q',
  'conv_root': 'stem.conv',
}


@pytest.mark.parametrize(
  ('name', 'key'),
  [
    ('cls', 'cls_token'),
    ('embedding/kernel', 'proj.weight'),
    ('embedding/bias', 'proj.bias'),
    ('Transformer/encoderblock_11/query/scale', 'layers.11.attn.q.weight'),
    ('conv_root/kernel', 'stem.conv.weight'),
    ('block1/unit1/conv2/kernel', 'stages.0.blocks.0.conv2.weight'),
    ('block4/unit23/gn1/scale', 'stages.3.blocks.22.norm1.weight'),
    (
      'block2/unit1/conv_proj/kernel',
      'stages.1.blocks.0.downsample.conv.weight',
    ),
    ('block2/unit1/gn_proj/bias', 'stages.1.blocks.0.downsample.norm.bias'),
  ],
)
def test_keys_are_ours_spelt_differently(name, key):
  found = torch_table.key_of(
    name, MODULES, 'layers.{}.', 'stages.{}.blocks.{}.'
  )
  assert found == key


def test_products_are_the_same_in_their_layout():
  """torch.nn.Linear multiplies by the transposed, heads one after another."""
  rng = np.random.default_rng(0)
  for name, shape, inputs in (
    ('query/kernel', (5, 2, 3), 1),
    ('out/kernel', (2, 3, 5), 2),
    ('head/kernel', (5, 4), 1),
  ):
    kernel = rng.normal(size=shape)
    x = rng.normal(size=(7, *shape[:inputs]))
    want = np.tensordot(x, kernel, inputs).reshape(7, -1)
    to_file, to_ours = torch_table.layout(name, shape)
    got = x.reshape(7, -1) @ to_file(kernel).T
    np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_array_equal(to_ours(to_file(kernel)), kernel)


def test_convolutions_have_their_channels_first():
  kernel = np.arange(2 * 3 * 4 * 5).reshape(
    2, 3, 4, 5
  )  # height, width, in, out
  to_file, to_ours = torch_table.layout('conv1/kernel', kernel.shape)
  assert to_file(kernel).shape == (5, 4, 2, 3)
  assert to_file(kernel)[4, 3, 0, 2] == kernel[0, 2, 3, 4]
  np.testing.assert_array_equal(to_ours(to_file(kernel)), kernel)


def test_biases_are_flat_and_others_as_they_are():
  bias = np.arange(6).reshape(2, 3)
  to_file, to_ours = torch_table.layout('query/bias', (2, 3))
  np.testing.assert_array_equal(to_file(bias), np.arange(6))
  np.testing.assert_array_equal(to_ours(np.arange(6)), bias)
  assert torch_table.layout('norm/scale', (6,)) is torch_table.SAME
