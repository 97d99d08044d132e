"""Videos: in which order frames are, what a clip takes, and made ones."""

import pathlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax import config as config_lib
from vit_jax.data import sources
from vit_jax.projects.few_labels import video as videos


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


def test_folders_of_frames(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  root = tmp_path / 'clips'
  write(root / 'b.mp4', 3)  # a folder all the same
  write(root / 'a', 12)
  found = videos.open_videos(str(root), data_of())
  assert len(found) == 2 and found.edges.tolist() == [0, 12, 15]
  names = [found.frames[i]['name'] for i in range(15)]
  assert [pathlib.Path(n).parent.name for n in names] == 12 * ['a'] + 3 * [
    'b.mp4'
  ]
  assert names == sorted(names)
  # What cannot be read is left out, of its own video.
  (root / 'a' / '0003.png').write_bytes(b'no image')
  with pytest.raises(ValueError, match='1 of 15 images are unreadable'):
    videos.open_videos(str(root), data_of())
  rest = videos.open_videos(str(root), data_of(on_bad_image='skip'))
  assert rest.edges.tolist() == [0, 11, 14]
  with pytest.raises(ValueError, match='has no folders of frames.*ffmpeg'):
    videos.open_videos(str(root / 'a'), data_of())


def test_a_folder_that_is_not_there_is_said(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'clips').mkdir()
  with pytest.raises(ValueError, match=f'{tmp_path}/clips has no folders'):
    videos.open_videos('~/clips', data_of())
  with pytest.raises(ValueError, match=f'{tmp_path}/other has no folders'):
    videos.open_videos('~/other', data_of())


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
  assert found.edges.tolist() == [0, 24, 48, 72]
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


def moved(image, *pose, monkeypatch):
  """Returns what a made video has of an image at a pose."""
  monkeypatch.setattr(videos, 'poses', lambda seed: np.array([pose] * 24))
  record = {'image': image, 'name': 'some/image'}
  found = videos.MovingImages([record])[23]
  assert found['name'] == 'some/image, frame 23'
  return found['image']


def test_a_turn_is_in_degrees_and_a_growth_a_logarithm(monkeypatch):
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (20, 20, 3), np.uint8)
  turned = moved(image, 0, 0, 90.0, 0, monkeypatch=monkeypatch)
  np.testing.assert_array_equal(turned, np.rot90(image))
  # Three times as large about the centre: each third pixel is one of before.
  grown = moved(image[:19, :19], 0, 0, 0, np.log(3), monkeypatch=monkeypatch)
  np.testing.assert_array_equal(grown[::3, ::3], image[6:13, 6:13])


@pytest.mark.parametrize(
  ('size', 'made'),
  [((10, 20), (16, 32)), ((20, 10), (32, 16)), ((16, 40), (16, 40))],
)
def test_small_images_are_enlarged_to_16_pixels(monkeypatch, size, made):
  image = np.full((*size, 3), 7, np.uint8)
  image[:, : size[1] // 2] = 200
  found = moved(image, 0, 0, 0, 0, monkeypatch=monkeypatch)
  assert found.shape == (*made, 3)
  # The edge between left and right stays where it was.
  assert (found[:, : made[1] // 2 - 2] == 200).all()
  assert (found[:, made[1] // 2 + 2 :] == 7).all()


def test_what_comes_in_mirrors_the_image(monkeypatch):
  image = np.zeros((16, 32, 3), np.uint8)
  image[:, 4:8], image[2] = 100, 200
  found = moved(image, 0.25, 0, 0, 0, monkeypatch=monkeypatch)
  np.testing.assert_array_equal(found[:, 8:], image[:, :24])
  np.testing.assert_array_equal(found[:, :8], image[:, 7::-1])
  found = moved(image, 0, 0.25, 0, 0, monkeypatch=monkeypatch)
  np.testing.assert_array_equal(found[4:], image[:12])


def test_made_videos_go_as_far_as_they_say():
  ends = np.array([videos.poses(seed)[-1] for seed in range(300)])
  most = np.array([0.25, 0.25, 30, 0.3])
  assert (np.abs(ends) <= most).all()
  # Uniform: the largest of 300 is within 5 % of the end, but for 1 in 10^6.
  assert (np.abs(ends).max(0) > 0.95 * most).all()
  assert (ends.min(0) < -0.9 * most).all()
  # Evenly, from where the last shot has ended.
  for shot in videos.poses(0).reshape(3, 8, 4):
    steps = np.diff(shot, axis=0)
    np.testing.assert_allclose(steps, steps[:1].repeat(7, 0), atol=1e-12)
