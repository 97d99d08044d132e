"""Labelling files with a workdir and with a published checkpoint."""

import csv
import dataclasses
import io
import json
import os
import re
import sys
import types

import jax
import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from vit_jax.checkpoints import opening
from vit_jax.cli import predict
from vit_jax.convert import orbax
from vit_jax.data import transforms
from vit_jax.evaluators import pretrained
from vit_jax.projects.detr import detections

TINY = ROOT / 'tests' / 'golden' / 'tiny_s7.npz'


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  """A folder with images of several kinds and depths of folders."""
  folder = tmp_path_factory.mktemp('images')
  rng = np.random.default_rng(0)
  (folder / 'b' / 'deep').mkdir(parents=True)
  (folder / 'a').mkdir()
  for name, shape in {
    'b/deep/1.png': (8, 8, 3),
    'b/2.jpg': (50, 40, 3),
    'a/with, comma and "quotes".png': (9, 11),
    'z.webp': (8, 8, 3),
  }.items():
    pixels = rng.integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(folder / name)
  (folder / 'notes.txt').write_text('no image')
  return folder


# In the order of their paths.
FILES = ['a/with, comma and "quotes".png', 'b/2.jpg', 'b/deep/1.png', 'z.webp']


@pytest.fixture
def command(monkeypatch, capsys):
  """Runs the command in this process: status, output, messages."""

  def run(*args):
    argv = ['predict', *map(str, args)]
    monkeypatch.setattr(sys, 'argv', argv)
    capsys.readouterr()
    try:
      status = predict.main()
    except SystemExit as e:
      status = e.code
    return status, *capsys.readouterr()

  return run


def parse(text, format_name):
  """Returns (file, rank, class, probability) of every row."""
  if format_name == 'json':
    return [tuple(row[c] for c in predict.COLUMNS) for row in json.loads(text)]
  if format_name == 'csv':
    rows = list(csv.DictReader(io.StringIO(text)))
    return [
      (r['file'], int(r['rank']), r['class'], float(r['probability']))
      for r in rows
    ]
  rows = [
    re.fullmatch(r'(.*?) +(\d+)  (\S+) +([\d.]+)%', line)
    for line in text.splitlines()
  ]
  return [(m[1], int(m[2]), m[3], float(m[4]) / 100) for m in rows]


def direct(checkpoint, path):
  """The softmax of the model itself, on one image, by class name."""
  transform = transforms.EvalTransform(
    checkpoint.image_size, checkpoint.preprocessing
  )
  image = transform.image(path.read_bytes(), str(path))
  logits, _ = checkpoint.model.apply(
    {'params': checkpoint.params}, (image[None] - np.float32(127.5)) / 127.5
  )
  names = checkpoint.class_names or tuple(map(str, range(10)))
  return dict(zip(names, np.asarray(jax.nn.softmax(logits[0])), strict=True))


def test_a_sigmoid_loss_gives_each_class_its_own(images, workdir):
  checkpoint = opening.open_checkpoint(str(workdir))
  assert checkpoint.loss == 'softmax'
  several = dataclasses.replace(checkpoint, loss='sigmoid')
  path = images / FILES[0]
  (found,) = pretrained.TrainedModel(several).predict(str(path), 10)
  image = several.transform().image(path.read_bytes(), str(path))
  want = 1 / (1 + np.exp(-np.asarray(checkpoint.logits(image[None]))[0]))
  got = dict(found)
  assert list(got.values()) == sorted(got.values(), reverse=True)
  for name, p in zip(several.class_names, want, strict=True):
    assert got[name] == pytest.approx(p, abs=1e-6)


@pytest.mark.slow
def test_overflow_is_an_error_that_names_checkpoint_and_image(
  command, images, workdir, tmp_path
):
  checkpoint = opening.open_checkpoint(str(workdir))
  head = jax.tree.map(
    lambda x: np.full_like(x, 3e38), checkpoint.params['head']
  )
  spoilt = dataclasses.replace(
    checkpoint, params=checkpoint.params | {'head': head}
  )
  orbax.write(spoilt, str(tmp_path / 'spoilt'), 'float32')
  path = str(images / FILES[0])
  status, out, err = command(str(tmp_path / 'spoilt'), path, '--format=json')
  assert (status, 'NaN' in out) == (2, False)
  assert 'spoilt/checkpoints/0 gives outputs that are not finite' in err
  assert path in err


@pytest.mark.slow
def test_all_formats_give_the_models_own_probabilities(command, images):
  checkpoint = opening.open_checkpoint(str(TINY))
  want = {str(images / f): direct(checkpoint, images / f) for f in FILES}
  for format_name in ('table', 'csv', 'json'):
    status, out, err = command(
      TINY, images, '--topk=3', f'--format={format_name}'
    )
    # The folder has a text besides, which is said once.
    assert status == 0 and (not err or err.endswith('left out (1 .txt)\n'))
    rows = parse(out, format_name)
    assert [row[0] for row in rows] == [f for f in want for _ in range(3)]
    assert [row[1] for row in rows] == [1, 2, 3] * len(FILES)
    # The table has two digits after the point of a percentage; other batch
    # sizes and fusions move float32 sums by a few units in the last place.
    atol = 6e-5 if format_name == 'table' else 1e-6
    for file, rank, name, probability in rows:
      likeliest = sorted(want[file].values(), reverse=True)
      assert probability == pytest.approx(likeliest[rank - 1], abs=atol)
      assert probability == pytest.approx(want[file][name], abs=atol)


def test_csv_has_a_header_and_quotes_names(command, workdir, images):
  _, out, _ = command(workdir, images / FILES[0], '--format=csv', '--topk=1')
  header, row = out.splitlines()
  assert header == 'file,rank,class,probability'
  assert row.startswith(f'"{images}/a/with, comma and ""quotes"".png",1,')


def test_the_class_names_of_training_appear(
  command, workdir, images, monkeypatch
):
  """Not the numbers that stand in for them where there are none."""
  opened = opening.open_checkpoint

  def with_names(path):
    checkpoint = opened(path)
    names = tuple(f'digit-{name}' for name in checkpoint.class_names)
    object.__setattr__(checkpoint, 'class_names', names)
    return checkpoint

  monkeypatch.setattr(opening, 'open_checkpoint', with_names)
  _, out, _ = command(workdir, images, '--topk=10', '--format=json')
  assert {row[2] for row in parse(out, 'json')} == {
    f'digit-{i}' for i in range(10)
  }


def test_no_more_predictions_than_classes(command, images):
  status, out, _ = command(
    TINY, images / 'z.webp', '--topk=1000', '--format=csv'
  )
  assert status == 0
  got = parse(out, 'csv')
  assert [row[1] for row in got] == list(range(1, 11))
  assert sum(row[3] for row in got) == pytest.approx(1, abs=1e-5)


def test_unreadable_files_are_reported_and_the_rest_go_on(
  command, images, tmp_path
):
  truncated = (images / 'b' / '2.jpg').read_bytes()[:100]
  (tmp_path / 'cut.jpg').write_bytes(truncated)
  (tmp_path / 'empty.png').write_bytes(b'')
  (tmp_path / 'text.png').write_text('hello')
  status, out, err = command(
    TINY, tmp_path, images / 'z.webp', images / 'notes.txt', '--format=csv'
  )
  assert status == 1
  assert {row[0] for row in parse(out, 'csv')} == {str(images / 'z.webp')}
  lines = err.splitlines()
  assert len(lines) == 4
  bad = [tmp_path / n for n in ('cut.jpg', 'empty.png', 'text.png')]
  for line, path in zip(lines, [*bad, images / 'notes.txt'], strict=True):
    assert line.startswith('unreadable: ')
    assert str(path) in line


def test_nothing_readable_still_parses(command, tmp_path):
  (tmp_path / 'empty.png').write_bytes(b'')
  status, out, err = command(TINY, tmp_path, '--format=json')
  assert status == 1
  assert err.count('\n') == 1
  assert parse(out, 'json') == []


def headless(folder):
  with np.load(TINY) as file:
    arrays = {k: x for k, x in file.items() if not k.startswith('head/')}
  np.savez(folder / 'headless.npz', **arrays)
  return folder / 'headless.npz'


def test_bad_input_is_one_message_and_status_2(command, images, tmp_path):
  (tmp_path / 'void').mkdir()
  for args, message in [
    ((TINY, 'nowhere.png'), 'No file or folder at nowhere.png'),
    ((TINY, tmp_path / 'void'), f'The folder {tmp_path}/void has no image'),
    (('nowhere.npz', images / 'z.webp'), 'No checkpoint at nowhere.npz'),
    ((headless(tmp_path), images / 'z.webp'), 'headless.npz has no head'),
  ]:
    status, out, err = command(*args)
    assert status == 2
    assert out == ''
    assert err.startswith('error: ') and err.count('\n') == 1
    assert message in err


def test_names_cannot_steer_a_terminal_or_a_spreadsheet():
  row = {
    'file': os.fsdecode(b'\xff\n.png'),
    'rank': 1,
    'class': '=\x1b[31mred',
    'probability': 0.5,
  }

  def text(format_name):
    names = row['file'], row['class']
    return ''.join(predict.texts([[row]], format_name, names[:1], names[1:]))

  assert text('table') == '\\udcff\\n.png   1  =\\x1b[31mred   50.00%\n'
  _, line, end = text('csv').split('\n')
  assert (line, end) == ("\\udcff\\n.png,1,'=\\x1b[31mred,0.5", '')
  assert json.loads(text('json')) == [row]
  # As far as people read it, too.
  assert text('json') == json.dumps([row], indent=2) + '\n'


@pytest.mark.parametrize('format_name', ['csv', 'table'])
def test_rows_come_as_they_are_found(format_name):
  row = {'file': 'a', 'rank': 1, 'class': 'cat', 'probability': 0.5}
  taken = []

  def found():
    for i in range(3):
      taken.append(i)
      yield [row]

  texts = predict.texts(found(), format_name, ['a'], ['cat'])
  while '0.5' not in (text := next(texts)) and '50.00%' not in text:
    pass
  assert taken == [0]


def test_files_that_are_not_images_are_named(tmp_path, caplog):
  for name in ('x.jpg', 'notes.txt', 'more.txt', 'list.csv'):
    (tmp_path / name).touch()
  assert predict.find_files([str(tmp_path)]) == [f'{tmp_path}/x.jpg']
  assert 'left out (2 .txt, 1 .csv)' in caplog.text


def test_linked_folders_are_searched_once(tmp_path):
  (tmp_path / 'far').mkdir()
  (tmp_path / 'far/x.jpg').write_bytes(b'')
  (tmp_path / 'here').mkdir()
  (tmp_path / 'here/linked').symlink_to(tmp_path / 'far')
  (tmp_path / 'far/around').symlink_to(tmp_path / 'here')
  here = str(tmp_path / 'here')
  assert predict.find_files([here]) == [f'{here}/linked/x.jpg']
  # By their own names, if they have one in there.
  (tmp_path / 'here/z').mkdir()
  (tmp_path / 'here/z/y.jpg').write_bytes(b'')
  (tmp_path / 'here/a').symlink_to(tmp_path / 'here/z')
  found = predict.find_files([here])
  assert found == [f'{here}/linked/x.jpg', f'{here}/z/y.jpg']


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
  def listed(path, **kwargs):
    raise PermissionError(13, 'not allowed', path)

  monkeypatch.setattr(os, 'scandir', listed)
  with pytest.raises(PermissionError, match='not allowed'):
    predict.find_files([str(tmp_path)])


def test_rows_of_objects_have_their_boxes_and_long_names_their_place():
  row = {'file': 'a.png', 'rank': 7, 'class': 'cat', 'probability': 0.5}
  row |= {'x0': 0.0, 'y0': 2.55, 'x1': 100.5, 'y1': 12345.0}
  columns = predict.COLUMNS + predict.BOX
  args = (['a.png', 'longer.png'], ['x' * 60, 'cat'], columns)
  (text,) = predict.texts([[row]], 'table', *args)
  name = 'cat'.ljust(40)
  box = '      0.0      2.5    100.5  12345.0'
  assert text == f'a.png        7  {name}   50.00%{box}\n'
  long = [[row | {'class': 'a' * 30 + 'b' * 30}]]
  (text,) = predict.texts(long, 'table', *args)
  name = 'a' * 20 + '…' + 'b' * 19
  assert text == f'a.png        7  {name}   50.00%{box}\n'
  head, body = ''.join(predict.texts([[row]], 'csv', *args)).splitlines()
  assert head == 'file,rank,class,probability,x0,y0,x1,y1'
  assert body == 'a.png,7,cat,0.5,0.0,2.55,100.5,12345.0'
  texts = predict.texts([[row], [], [row | {'rank': 8}]], 'json', *args)
  assert json.loads(''.join(texts)) == [row, row | {'rank': 8}]


@pytest.fixture
def pretended(monkeypatch):
  """Returns a function that has predict open a model of a kind.

  What it is asked is in the list that comes back.
  """

  def pretend(task):
    model = types.SimpleNamespace(num_classes=3, task=task)
    checkpoint = types.SimpleNamespace(
      model=model, class_names=('a', 'b', 'c'), check_head=lambda: None
    )
    monkeypatch.setattr(opening, 'open_checkpoint', lambda path: checkpoint)
    asked = []
    monkeypatch.setattr(pretrained, 'TrainedModel', asked.append)
    monkeypatch.setattr(detections, 'find', lambda *args: asked.append(args))
    return asked

  return pretend


@pytest.mark.parametrize(
  ('task', 'args', 'message'),
  [
    (
      'classes',
      ['--threshold=0'],
      'x predicts classes, but --threshold does not',
    ),
    ('objects', ['--topk=5'], 'x predicts objects, but --topk does not'),
    ('classes', ['--threshold=1.1'], '--threshold is 1.1; it must be from 0'),
  ],
)
def test_flags_of_another_kind_of_model_are_refused(
  command, images, pretended, task, args, message
):
  found = pretended(task)
  status, out, err = command('x', images / 'z.webp', *args)
  assert (status, out, found) == (2, '', [])
  assert message in err
