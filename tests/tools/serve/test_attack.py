"""Bad requests at once, good ones among them.

There are $BAD_REQUESTS of them, 288 if that is not set:

  BAD_REQUESTS=10000 pytest -s tests/tools/serve/test_attack.py
"""

import collections
import contextlib
import os
import pathlib
import random
import signal
import socket
import threading
import time
import zlib

import pytest
from PIL import Image

from tests.tools.serve.pictures_to_send import encoded, every_kind, pixels
from tests.tools.serve.test_decoder import BAD, png_of
from tests.tools.serve.test_server import ask, checkpoint_of, predict, running
from vit_jax.tools.serve import board

COUNT = int(os.environ.get('BAD_REQUESTS', '288'))
CLIENTS = 24
# Of the server, for connections. Fewer than it has by itself are soon taken.
PLACES = 100
# Of the server and its decoder. Arrays of another size leave other gaps.
MOST_GROWTH_MB = 16
KINDS = every_kind()
GOOD = encoded(Image.fromarray(pixels(60, 90)), 'PNG')
POST = b'POST /api/predict HTTP/1.1\r\nHost: localhost\r\n'
LENGTH = b'Content-Length: %d\r\n\r\n'


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  """Gives the folder, the port and the process."""
  folder = tmp_path_factory.mktemp('page') / 'board'
  board.write(checkpoint_of(), str(folder), 'float32')
  more = (
    f'protection.MAX_CONNECTIONS, protection.HEADER_SECONDS = {PLACES}, 600'
  )
  with running(folder, '--threads=1', more=more) as (port, process):
    yield folder, port, process


def raw(port, data, wait=True):
  """Sends bytes as they are, and returns the beginning of the answer."""
  with socket.create_connection(('127.0.0.1', port)) as sent:
    with contextlib.suppress(ConnectionError):
      sent.sendall(data)
      if wait:
        return sent.recv(1 << 16).decode('latin1')
  return ''


class Busy(Exception):
  """All places are taken: it can be asked again."""


def status_of(*args, **headers):
  """Asks as `ask` does."""
  status = ask(*args, **headers)[0]
  if status == 503:
    raise Busy
  return status


def answers(status):
  """Returns what tells whether an answer to bytes has a status."""

  def fine(answer):
    if answer.startswith('HTTP/1.1 503'):
      raise Busy
    return answer.startswith(f'HTTP/1.1 {status}')

  return fine


def bombs():
  """Returns files that are small and unfold, by name."""
  profile = zlib.compress(bytes(50 << 20), 9)
  huge = encoded(Image.new('RGB', (16, 16)), 'JPEG').replace(
    b'\x00\x10\x00\x10\x03', b'\xff\xff\xff\xff\x03'
  )
  frames = [Image.new('P', (99, 99), i % 7) for i in range(300)]
  return {
    'PNG of 3.6 billion pixels': png_of(60_000, 60_000),
    'PNG of none': png_of(0, 0),
    'JPEG of 4.3 billion': huge,
    'a profile of 50 MB': GOOD[:33]
    + chunk(b'iCCP', b'x\0\0' + profile)
    + GOOD[33:],
    'a text of 50 MB': GOOD[:33]
    + chunk(b'zTXt', b'x\0\0' + profile)
    + GOOD[33:],
    'GIF of many frames': encoded(
      frames[0], 'GIF', save_all=True, append_images=frames[1:]
    ),
    'TIFF of a billion strips': encoded(Image.new('L', (9, 9)), 'TIFF').replace(
      b'\x11\x01\x04\0\x01\0\0\0', b'\x11\x01\x04\0\xff\xff\xff\x3f'
    ),
  }


def chunk(kind, data):
  """Returns a piece of a PNG."""
  parts = len(data).to_bytes(4), kind, data
  return b''.join(parts) + zlib.crc32(kind + data).to_bytes(4)


def attacks(port):
  """Returns by name what sends a bad request and tells whether it was refused.

  Each takes a generator of random numbers, and raises `Busy`.
  """

  def posted(data, *statuses):
    return lambda rng: status_of(port, '/api/predict', data) in statuses

  def sent(data, fine, wait=True):
    return lambda rng: fine(raw(port, data, wait))

  def bent(rng):
    data = bytearray(KINDS[rng.choice(list(KINDS))])
    for _ in range(8):
      data[rng.randrange(len(data))] = rng.randrange(256)
    return status_of(port, '/api/predict', bytes(data)) in (200, 422)

  def cut(rng):
    data = KINDS[rng.choice(list(KINDS))]
    data = data[: rng.randrange(len(data))]
    return status_of(port, '/api/predict', data) in (200, 422)

  def noise(rng):
    return 'HTTP/1.1 200' not in raw(port, rng.randbytes(300) + b'\r\n\r\n')

  def path(rng):
    names = ('..', '%2e%2e', 'models', 'etc', 'passwd', '%00', '\\', 'x' * 999)
    text = '/' + '/'.join(rng.choices(names, k=rng.randrange(1, 9)))
    return status_of(port, text) == 404

  def parameter(rng):
    text = rng.choice(('top=-1', 'model=../x', 'layer=9', 'x=' + 'y' * 5000))
    return status_of(port, f'/api/predict?{text}', GOOD) == 400

  nothing = ''.__eq__
  found = {
    'too long': sent(POST + LENGTH % ((20 << 20) + 1), answers(413)),
    'cut body': sent(POST + LENGTH % 5000 + GOOD[:9], nothing, wait=False),
    'cut head': sent(POST, nothing, wait=False),
    'long header': sent(POST + b'X: ' + b'a' * 40_000, answers(400)),
    'many headers': sent(POST + b'X: a\r\n' * 9000, answers(400)),
    'another protocol': sent(b'\x16\x03\x01 no HTTP\r\n\r\n', answers(400)),
    'two lengths': sent(
      POST + b'Content-Length: 3\r\n' + LENGTH % 9 + b'123456789', answers(400)
    ),
    'a wrong length': sent(POST + b'Content-Length: -4\r\n\r\n', answers(400)),
    'a bad chunk': sent(
      POST + b'Transfer-Encoding: chunked\r\n\r\nzz\r\nx', answers(400)
    ),
    'method': lambda rng: (
      status_of(port, '/api/predict', method='DELETE') == 405
    ),
    'host': lambda rng: status_of(port, '/', Host='evil.example') == 403,
    'bent': bent,
    'cut': cut,
    'noise': noise,
    'path': path,
    'parameter': parameter,
  }
  for name, (data, _) in BAD.items():
    found[name] = posted(data, 422)
  for name, data in bombs().items():
    found[name] = posted(data, 200, 422)
  for name in ('{"image": 1}', '<svg/>', 'PK\x03\x04', 'GIF89a', 'BM', 'II*\0'):
    found[name] = posted(name.encode('latin1'), 422)
  return found


def memory_mb(process):
  """Returns the memory of a process and its children, after a cleaning."""
  process.send_signal(signal.SIGUSR1)
  while process.said[-1] != 'cleaned\n':
    time.sleep(0.01)
  process.said.pop()
  total = 0
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    with contextlib.suppress(OSError):
      number = int(path.parent.name)
      parent = int(path.read_text().rpartition(')')[2].split()[1])
      if process.pid in (number, parent):
        pages = int((path.parent / 'statm').read_text().split()[1])
        total += pages * os.sysconf('SC_PAGE_SIZE') / 1e6
  return total


def slow(port, stop, ended):
  """Sends a byte now and then until the server has had enough, or the test."""
  with socket.create_connection(('127.0.0.1', port)) as sent:
    sent.settimeout(0.3)
    sent.sendall(POST + LENGTH % 5000)
    while not stop.is_set():
      try:
        sent.sendall(b'x')
        ended.append(sent.recv(12))
        return
      except TimeoutError:
        continue
      except ConnectionError:
        ended.append(b'')
        return


@pytest.mark.edge
def test_strangers_can_do_no_harm(server):
  folder, port, process = server
  kinds = attacks(port)
  names = list(kinds)

  def attack(number, count, done, failed):
    rng = random.Random(number)
    for i in range(count):
      name = names[(number + i) % len(names)]
      fine, tries = False, 0
      # A connection may be closed before its answer is read.
      while not fine and tries < 100:
        try:
          fine = kinds[name](rng)
          tries += 1
        except Busy:
          time.sleep(0.05)
      (done if fine else failed)[name] += 1

  def run(count):
    """Attacks with all clients; returns counts, and what good ones got."""
    done, failed, got = (collections.Counter() for _ in range(3))
    stop, ended = threading.Event(), []
    threads = [
      threading.Thread(target=attack, args=[n, count // CLIENTS, done, failed])
      for n in range(CLIENTS)
    ]
    waiting = [
      threading.Thread(target=slow, args=[port, stop, ended])
      for _ in range(1 + count // 500)
    ]
    held = [socket.create_connection(('127.0.0.1', port)) for _ in range(20)]
    for thread in threads + waiting:
      thread.start()
    busy = True
    while busy:
      busy = any(thread.is_alive() for thread in threads)
      got[predict(port, GOOD)[0]] += 1
      time.sleep(0.1)
    stop.set()
    for sent in held:
      sent.close()
    for thread in waiting:
      thread.join()
    assert set(ended) <= {b'HTTP/1.1 408', b'HTTP/1.1 503', b''}
    assert not failed
    return done, got

  # After which it has loaded all it needs, and its decoder for every format.
  for data in KINDS.values():
    assert predict(port, data)[0] == 200
  for kind in kinds.values():
    kind(random.Random(0))
  run(max(48, COUNT // 20))
  files = {path: path.stat().st_mtime for path in folder.rglob('*')}
  before, start = memory_mb(process), time.perf_counter()
  done, got = run(COUNT)
  took, after = time.perf_counter() - start, memory_mb(process)
  print(
    f'\n{sum(done.values())} bad requests in {took:.0f} s, good ones by status '
    f'{dict(got)}, memory {before:.1f} MB before, {after:.1f} after'
  )
  assert sum(done.values()) == COUNT // CLIENTS * CLIENTS
  assert set(got) <= {200, 503} and got[200]
  assert predict(port, GOOD)[0] == 200
  assert process.poll() is None
  assert {p: p.stat().st_mtime for p in folder.rglob('*')} == files
  assert after - before < MOST_GROWTH_MB
  assert len(process.said) == 1  # where it is served


def is_closed(sent):
  """Whether the server has closed a connection, whatever it answered."""
  try:
    while sent.recv(1 << 16):
      pass
  except BlockingIOError:
    return False
  except ConnectionError:
    pass
  return True


@pytest.mark.edge
@pytest.mark.parametrize('begun', [b'', POST + LENGTH % 5000, b'pipelined'])
def test_connections_that_wait_keep_nobody_away(server, begun):
  """Silent ones, slow ones, and ones that ask without reading the answers."""
  _, port, process = server
  if begun == b'pipelined':
    begun = b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n' * 9999
  lines = len(process.said)
  with contextlib.ExitStack() as stack:
    held = []
    for _ in range(2 * PLACES):
      sent = socket.create_connection(('127.0.0.1', port))
      stack.enter_context(sent)
      sent.setblocking(False)
      with contextlib.suppress(OSError):
        sent.sendall(begun)
      held.append(sent)
    assert predict(port, GOOD)[0] == 200
    # The oldest have made room.
    assert sum(map(is_closed, held)) >= PLACES
  assert predict(port, GOOD)[0] == 200
  assert process.poll() is None and len(process.said) == lines


@pytest.mark.edge
@pytest.mark.parametrize('pause_s', [0, 0.1])
def test_a_body_that_goes_wrong_fills_no_log(server, pause_s):
  """Before and after its request is refused."""
  _, port, process = server
  lines = len(process.said)
  head = b'POST /api/predict?top=0 HTTP/1.1\r\nHost: localhost\r\n'
  with socket.create_connection(('127.0.0.1', port)) as sent:
    sent.sendall(head + b'Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n')
    time.sleep(pause_s)
    sent.sendall(b'zz\r\nx')
    with contextlib.suppress(ConnectionError):
      while sent.recv(1 << 16):
        pass
  assert predict(port, GOOD)[0] == 200
  assert len(process.said) == lines
