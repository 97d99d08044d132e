"""Palettes: clusters that are known, files, and what is refused."""

import numpy as np
import pytest
from PIL import Image

from configs import igpt as igpt_config
from vit_jax import palette


def test_clusters_of_known_colours_are_found():
  rng = np.random.default_rng(0)
  means = np.array([[20, 20, 20], [200, 40, 40], [40, 60, 220], [240] * 3])
  which = rng.integers(0, 4, 20_000)
  noise = rng.normal(0, 3, (20_000, 3))
  pixels = np.uint8(np.rint(np.clip(means[which] + noise, 0, 255)))
  found = palette.fit(pixels, 4)
  assert found.dtype == np.float32
  order = np.argsort(means.sum(-1))
  # The mean of 5,000 is known to some 0.05.
  np.testing.assert_allclose(127.5 * (found + 1), means[order], atol=0.3)
  same = palette.nearest(pixels, found)
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


def test_command_writes_a_palette_its_error_and_a_picture(
  folder, tmp_path, capsys
):
  out = tmp_path / 'found.npy'
  args = [f'{folder}/', '--colours=24', f'--out={out}', '--image_size=16']
  assert palette.main(args) == 0
  shown = capsys.readouterr().out
  found = np.load(out)
  assert found.shape == (24, 3) and found.dtype == np.float32
  assert np.abs(found).max() <= 1
  assert (np.diff(found.sum(-1)) >= 0).all()
  with Image.open(out.with_suffix('.png')) as picture:
    assert picture.width > picture.height > 96
  # 24 means of evenly spread colours leave less than one mean, and not nothing.
  (error,) = (
    float(line.split()[1]) for line in shown.splitlines() if 'error' in line
  )
  assert 5 < error < 30
  assert palette.read(str(out)) == tuple(found.ravel().tolist())
  config = igpt_config.get_config(f'tiny,./cifar10,{out}')
  assert config.model.palette == tuple(found.ravel().tolist())
  # The files are there now, and neither is replaced.
  for there in ('found.npy', 'found.png'):
    assert palette.main(args) == 2
    assert f'{there} exists already' in capsys.readouterr().err
    out.unlink(missing_ok=True)


def test_palettes_from_0_to_1_are_read(tmp_path, caplog):
  np.save(tmp_path / 'greys.npy', np.float32([[0], [0.5], [1]]))
  got = palette.read(str(tmp_path / 'greys.npy'))
  assert got == (-1.0,) * 3 + (0.0,) * 3 + (1.0,) * 3
  # None of the published colours is quite black.
  np.save(
    tmp_path / 'colours.npy', np.float32([[0.25, 0.5, 1], [1, 0.5, 0.75]])
  )
  got = palette.read(str(tmp_path / 'colours.npy'))
  assert got == (-0.5, 0, 1, 1, 0, 0.5)
  assert 'colours.npy has no value below 0' in caplog.messages[-1]


def test_a_palette_of_bright_images_is_not_taken_for_another(tmp_path):
  rng = np.random.default_rng(0)
  found = palette.fit(rng.integers(150, 256, (5000, 3), np.uint8), 8)
  np.save(tmp_path / 'bright.npy', found)
  assert palette.read(str(tmp_path / 'bright.npy')) == tuple(found.ravel())
  assert found[1:].min() > 0


def test_what_is_no_palette_is_refused(tmp_path):
  path = tmp_path / 'x.npy'
  with pytest.raises(FileNotFoundError, match='No palette at .*x.npy: python'):
    palette.read(str(path))
  path.write_bytes(b'GIF89a')
  with pytest.raises(ValueError, match='x.npy is no .npy file of numbers'):
    palette.read(str(path))
  np.save(path, np.zeros((4, 2)))
  with pytest.raises(ValueError, match=r'has the shape \(4, 2\)'):
    palette.read(str(path))
  np.save(path, np.full((4, 3), 200.0))
  with pytest.raises(ValueError, match=r'not in \[-1, 1\]'):
    palette.read(str(path))


def test_more_colours_than_there_are_are_refused(tmp_path, capsys):
  out = tmp_path / 'out.npy'
  args = ['digits', '--image_size=8', '--colours=100', f'--out={out}']
  assert palette.main(args) == 2
  assert 'the images have 17 different ones' in capsys.readouterr().err
  assert not out.exists()
