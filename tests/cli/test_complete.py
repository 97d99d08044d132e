"""Completion: draws against probabilities, and the command."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import digits
from tests.models.test_contract import random_params
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.saving import Checkpoints
from vit_jax.cli import complete
from vit_jax.models import variants
from vit_jax.projects.igpt import completion
from vit_jax.projects.igpt import model as igpt

SIZE = (4, 5)
L = 20
KEY = jax.random.key(3)


def make(size=SIZE, greys=5, **fields):
  given = {'width': 16, 'depth': 2, 'mlp_dim': 24, 'heads': 2}
  given |= {'name': 'igpt', 'palette': igpt.grey_palette(greys)}
  model = variants.build(num_classes=0, image_size=size, **(given | fields))
  return model, random_params(model, size, np.random.default_rng(0))


def test_kept_keys_draw_what_the_whole_model_draws():
  """With the same keys, pixel after pixel, all of them run each time."""
  model, params = make()
  given = 12
  rng = np.random.default_rng(1)
  start = rng.integers(0, 5, (3, L)).astype(np.int32)
  got = completion.continued(model, params, start, given, KEY, 0.8)
  want = start.copy()

  @jax.jit
  def logits(colours):
    _, aux = model.apply({'params': params}, colours, capture=('pixels',))
    return aux['pixels']

  for i in range(given, L):
    key = jax.random.fold_in(KEY, i)
    want[:, i] = jax.random.categorical(key, logits(want)[:, i] / 0.8)
  np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(got[:, :given], start[:, :given])
  assert len(np.unique(want)) == 5


@pytest.mark.slow
def test_draws_of_a_small_world_have_its_probabilities():
  """All images of two pixels in three colours, and their bits."""
  model, params = make((1, 2), 3)
  worlds = np.int32([*itertools.product(range(3), repeat=2)])
  p = np.exp2(-2 * np.asarray(completion.bits(model, params, worlds)))
  assert p.sum() == pytest.approx(1, abs=1e-5)
  n = 20_000
  none = jnp.zeros((n, 2), jnp.int32)
  drawn = np.asarray(completion.continued(model, params, none, 0, KEY, 1.0))
  shares = np.bincount(3 * drawn[:, 0] + drawn[:, 1], minlength=9) / n
  assert (np.abs(shares - p) < 5 * np.sqrt(p * (1 - p) / n)).all()
  cold = completion.continued(model, params, none[:1], 0, KEY, 1e-4)
  _, aux = model.apply({'params': params}, cold, capture=('pixels',))
  np.testing.assert_array_equal(cold, aux['pixels'].argmax(-1))


def save(folder, model, params, size):
  config = digits.get_config()
  if model.kind == 'igpt':
    config_lib.choose_model(config, 'igpt_s')
  meta = {
    'config': json.loads(config.to_json()),
    'model': variants.fields_of(model),
    'class_names': [],
    'image_size': list(size),
  }
  store = Checkpoints(str(folder), keep_last=1, best_metric='none')
  store.save(1, {'params': jax.device_put(params)}, meta, {})
  store.close()


@pytest.fixture
def photos(tmp_path):
  rng = np.random.default_rng(2)
  paths = [tmp_path / name for name in ('0.png', '1\t.png')]
  for path in paths:
    Image.fromarray(rng.integers(0, 256, (8, 10, 3), np.uint8)).save(path)
  return [str(path) for path in paths]


@pytest.mark.slow
def test_command_draws_a_grid_and_tells_bits(
  tmp_path, photos, capsys, monkeypatch
):
  drawn = []
  sheet = completion.draw.sheet

  def note(rows, names):
    drawn.append([[*row.values()] for row in rows])
    assert names == [pathlib.Path(path).name for path in drawn_of]
    return sheet(rows, names)

  drawn_of = photos
  monkeypatch.setattr(completion.draw, 'sheet', note)
  model, params = make()
  save(tmp_path / 'run', model, params, SIZE)
  out = tmp_path / 'out.png'
  args = [str(tmp_path / 'run'), *photos, '--samples=3', f'--out={out}']
  assert complete.main(args) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert last == f'written  {out}'
  checkpoint = opening.open_checkpoint(str(tmp_path / 'run'))
  for path, line in zip(photos, lines, strict=True):
    data = pathlib.Path(path).read_bytes()
    image = checkpoint.transform().image(data, path)
    colours = model.quantised(checkpoint.normalize(image[None]))
    (want,) = completion.bits(model, params, colours)
    shown = path.replace('\t', r'\t')
    assert line == f'{shown}  {want:.3f} bits per pixel'
  assert out.read_bytes().startswith(b'\x89PNG')
  # Rows of 5 images, of 4 x 5 pixels.
  own, seen, *samples = drawn[0][0]
  assert [len(row) for row in drawn[0]] == [5] * len(photos)
  assert own.shape == (4, 5, 3)
  np.testing.assert_array_equal(own[:2], seen[:2])
  assert (seen[2:] == 128).all()
  for sample in samples:
    np.testing.assert_array_equal(own[:2], sample[:2])
    assert (own[2:] != sample[2:]).any()
  assert (samples[0] != samples[1]).any()
  # The same photograph once more is completed otherwise, as with another
  # seed, and the same seed is the same again.
  drawn_of = [photos[0], photos[0]]
  twice = [args[0], *drawn_of, *args[3:]]
  drawn.clear()
  for seed in (5, 5, 6):
    assert complete.main([*twice, f'--seed={seed}']) == 0
  pictures = np.array(drawn)
  assert (pictures[0, 0] != pictures[0, 1]).any()
  np.testing.assert_array_equal(pictures[0], pictures[1])
  assert (pictures[1] != pictures[2]).any()
  # 2.8 rows are 3, and the last one is drawn, however much is to be kept.
  drawn_of = photos
  for keep in (0.7, 0.99):
    assert complete.main([*args, f'--keep={keep}']) == 0
    own, _, sample, *_ = drawn[-1][0]
    np.testing.assert_array_equal(own[:3], sample[:3])
    assert (own[3:] != sample[3:]).any()
  # Where nothing but the likeliest is drawn, all samples are one.
  assert complete.main([*args, '--keep=0.99', '--temperature=1e-6']) == 0
  _, _, *samples = drawn[-1][0]
  np.testing.assert_array_equal(samples[0], samples[1])
  np.testing.assert_array_equal(samples[0], samples[2])


@pytest.mark.slow
def test_other_checkpoints_and_files_are_refused(tmp_path, photos, capsys):
  def refusal(*args):
    assert complete.main([*map(str, args), f'--out={tmp_path}/x.png']) == 2
    assert not (tmp_path / 'x.png').exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line

  model, params = make()
  save(tmp_path / 'run', model, params, SIZE)
  text = tmp_path / 'text.jpg'
  text.write_text('no image')
  assert 'text.jpg' in refusal(tmp_path / 'run', photos[0], text)
  bert, params = make(causal=False)
  save(tmp_path / 'bert', bert, params, SIZE)
  assert 'is not a causal iGPT: it is iGPT (BERT)' in refusal(
    tmp_path / 'bert', photos[0]
  )
  vit = variants.build(
    num_classes=0,
    image_size=(8, 8),
    **(variants.fields('ti/4') | {'width': 12, 'depth': 1}),
  )
  save(tmp_path / 'vit', vit, variants.init(vit, KEY, (8, 8)), (8, 8))
  assert 'it is ViT, ' in refusal(tmp_path / 'vit', photos[0])


@pytest.mark.parametrize(
  'flag', ['--keep=1', '--samples=0', '--temperature=-1', '--out=x']
)
def test_flags_that_make_no_sense_are_refused(flag, capsys):
  with pytest.raises(SystemExit) as ended:
    complete.main(['x', 'y.jpg', flag])
  assert ended.value.code == 2
  assert flag.split('=')[0] in capsys.readouterr().err
