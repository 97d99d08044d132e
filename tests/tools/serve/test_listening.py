"""Where the server listens, and how the board's program ends."""

import argparse
import pathlib
import socket
import types

import pytest

engine_lib, protection, listening = (
  pytest.importorskip(
    f'vit_jax.tools.serve.{name}', reason='needs the extra `serve`'
  )
  for name in ('engine', 'protection', 'listening')
)
# Without the extra there would be a module that was skipped halfway.
Pretended = pytest.importorskip('tests.tools.serve.test_engine').Pretended


@pytest.mark.parametrize(
  ('host', 'url', 'hosts', 'family'),
  [
    ('127.0.0.1', '127.0.0.1', protection.LOOPBACK, socket.AF_INET),
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
