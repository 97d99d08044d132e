"""The command that serves checkpoints: names, what it says, and its folder."""

import argparse
import io
import pathlib
import signal
import types

import pytest

from vit_jax.tools.serve import __main__ as command

listening = pytest.importorskip(
  'vit_jax.tools.serve.listening', reason='needs the extra `serve`'
)


@pytest.fixture
def opened(monkeypatch):
  """Has every path open as a checkpoint."""

  def open_checkpoint(path):
    return types.SimpleNamespace(path=path)

  monkeypatch.setattr(command.opening, 'open_checkpoint', open_checkpoint)


def test_checkpoints_of_one_name_are_numbered(opened):
  paths = ['/a/run/checkpoints/1', 'b/run/checkpoints/2', 'x.npz', 'c/run']
  found = command.open_all([*paths, 'run-2'])
  assert {name: checkpoint.path for name, checkpoint in found.items()} == {
    'run': paths[0],
    'run-2': paths[1],
    'x': paths[2],
    'run-3': paths[3],
    'run-2-2': 'run-2',
  }


def test_what_is_converted_is_served_and_removed(opened, monkeypatch):
  """Also when it is told to end; what is under way is said at once."""
  served, handlers = [], []
  out = io.TextIOWrapper(io.BytesIO())
  monkeypatch.setattr(command.sys, 'stdout', out)

  def write_model(checkpoint, folder, name, dtype):
    said = out.buffer.getvalue().decode()
    assert said.endswith(f'converting {checkpoint.path} as {name}\n')
    (folder / f'{name}.{dtype}.onnx').write_text(checkpoint.path)
    return [f'{name} lost'] if name == 'b' else []

  def serve(args, paths, explain):
    served.append((args, [path.read_text() for path in paths], explain))
    served.append((paths[0].parent, out.buffer.getvalue().decode()))
    ((number, end),) = handlers
    assert number == signal.SIGTERM
    end(number, None)

  monkeypatch.setattr(command.board, 'write_model', write_model)
  monkeypatch.setattr(listening, 'serve', serve)
  monkeypatch.setattr(
    command.signal, 'signal', lambda *given: handlers.append(given)
  )
  args = argparse.Namespace(checkpoints=['a.npz', 'b.npz'])
  with pytest.raises(SystemExit) as ended:
    command._run(args)
  assert ended.value.code == 143
  (given, texts, explain), (folder, said) = served
  assert given is args and texts == ['a.npz', 'b.npz']
  monkeypatch.setattr(command, 'explained', lambda x, *asked: (x.path, asked))
  assert explain('a', 1, 'max') == ('a.npz', (1, 'max'))
  assert isinstance(folder, pathlib.Path) and not folder.exists()
  assert said.splitlines() == [
    'converting a.npz as a',
    'converting b.npz as b',
    'note      b lost',
  ]
