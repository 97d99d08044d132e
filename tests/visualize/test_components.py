"""Colours of patches are scikit-learn's principal components."""

import numpy as np
import pytest
from PIL import Image
from sklearn.decomposition import PCA

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.convert import orbax
from vit_jax.visualize import __main__ as command
from vit_jax.visualize import components, photos
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.photos import Subject

FIELDS = {'patch_size': 8, 'width': 16, 'depth': 2, 'mlp_dim': 20, 'heads': 2}


def test_components_are_those_of_scikit_learn():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((3, 4, 5, 8)) * np.arange(8, 0, -1)
  got = components.colours(x).reshape(-1, 3)
  want = PCA(3).fit_transform(x.reshape(-1, 8))
  for i in range(3):
    inside = (got[:, i] > 0) & (got[:, i] < 1)
    assert inside.mean() > 0.9
    r = np.corrcoef(got[inside, i], want[inside, i])[0, 1]
    assert abs(r) == pytest.approx(1, abs=1e-6)


def test_equal_patches_have_equal_colours_in_every_photograph():
  x = np.random.default_rng(0).standard_normal((2, 2, 2, 8))
  x[1, 0, 0] = x[0, 1, 1]
  got = components.colours(x)
  np.testing.assert_array_equal(got[1, 0, 0], got[0, 1, 1])
  assert components.colours(np.ones((1, 2, 2, 8))).max() <= 1


@pytest.mark.slow
def test_the_command_paints_an_autoencoders_patches(tmp_path, capsys):
  """Of whose layers those of the decoder are no part."""
  fields = {'name': 'mae_vit', 'decoder_width': 8, 'decoder_heads': 2}
  checkpoint = random_checkpoint(None, (16, 24), 0, **fields | FIELDS)
  orbax.write(checkpoint, str(tmp_path / 'mae'), 'float32')
  files = []
  for i in range(2):
    image = np.random.default_rng(i).integers(0, 256, (40, 60, 3), np.uint8)
    files.append(str(tmp_path / f'{i}.png'))
    Image.fromarray(image).save(files[-1])
  out = tmp_path / 'out'
  args = ['pca', str(tmp_path / 'mae'), *files, f'--out={out}']
  assert command.main(args) == 0, capsys.readouterr()
  assert {'pca.npz', 'pca.png'} <= {p.name for p in out.iterdir()}
  subject = Subject(checkpoint, photos.load(files, checkpoint))
  _, aux = checkpoint.model.apply(
    {'params': checkpoint.params},
    checkpoint.normalize(np.stack([p.seen_HWC for p in subject.photographs])),
  )
  patches = np.asarray(aux['tokens'])[:, 1:].reshape(2, 2, 3, 16)
  np.testing.assert_allclose(
    np.load(out / 'pca.npz')['colours'], components.colours(patches), atol=1e-4
  )
  (layers, _), *_ = subject.at_work('attention')
  assert isinstance(layers, Layers)
  assert len(list(layers.attention())) == 2


def section_of(path, **fields):
  checkpoint = random_checkpoint(None, (32, 48), 0, **fields)
  pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
  Image.fromarray(pixels).save(path)
  given = photos.load([str(path)], checkpoint)
  return components.section(Subject(checkpoint, given))


def test_axial_attention_has_components_too(tmp_path):
  section = section_of(tmp_path / 'x.png', **FIELDS, axial=True, pool='gap')
  assert section.arrays['colours'].shape == (1, 4, 6, 3)


def test_a_model_without_patches_is_refused(tmp_path):
  with pytest.raises(ValueError, match='ResNet.*Use a ViT'):
    section_of(tmp_path / 'x.png', name='resnet', width=32, layers=(1,))
