"""Which file of a model is served, tokens, and what is said at the start."""

import argparse
import os
import socket
import subprocess
import sys
import time
import types

import pytest

from tests.tools.serve.test_server import checkpoint_of, running
from vit_jax.tools.serve import board
from vit_jax.tools.serve import flags as serve_flags

listening = pytest.importorskip(
  'vit_jax.tools.serve.listening', reason='needs the extra `serve`'
)


def test_the_faster_is_taken(tmp_path, capsys):
  paths = {}
  for dtype in ('float32', 'int8'):
    board.write_model(checkpoint_of(), tmp_path, 'small', dtype)
    paths[dtype] = tmp_path / f'small.{dtype}.onnx'
  for dtype, path in paths.items():
    assert listening.choose(paths, dtype, 1) == path
    assert listening.choose({dtype: path}, 'faster', 1) == path
  assert listening.choose(paths, 'faster', 1) in paths.values()
  said = capsys.readouterr().out
  assert said.startswith('timed     small.') and 'int8' in said


@pytest.mark.edge
@pytest.mark.parametrize('token', ['', 'a b', 'ü', 'a\n'])
def test_a_token_that_no_header_can_bring_is_refused(
  token, monkeypatch, capsys
):
  """Also from the environment."""
  monkeypatch.setenv(serve_flags.TOKEN, token)
  parser = argparse.ArgumentParser()
  serve_flags.add_flags(parser)
  for flags in ([f'--token={token}'], []):
    with pytest.raises(SystemExit):
      parser.parse_args(flags)
    assert 'token' in capsys.readouterr().err
  assert parser.parse_args(['--token=a-Secret!']).token == 'a-Secret!'


@pytest.mark.edge
@pytest.mark.parametrize(
  ('host', 'token', 'warned'),
  [('0.0.0.0', None, 1), ('0.0.0.0', 'x', 0), ('127.0.0.1', None, 0)],
)
def test_serving_everybody_is_warned_of(
  host, token, warned, monkeypatch, capsys
):
  monkeypatch.setattr(listening, '_give_memory_back', lambda: 1 / 0)
  args = types.SimpleNamespace(host=host, port=8000, token=token, threads=1)
  with pytest.raises(ZeroDivisionError):
    listening.serve(args, [])
  assert capsys.readouterr().err.count('--token') == warned


# Frees 8 MiB, then allocates 2 MiB. Prints 1 if the 2 MiB are mapped, 0 if they
# are on the heap. Then prints malloc_info, which lists the heaps of 9 threads.
MEMORY = """
import ctypes, threading
from vit_jax.tools.serve import listening

listening._give_memory_back()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = type(
  'Info', (ctypes.Structure,),
  {'_fields_': [(name, ctypes.c_size_t) for name in 'abcdefghij']},
)
libc.free(libc.malloc(8 << 20))
before = libc.mallinfo2().d
libc.malloc(2 << 20)
print(libc.mallinfo2().d - before, flush=True)
barrier = threading.Barrier(9)
for _ in range(8):
  threading.Thread(target=lambda: (libc.malloc(1000), barrier.wait())).start()
barrier.wait()
stdout = ctypes.c_void_p.in_dll(libc, 'stdout')
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""


@pytest.mark.edge
def test_the_system_gets_back_what_threads_free():
  try:
    os.confstr('CS_GNU_LIBC_VERSION')
  except ValueError:
    pytest.skip('needs glibc')
  done = subprocess.run(
    [sys.executable, '-c', MEMORY], capture_output=True, text=True, check=True
  )
  assert done.stdout.startswith('1\n')
  assert done.stdout.count('<heap nr=') == 2


@pytest.mark.edge
@pytest.mark.skipif(
  not hasattr(socket, 'TCP_USER_TIMEOUT'), reason='needs Linux'
)
def test_the_kernel_drops_a_response_that_is_not_read(tmp_path):
  folder = tmp_path / 'board'
  board.write(checkpoint_of(depth=1), str(folder), 'float32')
  more = 'protection.BODY_SECONDS = 1'
  with running(folder, more=more) as (port, _), socket.socket() as client:
    client.settimeout(30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(('127.0.0.1', port))
    client.sendall(b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n')
    time.sleep(4)
    with pytest.raises(ConnectionResetError):
      while client.recv(1 << 16):
        pass
