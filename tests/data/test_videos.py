"""Videos: in which order frames are, what a clip takes, and made ones."""

import pathlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax import config as config_lib
from vit_jax.data import sources, videos


def data_of(**changes):
  data = config_lib.base().data
  data.update(changes)
  return data


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
  found = videos.open_videos(str(tmp_path / 'clips'), data_of())
  names = [pathlib.Path(found.frames[i]['name']).stem for i in range(12)]
  assert names == [str(i) for i in range(12)]
  (tmp_path / 'clips/b.mp4').write_bytes(b'video')
  with pytest.raises(ValueError, match='has video files, such as b.mp4, '):
    videos.open_videos(str(tmp_path / 'clips'), data_of())


def test_folders_of_frames(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  root = tmp_path / 'clips'
  write(root / 'b', 3)
  write(root / 'a', 12)
  found = videos.open_videos(str(root), data_of())
  assert len(found) == 2 and found.edges.tolist() == [0, 12, 15]
  names = [found.frames[i]['name'] for i in range(15)]
  assert [pathlib.Path(n).parent.name for n in names] == 12 * ['a'] + 3 * ['b']
  assert names == sorted(names)
  found.check(3, 1)
  with pytest.raises(ValueError, match=r'/b/0000.png has 3 frames'):
    found.check(2, 2)
  # What cannot be read is left out, of its own video.
  (root / 'a' / '0003.png').write_bytes(b'no image')
  with pytest.raises(ValueError, match='1 of 15 images are unreadable'):
    videos.open_videos(str(root), data_of())
  rest = videos.open_videos(str(root), data_of(on_bad_image='skip'))
  assert rest.edges.tolist() == [0, 11, 14]
  with pytest.raises(ValueError, match='neither folders of frames nor video'):
    videos.open_videos(str(root / 'a'), data_of())


def test_video_files(tmp_path):
  """Frames that are redder by the number, in two containers and codecs."""
  for name, codec, frames in (('b.mp4', 'mp4v', 24), ('a.avi', 'MJPG', 10)):
    writer = cv2.VideoWriter(
      str(tmp_path / name), cv2.VideoWriter.fourcc(*codec), 8, (64, 32)
    )
    for i in range(frames):
      pixels = np.zeros((32, 64, 3), np.uint8)
      pixels[:, :, 2] = 10 * i  # of BGR
      writer.write(pixels)
    writer.release()
  (tmp_path / 'notes.txt').write_text('no video')
  (tmp_path / '._a.avi').write_bytes(b'of another system')
  found = videos.open_videos(str(tmp_path), data_of())
  assert found.edges.tolist() == [0, 10, 34]
  # In any order.
  for index in (33, 12, 5, 13, 9, 10):
    record = found.frames[index]
    number = index if index < 10 else index - 10
    assert record['image'].shape == (32, 64, 3)
    red, green, blue = record['image'].mean((0, 1))
    assert abs(red - 10 * number) < 5 and max(green, blue) < 10
    assert record['name'].endswith(f', frame {number}')
  (tmp_path / 'c.mov').write_bytes(b'no video')
  with pytest.raises(ValueError, match=r'1 of 3 videos .*: .*/c.mov'):
    videos.open_videos(str(tmp_path), data_of())
  rest = videos.open_videos(str(tmp_path), data_of(on_bad_image='skip'))
  assert rest.edges.tolist() == [0, 10, 34]


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


def test_made_videos_change_one_thing_in_a_shot():
  """And begin with the image itself; the same whenever they are made."""
  changed = set()
  for seed in range(20):
    poses = videos.poses(seed).reshape(3, 8, 4)
    assert not poses[0, 0].any()
    for before, shot in zip([poses[0], *poses], poses, strict=False):
      moves = np.abs(np.diff(shot, axis=0)).max(0) > 1e-9
      kind = tuple(np.flatnonzero(moves))
      assert kind in ((0, 1), (2,), (3,))
      changed.add(kind)
      np.testing.assert_array_equal(shot[0][~moves], before[-1][~moves])
    np.testing.assert_array_equal(poses.ravel(), videos.poses(seed).ravel())
  assert len(changed) == 3


def test_made_videos_of_digits():
  found = videos.open_videos('', data_of(name='digits', split='train[:3]'))
  assert len(found) == 3 and len(found.frames) == 72
  image = found.frames[24]['image']
  assert image.shape == (16, 16, 3) and image.dtype == np.uint8
  digit = sources.open_source('digits', 'train[:3]')[1]['image']
  # Fixed-point weights of both.
  np.testing.assert_allclose(image, cv2.resize(digit, (16, 16)), atol=8)
  assert not np.array_equal(image, found.frames[47]['image'])


def test_a_drift_moves_the_image_as_far_as_it_says(monkeypatch):
  """A white dot on black, a quarter to the right and an eighth down."""
  dot = np.zeros((32, 32, 3), np.uint8)
  dot[15:17, 15:17] = 255
  record = {'image': dot, 'name': 'dot'}
  pose = np.tile([0.25, 0.125, 0.0, 0.0], (24, 1))
  monkeypatch.setattr(videos, 'poses', lambda seed: pose)
  moved = videos.MovingImages([record])[3]['image']
  assert moved.shape == (32, 32, 3)
  rows, columns = np.nonzero(moved[:, :, 0] > 127)
  assert set(rows) == {19, 20} and set(columns) == {23, 24}
