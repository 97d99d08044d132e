"""Videos: in which order frames are, and what a clip takes."""

import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.projects.few_labels import video as videos


def write(folder, frames):
  folder.mkdir(parents=True)
  for i in range(frames):
    pixels = np.full((8, 10, 3), i, np.uint8)
    Image.fromarray(pixels).save(folder / f'{i:04}.png')


def test_frames_come_by_their_numbers(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  write(tmp_path / 'clips/a2', 12)
  for path in tmp_path.glob('clips/*/*'):
    path.rename(path.with_name(f'{int(path.stem)}.png'))
  found = videos.open_videos(str(tmp_path / 'clips'), 'error')
  names = [pathlib.Path(found.frames[i]['name']).stem for i in range(12)]
  assert names == [str(i) for i in range(12)]


def test_folders_of_frames(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  root = tmp_path / 'clips'
  write(root / 'b.mp4', 3)  # a folder all the same
  write(root / 'a', 12)
  found = videos.open_videos(str(root), 'error')
  assert len(found) == 2 and found.edges.tolist() == [0, 12, 15]
  names = [found.frames[i]['name'] for i in range(15)]
  assert [pathlib.Path(n).parent.name for n in names] == 12 * ['a'] + 3 * [
    'b.mp4'
  ]
  assert names == sorted(names)
  # What cannot be read is left out, of its own video.
  (root / 'a' / '0003.png').write_bytes(b'no image')
  with pytest.raises(ValueError, match='1 of 15 images are unreadable'):
    videos.open_videos(str(root), 'error')
  rest = videos.open_videos(str(root), 'skip')
  assert rest.edges.tolist() == [0, 11, 14]
  with pytest.raises(ValueError, match='has no folders of frames.*ffmpeg'):
    videos.open_videos(str(root / 'a'), 'error')


def test_a_folder_that_is_not_there_is_said(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  with pytest.raises(ValueError, match=f'{tmp_path}/other has no folders'):
    videos.open_videos('~/other', 'error')


def test_a_clip_has_shots_of_neighbours_in_their_parts():
  found = videos.Videos([], np.array([0, 5, 35]))
  seen = set()
  for seed in range(200):
    rng = np.random.default_rng(seed)
    rows_SF = found.clip(1, 3, 2, 4, rng)
    assert (np.diff(rows_SF, axis=1) > 0).all()
    assert (np.diff(rows_SF, axis=1) < 4).all()
    assert ((rows_SF - 5) // 10 == np.arange(3)[:, None]).all()
    seen |= set(rows_SF.ravel().tolist())
  assert seen == set(range(5, 35))
  # A part that is shorter than a shot is taken whole.
  assert found.clip(0, 2, 2, 16, rng)[0].tolist() == [0, 1]
