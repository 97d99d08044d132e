"""Where the server listens, and how the board's program ends."""

import argparse
import pathlib
import socket
import sys
import types

import pytest

engine_lib, protection, listening = (
  pytest.importorskip(f'vit_jax.serve.{name}', reason='needs the extra `serve`')
  for name in ('engine', 'protection', 'listening')
)
# Without the extra there would be a module that was skipped halfway.
Pretended = pytest.importorskip('tests.serve.test_engine').Pretended


def test_glibc_is_asked_to_give_large_arrays_back(monkeypatch):
  """By the numbers of its malloc.h, of which other libraries have none."""
  asked = {}
  libc = types.SimpleNamespace(mallopt=asked.__setitem__)
  monkeypatch.setattr(listening.ctypes, 'CDLL', lambda name: libc)
  listening._give_memory_back()
  assert asked == {-3: 2**20, -8: 2}  # M_MMAP_THRESHOLD, M_ARENA_MAX
  del libc.mallopt
  listening._give_memory_back()


@pytest.mark.parametrize(
  ('host', 'url', 'hosts', 'family'),
  [
    ('127.0.0.1', '127.0.0.1', protection.LOOPBACK, socket.AF_INET),
    ('::1', '[::1]', protection.LOOPBACK, socket.AF_INET6),
    ('0.0.0.0', '0.0.0.0', None, socket.AF_INET),
  ],
)
def test_it_listens_where_it_is_told(
  monkeypatch, capsys, host, url, hosts, family
):
  """And a name that others point at this machine is not answered there."""
  found, listened = [], []
  listen = socket.create_server

  def create_server(address, **kwargs):
    listened.append(address)
    return listen((address[0], 0), **kwargs)  # where a port is free

  def model(path, threads):
    return types.SimpleNamespace(name=path.stem[:-8], view=threads)

  class Server:
    def __init__(self, config):
      found.append(config)

    def run(self, sockets):
      (listener,) = sockets
      found.append(listener.getsockname()[:2])
      assert listener.family == family
      listener.close()

  class Pages:
    def __init__(self, *args):
      found.append(args)
      args[0].close()

    def app(self):
      return None

  monkeypatch.setattr(engine_lib, 'Decoder', Pretended)
  monkeypatch.setattr(listening, 'ServedModel', model)
  monkeypatch.setattr(
    listening, '_give_memory_back', lambda: found.append('less memory')
  )
  monkeypatch.setattr(socket, 'create_server', create_server)
  # The real one lets Python's logging write to what is captured here.
  monkeypatch.setattr(listening.uvicorn, 'Config', lambda app, **given: given)
  monkeypatch.setattr(listening.uvicorn, 'Server', Server)
  monkeypatch.setattr(listening, 'PageServer', Pages)
  args = argparse.Namespace(host=host, port=8123, token=None, threads=2)
  paths = [pathlib.Path(f'{name}.float32.onnx') for name in ('a', 'b')]
  try:
    listening.serve(args, paths, max)
  except OSError:
    assert family == socket.AF_INET6
    pytest.skip('there is no IPv6 here')
  asked, (engine, *rest), config, (address, port) = found
  assert asked == 'less memory' and listened == [(host, 8123)]
  assert rest == ['', hosts] and engine.explain is max
  assert [*engine.models] == ['a', 'b'] and engine._views == [2]
  assert address == host
  assert capsys.readouterr().out == f'serving   a, b at http://{url}:{port}\n'
  assert config['http'] is protection.ImpatientProtocol
  assert config['h11_max_incomplete_event_size'] == 16384
  assert (config['limit_concurrency'], config['log_level']) == (256, 'error')
  # Neither what strangers ask nor what is here is told.
  for name in ('access_log', 'server_header', 'proxy_headers'):
    assert config[name] is False
  assert config['ws'] == 'none'
  # Docker kills after 10 s what has not ended.
  assert 0 < config['timeout_graceful_shutdown'] < 10


def test_the_board_ends_with_what_happened(tmp_path, monkeypatch, capsys):
  folder = tmp_path / 'models'
  folder.mkdir()
  # The last part is the dtype, and all before it the name.
  for name in ('b.float32', 'b.2.float32', 'a.int8', 'a.float32', 'no-dtype'):
    (folder / f'{name}.onnx').write_text('none')
  monkeypatch.setattr(sys, 'argv', [str(tmp_path / 'x.py'), '--dtype=int8'])
  assert listening.main() == 2
  err = capsys.readouterr().err
  assert err.startswith(f'error: {folder}/a.int8.onnx is no model that is')
  ends, asked = [OSError('in use'), KeyboardInterrupt(), None], []

  def serve(args, paths):
    asked.append([path.name for path in paths])
    if end := ends.pop(0):
      raise end

  monkeypatch.setattr(listening, 'serve', serve)
  assert [listening.main() for _ in range(3)] == [2, 130, 0]
  assert capsys.readouterr().err == 'error: in use\n'
  assert asked == 3 * [['a.int8.onnx', 'b.2.float32.onnx', 'b.float32.onnx']]


def test_a_board_takes_the_faster_unless_told(tmp_path, monkeypatch, capsys):
  (tmp_path / 'models').mkdir()
  for dtype in ('float32', 'int8'):
    (tmp_path / f'models/a.{dtype}.onnx').touch()
  asked = []
  monkeypatch.setattr(listening, 'choose', lambda *args: asked.append(args))
  monkeypatch.setattr(listening, 'serve', lambda args, paths: None)
  script = str(tmp_path / 'serve.py')
  for flags in ([], ['--dtype=float32', '--threads=3']):
    monkeypatch.setattr(sys, 'argv', [script, *flags])
    assert listening.main() == 0
  for paths, *_ in asked:
    assert [path.name for path in paths] == ['a.float32.onnx', 'a.int8.onnx']
  assert [rest for _, *rest in asked] == [['faster', 0], ['float32', 3]]
  monkeypatch.setattr(sys, 'argv', [script, '--help'])
  with pytest.raises(SystemExit):
    listening.main()
  said = ' '.join(capsys.readouterr().out.split())
  assert 'Serves the models of this folder' in said
  assert '(default: both are timed)' in said
