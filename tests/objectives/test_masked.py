"""Targets, corruption and loss of masked patches against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from vit_jax.checkpoints import opening
from vit_jax.data.images import Images
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.models import variants
from vit_jax.models.masked_vit import KEPT, MASKED, OTHER, SAME, TARGETS
from vit_jax.objectives import masked
from vit_jax.objectives.masked import MaskedPatches
from vit_jax.train import evaluate_only, train

SIZE = (16, 24)
P = 8
FIELDS = {'patch_size': P, 'width': 16, 'depth': 1, 'mlp_dim': 24, 'heads': 2}
GRID = (2, 3)
L = 6
KEY = jax.random.key(0)


def make(target='mean_colour', flip=False, **fields):
  model = variants.build(
    name='masked_vit',
    num_classes=0,
    image_size=SIZE,
    pool='gap',
    target=target,
    **FIELDS,
  )
  images = Images(
    SIZE, Preprocessing(0, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), flip=flip
  )
  return MaskedPatches(model, images, **fields)


def uint8_images(n=4, seed=0):
  rng = np.random.default_rng(seed)
  # Neighbouring pixels are similar, so that means differ.
  coarse = rng.integers(0, 256, (n, 4, 6, 3)).repeat(4, 1).repeat(4, 2)
  noise = rng.integers(-30, 31, coarse.shape)
  return np.clip(coarse + noise, 0, 255).astype(np.uint8)


def colour(pixels):
  """3 bits of the mean of each channel, as in the paper."""
  r, g, b = (
    int(np.floor(pixels[..., c].astype(np.float64).mean() / 256 * 8))
    for c in range(3)
  )
  return 64 * r + 8 * g + b


def patch(image, i, j):
  return image[P * i : P * (i + 1), P * j : P * (j + 1)]


def targets_in_numpy(kind, images):
  found = []
  for image in images:
    for i, j in np.ndindex(GRID):
      cut = patch(image, i, j)
      if kind == 'mean_colour':
        found.append(colour(cut))
      elif kind == 'downsized':
        found.append(
          [
            colour(cut[2 * y : 2 * y + 2, 2 * x : 2 * x + 2])
            for y, x in np.ndindex(4, 4)
          ]
        )
      else:
        normal = (cut / 255 - (0.5, 0.4, 0.3)) / (0.2, 0.3, 0.4)
        found.append(normal.reshape(-1))
  return np.reshape(found, (len(images), L, *np.shape(found)[1:]))


@pytest.mark.fast('pixels')
@pytest.mark.parametrize('target', TARGETS)
def test_targets_are_those_of_numpy(target):
  images = uint8_images()
  batch = make(target).augment({'image': images}, KEY)
  want = targets_in_numpy(target, images)
  assert batch['target'].shape == want.shape
  if target == 'pixels':
    np.testing.assert_allclose(batch['target'], want, rtol=1e-5, atol=1e-5)
  else:
    np.testing.assert_array_equal(batch['target'], want)
    assert len(np.unique(want)) > 10


def test_extreme_colours():
  pixels = np.zeros((1, 2, 4, 4, 3), np.uint8)
  pixels[0, 1] = 255
  got = masked.colours(jnp.asarray(pixels.reshape(1, 2, -1)))
  assert got.tolist() == [[0, 511]]
  # 31.9 is still the lowest of eight, 32 is not.
  pixels[0, 0], pixels[0, 1] = 32, 32
  pixels[0, 0, 0, 0] = 31
  got = masked.colours(jnp.asarray(pixels.reshape(1, 2, -1)))
  assert got.tolist() == [[0, 64 + 8 + 1]]


def test_corruption_of_1000_images():
  made, patches = make(), 64
  keys = jax.random.split(KEY, 1000)
  kind, other = jax.vmap(lambda key: made.corruption(key, patches))(keys)
  kind, other = np.asarray(kind), np.asarray(other)
  assert ((kind != KEPT).sum(1) == 32).all()
  corrupted = kind[kind != KEPT]
  # Five standard deviations of 32,000 draws.
  for which, share in ((MASKED, 0.8), (OTHER, 0.1), (SAME, 0.1)):
    bound = 5 * np.sqrt(share * (1 - share) / corrupted.size)
    assert abs((corrupted == which).mean() - share) < bound
  # Patches are equally likely and independent.
  assert abs((kind != KEPT).mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(1000)
  assert len(np.unique(kind != KEPT, axis=0)) == 1000
  assert (other != np.arange(patches)).all()
  assert other.min() == 0 and other.max() == patches - 1
  steps = (other - np.arange(patches)) % patches
  counts = np.bincount(steps.ravel(), minlength=patches)[1:]
  expected = steps.size / (patches - 1)
  assert abs(counts - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize(('rate', 'count'), [(0.15, 10), (1.0, 64), (1e-3, 1)])
def test_its_share_is_exact(rate, count):
  kind, _ = make(rate=rate).corruption(KEY, 64)
  assert (np.asarray(kind) != KEPT).sum() == count


def test_only_masks_when_asked():
  kind, _ = make(mask=1.0, other=0.0).corruption(KEY, 64)
  assert {*np.asarray(kind).tolist()} == {KEPT, MASKED}
  kind, _ = make(mask=0.0, other=1.0).corruption(KEY, 64)
  assert {*np.asarray(kind).tolist()} == {KEPT, OTHER}


def test_flipped_images_have_flipped_targets():
  made, batch = make('downsized', flip=True), {'image': uint8_images(64)}
  got = made.augment(batch, KEY)
  for i, image in enumerate(batch['image']):
    seen = np.asarray(got['image'][i])
    normal = (image / 255 - (0.5, 0.4, 0.3)) / (0.2, 0.3, 0.4)
    is_flipped = np.abs(seen - normal).max() > 1e-4
    image = image[:, ::-1] if is_flipped else image
    np.testing.assert_array_equal(
      got['target'][i], targets_in_numpy('downsized', image[None])[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize('target', ['downsized', 'pixels'])
def test_loss_is_that_of_numpy(target):
  made = make(target)
  params = jax.jit(lambda key: variants.init(made.model, key, SIZE))(KEY)
  keys = iter(jax.random.split(KEY, 1000))
  params = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params
  )
  batch = made.augment({'image': uint8_images()}, KEY)
  loss, metrics = made.loss(params, batch, KEY)
  assert metrics == {'loss': loss}
  predicted, _ = made.model.apply(
    {'params': params},
    batch['image'],
    corruption=(batch['kind'], batch['other']),
  )
  predicted = np.asarray(predicted, np.float64)
  per_image = []
  for x, kind, right in zip(
    predicted, batch['kind'], np.asarray(batch['target']), strict=True
  ):
    losses = []
    for i in np.flatnonzero(kind != KEPT):
      if target == 'pixels':
        losses.append(((x[i] - right[i]) ** 2).mean())
      else:
        rows, indices = x[i].reshape(-1, 512), right[i].reshape(-1)
        log_p = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        losses.append(-log_p[np.arange(len(rows)), indices].mean())
    per_image.append(np.mean(losses))
  assert loss == pytest.approx(np.mean(per_image), rel=1e-4)


def test_every_evaluation_masks_an_image_alike():
  """The index of an image determines its mask; dropout is off."""
  given = []

  class Zeros:
    target, grid = 'pixels', staticmethod(lambda size: GRID)

    def apply(self, variables, images, *, train, corruption, rngs):
      given.append((train, rngs))
      kind, _ = corruption
      return jnp.zeros((*kind.shape, P * P * 3)), {}

  made = dataclasses.replace(make(rate=0.3), model=Zeros())
  images, index = uint8_images(), np.int32([7, 0, 3, 12])
  batch = {'image': images, 'index': index, 'mask': np.float32([1, 1, 0, 1])}
  got = made.evaluate({}, batch)
  squares_BL = np.mean(targets_in_numpy('pixels', images) ** 2, -1)
  total = 0.0
  for i in (0, 1, 3):
    key = jax.random.fold_in(jax.random.key(0), index[i])
    kind, _ = made.corruption(key, L)
    total += squares_BL[i][np.asarray(kind) != KEPT].mean()
  assert float(got['loss']) == pytest.approx(total, rel=1e-5)
  assert got['examples'] == 3
  prepared = made.augment({'image': images}, KEY)
  made.loss({}, prepared, KEY)
  key = {'dropout': KEY}
  assert given == [(False, None), (True, key)]


def test_at_the_start_all_colours_are_as_likely():
  made = make()
  params = jax.jit(lambda key: variants.init(made.model, key, SIZE))(KEY)
  batch = made.augment({'image': uint8_images()}, KEY)
  loss, _ = made.loss(params, batch, KEY)
  assert float(loss) == pytest.approx(np.log(512), rel=1e-5)


def config_of(**changes):
  config = digits.get_config('masked')
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2)
  config.update_from_flattened_dict(
    {'total': '4 steps', 'eval_every': '4 steps'} | changes
  )
  return config


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'objective.target': 'hue'}, "objective.target is 'hue'"),
    ({'objective.rate': 0.0}, 'objective.rate is 0.0'),
    ({'objective.mask': 0.95}, 'objective.mask is 0.95 .* at most 1'),
  ],
)
def test_fields_that_cannot_work(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    train(config_of(**changes), str(tmp_path / 'w'))
  assert not (tmp_path / 'w').exists()


@pytest.fixture(scope='module')
def pretrained(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('masked')
  train(config_of(), str(workdir))
  return workdir


@pytest.mark.slow
def test_its_checkpoint_opens_as_what_it_is(pretrained):
  checkpoint = opening.open_checkpoint(str(pretrained))
  assert checkpoint.model.kind == 'masked_vit'
  assert checkpoint.model.target == 'mean_colour'
  assert checkpoint.class_names == ()
  lines = (pretrained / 'metrics.csv').read_text().splitlines()
  assert 'fewshot/10shot_accuracy' in lines[0] and 'test/loss' in lines[0]


@pytest.mark.slow
def test_it_is_measured_again_alike(pretrained):
  lines = (pretrained / 'metrics.csv').read_text().splitlines()
  columns, last = lines[0].split(','), lines[-1].split(',')
  want = float(last[columns.index('test/loss')])
  found = evaluate_only(config_of(eval_only=True), str(pretrained))
  assert found['test/loss'] == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_classifier_starts_from_its_body(pretrained, tmp_path, caplog):
  config = digits.get_config()
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2, pool='gap')
  config.update(init=str(pretrained), total='1 step', eval_every='1 step')
  config.optimizer.update(lr=1e-12, warmup='0 steps')
  train(config, str(tmp_path))
  ours = opening.open_checkpoint(str(tmp_path)).params
  theirs = opening.open_checkpoint(str(pretrained)).params
  assert {*ours} - {*theirs} == {'head'}
  assert {*theirs} - {*ours} == {'mask_embedding', 'prediction'}
  for name in {*ours} & {*theirs}:
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      ours[name],
      theirs[name],
    )
