"""The check before training finds exactly what training would trip over."""

import json
import logging
import os
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import (
  atomic_files,
  bad_images,
  decode,
  loader,
  sources,
  transforms,
)
from vit_jax.data.preprocessing import Preprocessing


@pytest.fixture
def folder(tmp_path, odd_files):
  """All the odd files in two classes, and entries that are not even files."""
  root = tmp_path / 'photos'
  for number, (name, (data, _)) in enumerate(odd_files.items()):
    path = root / 'train' / ('a', 'b')[number % 2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  (root / 'train' / 'a' / 'broken_link.jpg').symlink_to(tmp_path / 'nowhere')
  if os.geteuid():  # Root may read everything.
    secret = root / 'train' / 'b' / 'secret.jpg'
    secret.write_bytes(odd_files['good.jpg'][0])
    secret.chmod(0)
  return root


@pytest.fixture
def unreadable(odd_files):
  names = {name for name, (_, readable) in odd_files.items() if not readable}
  names |= {'broken_link.jpg'}
  return names | ({'secret.jpg'} if os.geteuid() else set())


def _names(paths):
  return {pathlib.Path(path).name for path in paths}


def _open(folder, on_bad_image=None):
  source = sources.open_source(str(folder), 'train')
  return bad_images.checked(source, on_bad_image) if on_bad_image else source


def test_exactly_the_unreadable_ones_are_found(folder, unreadable):
  bad = bad_images.find_bad_images(_open(folder))
  assert _names(b.name for b in bad) == unreadable
  assert [b.row for b in bad] == sorted(b.row for b in bad)
  reasons = {pathlib.Path(b.name).name: b.reason for b in bad}
  assert reasons['broken_link.jpg'] == 'No such file or directory'


def test_the_rest_trains(folder, unreadable, odd_files, caplog):
  source = _open(folder, 'skip')
  assert f'{len(unreadable)} of ' in caplog.text
  assert 'left out' in caplog.text and '.jpg: ' in caplog.text
  names = {source[i]['name'] for i in range(len(source))}
  expected = {name for name, (_, readable) in odd_files.items() if readable}
  assert _names(names) == expected
  batches = loader.train_batches(
    source, transforms.TrainTransform((32, 32)), batch_size=len(source), seed=0
  )
  assert next(batches)['image'].shape == (len(source), 32, 32, 3)
  batches.close()
  evaluate = transforms.EvalTransform((32, 32), Preprocessing(40))
  for i in range(len(source)):
    evaluate(source[i])


def test_error_lists_the_files_and_the_way_out(folder, unreadable):
  with pytest.raises(ValueError) as error:
    _open(folder, 'error')
  lines = str(error.value).splitlines()
  total = len(_open(folder))
  count = len(unreadable)
  assert lines[0] == f'{count} of {total} images are unreadable:'
  assert _names(line.split(': ')[0] for line in lines[1:21]) < unreadable
  assert lines[21] == f'  and {count - 20} more'
  assert lines[22].endswith(
    '--on_bad_image=skip, or for training --config.data.on_bad_image=skip'
  )


@pytest.fixture
def small(tmp_path, encode):
  """Three images, of which one is torn."""
  png = encode(np.zeros((4, 4, 3), np.uint8))
  for i in range(3):
    path = tmp_path / 'small' / 'train' / 'a' / f'{i}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png if i else png[:40])
  return tmp_path / 'small'


@pytest.fixture
def decoded(monkeypatch):
  """The names of the images that get decoded."""
  names = []
  original = decode.decode

  def spy(data, name):
    names.append(name)
    return original(data, name)

  monkeypatch.setattr(decode, 'decode', spy)
  return names


def test_the_result_is_kept(small, decoded):
  def found_again():
    decoded.clear()
    bad = bad_images.find_bad_images(_open(small))
    assert [b.name for b in bad] == ([str(torn)] if is_torn else [])
    return sorted(pathlib.Path(name).name for name in decoded)

  torn, is_torn = small / 'train' / 'a' / '0.png', True
  assert found_again() == ['0.png', '1.png', '2.png']
  # What is torn may be mended where only its bytes tell.
  assert found_again() == ['0.png']
  torn.write_bytes((small / 'train' / 'a' / '1.png').read_bytes())
  is_torn = False
  assert found_again() == ['0.png']
  assert found_again() == []
  # A file is new if only its time tells.
  os.utime(torn, ns=(1, 1))
  assert found_again() == ['0.png']
  (small / 'train/a/3.png').write_bytes(torn.read_bytes())
  assert found_again() == ['3.png']


def test_another_host_finds_the_result_in_the_workdir(
  small, decoded, tmp_path, monkeypatch
):
  for home, run in (('one', 'other'), ('one', 'run'), ('two', 'run')):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / home))
    with bad_images.kept_in(str(tmp_path / run)):
      bad_images.find_bad_images(_open(small))
  names = [pathlib.Path(x).name for x in decoded]
  assert sorted(names[:3]) == ['0.png', '1.png', '2.png']
  assert names[3:] == ['0.png', '0.png']


def test_another_decoder_checks_again(small, decoded, monkeypatch):
  bad_images.find_bad_images(_open(small))
  monkeypatch.setattr(decode, 'DECODER_VERSION', '-1')
  bad_images.find_bad_images(_open(small))
  assert len(decoded) == 6


def test_findings_of_all_processes_come_together(monkeypatch):
  """In the order of the processes, however long they are."""
  others = [['ü', 3, None], [], [['x' * 300]]]
  rows = [np.frombuffer(json.dumps(x).encode(), np.uint8) for x in others]

  def gathered(mine):
    rows_ = [mine, *rows]
    if len(mine) == 1:  # how long they are
      return np.array([mine, *([len(x)] for x in rows)])
    assert len(mine) == max(map(len, rows))
    return np.stack([np.pad(x, (0, len(mine) - len(x))) for x in rows_])

  monkeypatch.setattr(bad_images.multihost_utils, 'process_allgather', gathered)
  assert bad_images.gather([1, 'a']) == [1, 'a', 'ü', 3, None, ['x' * 300]]


@pytest.mark.parametrize(
  ('images', 'classes', 'said'),
  [
    (2, None, '3 and 2 images'),
    (3, 'x', '3 and 3 images, and different classes'),
  ],
)
def test_processes_that_see_other_data_are_refused(
  small, monkeypatch, images, classes, said
):
  def gathered(items):
    (mine,) = items
    return [mine, [images, classes or mine[1]]]

  monkeypatch.setattr(bad_images, 'gather', gathered)
  message = f'^The processes see different data: {said}. Give all processes the'
  with pytest.raises(ValueError, match=message):
    _open(small, 'skip')


def test_a_class_whose_name_is_no_utf_8(small, caplog):
  # What is logged of it pytest could not send from one process to another.
  caplog.set_level(logging.CRITICAL, logger='vit_jax')
  (small / 'train/a').rename(small / 'train' / os.fsdecode(b'caf\xe9'))
  assert len(bad_images.checked(_open(small), 'skip')) == 2


def test_corrupted_caches_are_ignored(small, decoded):
  first = bad_images.find_bad_images(_open(small))
  (path,) = atomic_files.cache_folder().glob('checked/*')
  content = path.read_bytes()
  path.write_bytes(content[:140])
  assert bad_images.find_bad_images(_open(small)) == first
  assert len(decoded) == 6
  assert path.read_bytes() == content


def test_refusals(small):
  with pytest.raises(ValueError, match="on_bad_image is 'drop'; it must be"):
    _open(small, 'drop')
  for i in (1, 2):
    (small / 'train' / 'a' / f'{i}.png').write_bytes(b'')
  with pytest.raises(ValueError, match='3 of 3 images are unreadable:'):
    _open(small, 'skip')


@pytest.mark.parametrize('on_bad_image', ['skip', 'error'])
def test_what_goes_while_training(tmp_path, caplog, on_bad_image):
  """Skipped if that was asked for, the next image in its place."""
  for i in range(4):
    (tmp_path / 'train/a').mkdir(parents=True, exist_ok=True)
    image = Image.new('RGB', (8, 8), (60 * i, 0, 0))
    image.save(tmp_path / f'train/a/{i}.png')
  source = sources.open_source(str(tmp_path), 'train')
  source = bad_images.checked(source, on_bad_image)
  # Threads of loaders that other tests have closed may still have their say.
  left_out = [x for x in caplog.records if x.module == 'bad_images']
  assert not left_out
  few = sources.subset(source, [0])
  assert few.skips_unreadable == (on_bad_image == 'skip')
  names = [source[i]['name'] for i in range(4)]
  gone = names.index(str(tmp_path / 'train/a/2.png'))
  (tmp_path / 'train/a/2.png').unlink()
  transform = transforms.EvalTransform((8, 8))
  stream = loader.eval_batches(source, transform, batch_size=4)
  training = loader.train_batches(
    source, transforms.TrainTransform((8, 8)), batch_size=4, seed=0
  )
  if on_bad_image == 'error':
    for batches in (stream, training):
      with pytest.raises(decode.UnreadableImage, match='No such file'):
        next(batches)
      batches.close()
    return
  batch = next(stream)
  red = batch['image'][:, 0, 0, 0]
  assert batch['mask'].tolist() == [float(i != gone) for i in range(4)]
  assert batch['index'].tolist() == [-1 if i == gone else i for i in range(4)]
  assert red[gone] == red[(gone + 1) % 4]
  assert next(training)['image'].shape == (4, 8, 8, 3)
  assert 'The next image replaces an unreadable image' in caplog.text
  stream.close()
  training.close()
