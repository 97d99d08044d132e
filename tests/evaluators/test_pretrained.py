"""The Python interface: golden outputs, and every kind of input."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax.evaluators import pretrained
from vit_jax.visualize import attention_maps, rollout

GOLDEN = ROOT / 'tests/golden'


@pytest.fixture(scope='module')
def vit():
  return vit_jax.load(GOLDEN / 'tiny_s7.npz')


@pytest.fixture(scope='module')
def images(vit):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (3, *vit.image_size, 3), np.uint8)


def test_logits_and_features_are_those_of_the_original(vit):
  """The golden images have values from -1 to 1."""
  golden = np.load(GOLDEN / 'tiny_s7_golden.npz')
  assert vit.checkpoint.preprocessing.mean == (0.5, 0.5, 0.5)
  images = (golden['images'] + 1) * 127.5
  logits = vit.checkpoint.logits(images)
  np.testing.assert_allclose(logits, golden['logits'], atol=1e-5)


def test_every_way_in_gives_the_same(vit, images, tmp_path):
  paths = []
  for i, image in enumerate(images):
    paths.append(tmp_path / f'{i}.png')
    Image.fromarray(image).save(paths[-1])
  pictures = [Image.open(path) for path in paths]
  want = np.asarray(vit.checkpoint.logits(images))
  for given in (images, list(images), paths, list(map(str, paths)), pictures):
    np.testing.assert_allclose(vit.logits(given), want, atol=1e-6)
  for one in (images[1], paths[1], str(paths[1]), pictures[1]):
    np.testing.assert_allclose(vit.logits(one), want[1:2], atol=1e-6)


def test_a_pillow_image_gives_the_logits_of_its_file(vit, tmp_path):
  """16-bit grey, transparent and rotated images."""
  H, W = vit.image_size
  greys = np.linspace(0, 65535, H * W).reshape(H, W).astype(np.uint16)
  Image.fromarray(greys).save(tmp_path / 'grey.png')
  clear = np.zeros((H, W, 4), np.uint8)
  clear[:, : W // 2, 3] = 255
  Image.fromarray(clear).save(tmp_path / 'clear.png')
  exif = Image.Exif()
  exif[274] = 6
  image = Image.fromarray(greys).convert('L').convert('RGB')
  image.putpixel((0, 0), (255, 0, 0))
  image.save(tmp_path / 'turned.png', exif=exif)
  for path in sorted(tmp_path.iterdir()):
    from_file, from_picture = vit.logits(path), vit.logits(Image.open(path))
    np.testing.assert_array_equal(from_picture, from_file, err_msg=path.name)


def test_predictions_are_the_softmax_in_order(vit, images):
  logits = np.asarray(vit.checkpoint.logits(images), np.float64)
  odds = np.exp(logits - logits.max(axis=1, keepdims=True))
  probabilities = odds / odds.sum(axis=1, keepdims=True)
  for found, expected in zip(
    vit.predict(images, topk=2), probabilities, strict=True
  ):
    order = np.argsort(-expected)[:2]
    assert [name for name, _ in found] == [str(c) for c in order]
    np.testing.assert_allclose([p for _, p in found], expected[order], 1e-5)
  assert len(vit.predict(images[0], topk=10**6)[0]) == logits.shape[1]
  for none in (0, -1):
    with pytest.raises(ValueError, match=f'topk is {none}; it must be 1'):
      vit.predict(images[0], topk=none)


@pytest.fixture(scope='module')
def aux(vit, images):
  """The intermediates of the model for the images."""
  checkpoint = vit.checkpoint
  _, aux = checkpoint.model.apply(
    {'params': checkpoint.params},
    checkpoint.normalize(images),
    capture=('attention', 'blocks'),
  )
  return aux


def test_features_are_the_class_token_or_the_patches(vit, images, aux):
  h, w = vit.checkpoint.model.grid(vit.image_size)
  block_BLD = aux['blocks'][0]
  for name, vector_BD, tokens_BLD in (
    ('pre_logits', aux['pre_logits'], aux['tokens']),
    ('block_0', block_BLD[:, 0], block_BLD),
  ):
    np.testing.assert_allclose(vit.features(images, name), vector_BD, atol=1e-5)
    np.testing.assert_allclose(
      vit.features(images, name, patches=True),
      tokens_BLD[:, 1:].reshape(3, h, w, -1),
      atol=1e-5,
    )
  with pytest.raises(ValueError, match='has no patches: use'):
    vit.features(images, 'logits', patches=True)


def test_attention_is_that_of_the_model(vit, images, aux):
  found = vit.attention(images)
  for mine, theirs in zip(found, aux['attention'], strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-6)
  assert vit.attention(images[0])[0].shape[0] == 1


def test_batches_have_few_sizes(vit, images, monkeypatch):
  sizes, apply = set(), vit.checkpoint.logits
  monkeypatch.setattr(
    type(vit.checkpoint),
    'logits',
    lambda self, x: sizes.add(len(x)) or apply(x),
  )
  for count in (1, 2, 3, 5, 9, 33, 40):
    assert len(vit.logits([images[0]] * count)) == count
  assert sizes <= {1, 4, 16, 32}


def test_a_bad_image_may_be_skipped(vit, images, tmp_path):
  path = tmp_path / 'bad.jpg'
  path.write_bytes(b'no image')
  ((best,), nothing) = vit.predict([images[0], path], 1, on_bad_image='skip')
  assert best[0] == vit.predict(images[0], topk=1)[0][0][0] and nothing == []
  with pytest.raises(ValueError, match="on_bad_image is 'drop'"):
    vit.predict(images[0], on_bad_image='drop')
  Image.fromarray(images[0]).save(tmp_path / 'cut.jpg')
  whole = (tmp_path / 'cut.jpg').read_bytes()
  (tmp_path / 'cut.jpg').write_bytes(whole[: len(whole) - 40])
  with Image.open(tmp_path / 'cut.jpg') as cut:  # reads the header only
    assert vit.predict([images[0], cut], 1, on_bad_image='skip')[1] == []
  # Something that is not an image at all is never skipped.
  for other in (iter([path]), np.array([str(path)]), path.read_bytes()):
    with pytest.raises(TypeError, match='Give a path, a Pillow image or an ar'):
      vit.predict(other, on_bad_image='skip')
  assert 'tiny_s7.npz' in repr(vit) and 'parameters' in repr(vit)


@pytest.mark.slow
def test_rollout_of_the_whole_and_of_a_class(vit, images):
  checkpoint = vit.checkpoint
  layers = attention_maps.Layers(
    checkpoint.model, checkpoint.params, checkpoint.normalize(images)
  )
  np.testing.assert_allclose(
    vit.rollout(images), rollout.rollout(layers), atol=1e-5
  )
  np.testing.assert_allclose(
    vit.rollout(images, of=np.int64(2)),
    rollout.rollout(layers, class_B=np.full(3, 2)),
    atol=1e-4,
  )
  with pytest.raises(ValueError, match="has no class 'dog'"):
    vit.rollout(images, of='dog')
  names = tuple('abb' + 'c' * (checkpoint.model.num_classes - 3))
  named = pretrained.TrainedModel(
    dataclasses.replace(checkpoint, class_names=names)
  )
  # `rollout` takes the names that `predict` returns.
  for name, _ in named.predict(images[0], topk=3)[0]:
    assert named.rollout(images[0], of=name).shape[0] == 1
  with pytest.raises(ValueError, match=r"no class 'b'.* b \(1\), b \(2\)"):
    named.rollout(images, of='b')
  np.testing.assert_array_equal(
    named.rollout(images, of='b (2)'), vit.rollout(images, of=2)
  )


def test_more_images_than_a_batch(vit, images):
  many = np.concatenate([images] * 12)
  want = np.concatenate([vit.logits(images)] * 12)
  np.testing.assert_allclose(vit.logits(many), want, atol=1e-5)


def test_without_a_head_there_are_features(vit):
  params = {k: x for k, x in vit.checkpoint.params.items() if k != 'head'}
  model = vit.checkpoint.model.clone(num_classes=0)
  headless = pretrained.TrainedModel(
    dataclasses.replace(vit.checkpoint, model=model, params=params)
  )
  for ask in (headless.logits, headless.predict):
    with pytest.raises(ValueError, match=r'npz has no head. Use features\(\)'):
      ask(np.zeros((8, 8, 3), np.uint8))


def test_a_detector_does_not_classify_images():
  layers = {'backbone_layers': (1, 1), 'encoder_layers': 1, 'decoder_layers': 1}
  finder = pretrained.TrainedModel(
    random_checkpoint(None, (64, 64), name='detr', **layers)
  )
  for ask in (finder.logits, finder.predict):
    with pytest.raises(ValueError, match='a DETR, predicts objects'):
      ask(np.zeros((8, 8, 3), np.uint8))


def run(*args, **kwargs):
  return subprocess.run(
    [sys.executable, '-m', 'vit_jax', *args],
    capture_output=True,
    text=True,
    **kwargs,
  )


@pytest.mark.slow
def test_a_config_by_name_from_any_folder(tmp_path):
  """The command keeps its exit status."""
  for named in (['--config=digits:vit'], ['--config', 'digits:vit']):
    done = run(
      *('train', *named, '--workdir=x', '--config.optimizer.lr=-1'),
      cwd=tmp_path,
      env={'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    )
    assert done.returncode == 2
    assert done.stderr.startswith('error: optimizer.lr is -1')
  assert not list(tmp_path.iterdir())
