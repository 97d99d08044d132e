"""Pictures of masked patches show what is hidden and what is predicted."""

import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax.checkpoints import opening
from vit_jax.data.images import Images
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.models import variants
from vit_jax.models.masked_vit import KEPT, MASKED, OTHER, TARGETS
from vit_jax.objectives import masked as objective
from vit_jax.visualize import __main__ as command
from vit_jax.visualize import draw, predictions

SIZE = (16, 24)
P = 8


@pytest.fixture
def opened(monkeypatch):
  """Makes targets open as checkpoints that predict, and vit as a plain one."""

  def checkpoint(path):
    fields = {'patch_size': P, 'width': 16, 'depth': 1, 'mlp_dim': 24}
    fields |= {'heads': 2, 'pool': 'gap', 'num_classes': 0}
    if path in TARGETS:
      fields |= {'name': 'masked_vit', 'target': path}
    model = variants.build(image_size=SIZE, **fields)
    params = jax.device_get(variants.init(model, jax.random.key(0), SIZE))
    if path in TARGETS:
      # Always the same answer: colour 511, or the mean of the pixels.
      params['prediction'] = jax.tree.map(np.zeros_like, params['prediction'])
      if path != 'pixels':
        params['prediction']['bias'][..., 511] = 9
    return opening.Checkpoint(path, model, params, SIZE)

  monkeypatch.setattr(opening, 'open_checkpoint', checkpoint)
  return checkpoint


@pytest.fixture
def file(tmp_path):
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (*SIZE, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'a.png')
  return tmp_path / 'a.png'


@pytest.fixture
def sheets(monkeypatch):
  """Collects what is drawn."""
  sheets = []
  monkeypatch.setattr(draw, 'sheet', lambda *args: sheets.append(args) or b'')
  return sheets


def test_pictures_and_arrays(opened, file, tmp_path, capsys, sheets):
  """Only corrupted patches are replaced by what is predicted and right."""
  out = tmp_path / 'out'
  args = ['masked', 'mean_colour', str(file), f'--out={out}', '--rate=0.7']
  assert command.main(args) == 0
  said = capsys.readouterr().out
  assert 'In each image, 4 of 6 patches are corrupted' in said
  assert 'MaskedViT' in said
  assert {p.name for p in out.iterdir()} == {*('masked.png', 'masked.npz')}
  with np.load(out / 'masked.npz') as found:
    kind, images = found['kind'], found['images']
    hidden, predicted = found['hidden'], found['predicted']
  assert kind.shape == (1, 2, 3)
  assert (kind != KEPT).sum() == 4
  seen = np.asarray(Image.open(file))
  np.testing.assert_array_equal(images[0], seen)
  at = kind[0].repeat(P, 0).repeat(P, 1)
  assert (hidden[0][at == MASKED] == 128).all()
  np.testing.assert_array_equal(hidden[0][at == KEPT], seen[at == KEPT])
  np.testing.assert_array_equal(predicted[0][at == KEPT], seen[at == KEPT])
  # 511 is the brightest colour, whose middle is 240.
  assert (predicted[0][at != KEPT] == 240).all()
  (((row,), _),) = sheets
  times = row['image'].shape[0] // SIZE[0]
  right = row['what is right'][::times, ::times]
  for y, x in np.ndindex(kind[0].shape):
    patch, own = (
      a[P * y : P * y + P, P * x : P * x + P] for a in (right, seen)
    )
    if kind[0, y, x] == KEPT:
      np.testing.assert_array_equal(patch, own)
    else:  # one colour, near the mean
      assert np.ptp(patch, axis=(0, 1)).max() == 0
      assert np.abs(patch[0, 0] - own.mean((0, 1))).max() <= 16


@pytest.mark.parametrize('target', TARGETS)
def test_what_is_right_looks_like_the_image(target, opened):
  model = opened(target).model
  rng = np.random.default_rng(1)
  image = rng.integers(0, 256, (4, 6, 3)).repeat(4, 0).repeat(4, 1)
  image = image.astype(np.uint8)
  images = Images(SIZE, Preprocessing(0, (0.2, 0.4, 0.6), (0.3, 0.2, 0.25)))
  right = objective.target(model, image[None], images.normalize(image[None]))
  patches = predictions.colours_of(
    model, images, np.asarray(right[0]), (P, P, 3)
  )
  want = image.reshape(2, P, 3, P, 3).swapaxes(1, 2).reshape(6, P, P, 3)
  if target == 'mean_colour':
    means = want.mean((1, 2), keepdims=True).astype(np.float64)
    want = np.broadcast_to(means, want.shape)
  # Half of one of eight steps, or rounding.
  bound = 0 if target == 'pixels' else 16
  assert np.abs(patches.astype(float) - want).max() <= bound


def test_a_checkpoint_of_another_task_is_refused(
  opened, file, tmp_path, capsys
):
  args = ['masked', 'vit', str(file), f'--out={tmp_path / "out"}']
  assert command.main(args) == 2
  err = capsys.readouterr().err
  assert err.startswith(
    'error: vit is a ViT, which does not predict masked patches'
  )
  assert err.count('\n') == 1
  assert not (tmp_path / 'out').exists()


def test_a_rate_that_corrupts_nothing_is_refused(
  opened, file, tmp_path, capsys
):
  args = ['masked', 'pixels', str(file), f'--out={tmp_path / "out"}']
  assert command.main([*args, '--rate=0']) == 2
  err = capsys.readouterr().err
  assert '--rate is 0.0; it must be above 0 and at most 1' in err
  assert command.main([*args, '--rate=0.01']) == 0
  assert 'In each image, 1 of 6 patches' in capsys.readouterr().out


def test_each_image_has_patches_of_its_own_hidden(
  opened, file, tmp_path, sheets
):
  """Nine images, of which eight are in one picture."""
  paths = [str(file)]
  for i in range(8):
    image = np.random.default_rng(i).integers(0, 256, (*SIZE, 3), np.uint8)
    paths.append(str(tmp_path / f'{i}.png'))
    Image.fromarray(image).save(paths[-1])
  out = tmp_path / 'out'
  args = ['masked', 'pixels', *paths, f'--out={out}', '--rate=0.9']
  assert command.main(args) == 0
  with np.load(out / 'masked.npz') as found:
    kind, hidden = found['kind'], found['hidden']
    assert found['files'].tolist() == paths
  assert ((kind != KEPT).sum((1, 2)) == 5).all()
  assert len({x.tobytes() for x in kind}) > 1
  assert (kind == OTHER).any()
  for i, path in enumerate(paths):
    seen = np.asarray(Image.open(path))
    patches = [
      seen[P * y : P * y + P, P * x : P * x + P] for y, x in np.ndindex(2, 3)
    ]
    for y, x in np.argwhere(kind[i] == OTHER):
      shown = hidden[i][P * y : P * y + P, P * x : P * x + P]
      own = y * 3 + x
      others = patches[:own] + patches[own + 1 :]
      assert any((shown == patch).all() for patch in others)
  assert {p.name for p in out.glob('*.png')} == {'masked.png', 'masked-2.png'}
  assert [len(lines) for lines, _ in sheets] == [8, 1]
  assert sheets[0][1] == ['a', *map(str, range(7))]
  assert sheets[1][1] == ['7']
  line = sheets[0][0][2]
  assert [*line] == [
    *('image', 'what it sees', 'what it predicts', 'what is right')
  ]
  seen = np.asarray(Image.open(paths[2]))
  # In whole multiples, to 256 pixels at least.
  large = seen.repeat(11, 0).repeat(11, 1)
  np.testing.assert_array_equal(line['image'], large)
  np.testing.assert_array_equal(line['what is right'], large)
  np.testing.assert_array_equal(
    line['what it sees'], hidden[2].repeat(11, 0).repeat(11, 1)
  )
