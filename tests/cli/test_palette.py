"""Palettes: clusters that are known, files, and what is refused."""

import numpy as np
import pytest
from PIL import Image

from configs import igpt as igpt_config
from vit_jax.cli import palette
from vit_jax.projects.igpt import palette as library


def test_clusters_of_known_colours_are_found():
  rng = np.random.default_rng(0)
  means = np.array([[20, 20, 20], [200, 40, 40], [40, 60, 220], [240] * 3])
  which = rng.integers(0, 4, 20_000)
  noise = rng.normal(0, 3, (20_000, 3))
  pixels = np.uint8(np.rint(np.clip(means[which] + noise, 0, 255)))
  found = library.fit(pixels, 4)
  assert found.dtype == np.float32
  order = np.argsort(means.sum(-1))
  # The mean of 5,000 is known to some 0.05.
  np.testing.assert_allclose(127.5 * (found + 1), means[order], atol=0.3)
  same = library.nearest(pixels, found)
  np.testing.assert_allclose(same, means[which], atol=1)


@pytest.fixture
def folder(tmp_path):
  rng = np.random.default_rng(1)
  for name in ('a', 'b'):
    (tmp_path / 'data' / name).mkdir(parents=True)
    for i in range(5):
      pixels = rng.integers(0, 256, (40, 50, 3), np.uint8)
      Image.fromarray(pixels).save(tmp_path / 'data' / name / f'{i}.png')
  return tmp_path / 'data'


def test_command_writes_a_palette_and_its_error(folder, tmp_path, capsys):
  out = tmp_path / 'found.npy'
  args = [f'{folder}/', '--colours=24', f'--out={out}', '--image_size=16']
  args.append('--split=train+test')
  assert palette.main(args) == 0
  shown = capsys.readouterr().out
  assert 'pixels of 10 images' in shown  # both splits
  found = np.load(out)
  assert found.shape == (24, 3) and found.dtype == np.float32
  assert np.abs(found).max() <= 1
  assert (np.diff(found.sum(-1)) >= 0).all()
  # 24 means of evenly spread colours leave less than one mean, and not nothing.
  (error,) = (
    float(line.split()[1]) for line in shown.splitlines() if 'error' in line
  )
  assert 5 < error < 30
  assert library.read(str(out)) == tuple(found.ravel().tolist())
  config = igpt_config.get_config(f'tiny,./cifar10,{out}')
  assert config.model.palette == tuple(found.ravel().tolist())
  # The file is there now, and is not replaced.
  assert palette.main(args) == 2
  assert 'found.npy exists already' in capsys.readouterr().err


def test_colours_are_those_of_the_training_split(tmp_path, capsys):
  for split, shade in (('train', 100), ('test', 20)):
    for i in range(2):
      place = tmp_path / 'data' / split / 'a' / f'{i}.png'
      place.parent.mkdir(parents=True, exist_ok=True)
      pixels = np.full((8, 8, 3), shade + i, np.uint8)
      Image.fromarray(pixels).save(place)
  out = tmp_path / 'found.npy'
  args = [f'{tmp_path}/data/', '--colours=2', f'--out={out}', '--image_size=8']
  assert palette.main(args) == 0
  assert 'train: 128 pixels of 2 images' in capsys.readouterr().out
  want = np.repeat([[100], [101]], 3, 1)
  np.testing.assert_allclose(127.5 * (np.load(out) + 1), want, atol=1e-3)


def test_palettes_from_0_to_1_are_read(tmp_path, caplog):
  np.save(tmp_path / 'greys.npy', np.float32([[0], [0.5], [1]]))
  got = library.read(str(tmp_path / 'greys.npy'))
  assert got == (-1.0,) * 3 + (0.0,) * 3 + (1.0,) * 3
  # None of the published colours is quite black.
  np.save(
    tmp_path / 'colours.npy', np.float32([[0.25, 0.5, 1], [1, 0.5, 0.75]])
  )
  got = library.read(str(tmp_path / 'colours.npy'))
  assert got == (-0.5, 0, 1, 1, 0, 0.5)
  assert 'colours.npy has no negative value' in caplog.messages[-1]


def test_as_many_colours_as_there_are_are_these():
  """Of which some are next to each other, in each channel."""
  colours = np.uint8([[0, 0, 0], [0, 1, 0], [2, 0, 0], [9, 9, 9]])
  found = library.fit(colours.repeat(50, 0), 4)
  np.testing.assert_allclose(127.5 * (found + 1), colours, atol=1e-3)
  with pytest.raises(
    ValueError, match='colours is 5, but the images have only 4 dis'
  ):
    library.fit(colours, 5)


def test_what_is_no_palette_is_refused(tmp_path):
  path = tmp_path / 'x.npy'
  with pytest.raises(
    FileNotFoundError, match='No palette at .*x.npy. Make one with: python'
  ):
    library.read(str(path))
  path.write_bytes(b'GIF89a')
  with pytest.raises(ValueError, match='x.npy is not a .npy file of numbers'):
    library.read(str(path))
  for shape in ((3,), (1, 3), (4, 2), (2, 3, 1)):
    np.save(path, np.zeros(shape))
    with pytest.raises(ValueError, match='has the shape'):
      library.read(str(path))
  for wrong in (np.nan, 1.001, -1.001):
    np.save(path, np.float32([[0, wrong, 0], [0, 0, 0]]))
    with pytest.raises(ValueError, match=r'outside \[-1, 1\]'):
      library.read(str(path))
  np.save(path, np.float32([[-1, 0, 1], [1, 1, 1]]))
  assert library.read(str(path)) == (-1, 0, 1, 1, 1, 1)


def test_the_nearest_colour_is_rounded_to_a_pixel():
  colours_KC = np.float32([[-1, -1, -1], [0, 0, 0], [1, 1, 1]])
  pixels_NC = np.uint8([[0, 0, 0], [63, 63, 63], [64, 64, 64], [191, 191, 191]])
  got = library.nearest(pixels_NC, colours_KC)
  assert got.dtype == np.uint8
  # 127.5 is rounded to the even one.
  assert got[:, 0].tolist() == [0, 0, 128, 128]
  assert library.nearest(np.uint8([[192, 192, 192]]), colours_KC)[0, 0] == 255


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--colours=1', '--out=x.npy'], '--colours is 1; it must be 2 or more.'),
    (['--out=x.png'], '--out is x.png; the name must end in .npy.'),
  ],
)
def test_flags_that_make_no_sense_are_refused(capsys, args, message):
  with pytest.raises(SystemExit) as ended:
    palette.main(['digits', *args])
  assert ended.value.code == 2
  assert message in capsys.readouterr().err
