"""Files that are whole or not there, and the progress of a grid."""

import csv
import types

import pytest

from vit_jax.bench import output


def test_rows_with_different_columns(tmp_path, capsys):
  path = tmp_path / 'a.csv'
  files = output.Output(str(path), None)
  files.add([{'a': 1, 'b': 'x, y'}])
  assert path.read_text() == 'a,b\n1,"x, y"\n'
  files.finish(lambda rows: b'')
  assert capsys.readouterr().out == f'1 row written to {path}\n'
  files.add([{'a': 2, 'c': 0.5}])
  with open(path, newline='') as f:
    assert list(csv.DictReader(f)) == [
      {'a': '1', 'b': 'x, y', 'c': ''},
      {'a': '2', 'b': '', 'c': '0.5'},
    ]
  files.finish(lambda rows: b'')
  assert capsys.readouterr().out == f'2 rows written to {path}\n'


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
  path = tmp_path / 'a.png'
  path.write_bytes(b'old')
  files = output.Output(None, str(path))
  files.finish(lambda rows: b'of nothing')
  assert path.read_bytes() == b'old'
  files.add([{'a': 1}, {'a': 2}])
  with pytest.raises(ZeroDivisionError):
    files.finish(lambda rows: bytes(1 // 0))
  assert path.read_bytes() == b'old'
  files.finish(lambda rows: b'new of %d' % len(rows))
  assert path.read_bytes() == b'new of 2'
  assert [p.name for p in tmp_path.iterdir()] == ['a.png']


@pytest.mark.parametrize(
  ('paths', 'message'),
  [
    ((None, 'a.pdf'), '--plot=a.pdf: pictures are PNG files'),
    (('nowhere/a.csv', None), '--csv=nowhere/a.csv: there is no folder'),
    ((None, 'nowhere/a.png'), '--plot=nowhere/a.png: there is no folder'),
  ],
)
def test_paths_that_cannot_work_are_refused_at_once(paths, message):
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    output.Output(*paths)


def test_a_grid_tells_the_time_left(monkeypatch, capsys):
  now = iter([0.0, 60.0, 100.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(now))
  monkeypatch.setattr(output, 'time', clock)
  assert list(output.grid('abc', str.upper)) == ['a', 'b', 'c']
  assert capsys.readouterr().out.splitlines() == [
    '[1 of 3] A',
    '[2 of 3, about 0:02:00 left] B',
    '[3 of 3, about 0:00:50 left] C',
  ]
  now = iter([0.0])
  assert list(output.grid('a', str.upper)) == ['a']
  assert capsys.readouterr().out == 'A\n'
