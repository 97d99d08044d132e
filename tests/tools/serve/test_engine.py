"""The server in this process, beside JAX, with what a test can slow down."""

import asyncio
import contextlib
import hashlib
import http.client
import socket
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.serve.pictures_to_send import every_kind
from tests.tools.serve.test_server import ask, checkpoint_of
from vit_jax.tools.serve import board
from vit_jax.tools.serve.__main__ import explained
from vit_jax.visualize import rollout
from vit_jax.visualize.attention_maps import Layers

_, uvicorn, engine_lib, protection, listening, served_model, server_lib = (
  pytest.importorskip(name, reason='needs the extra `serve`')
  for name in (
    'onnx',
    'uvicorn',
    'vit_jax.tools.serve.engine',
    'vit_jax.tools.serve.protection',
    'vit_jax.tools.serve.listening',
    'vit_jax.tools.serve.served_model',
    'vit_jax.tools.serve.server',
  )
)

from starlette.exceptions import HTTPException  # noqa: E402

DATA = every_kind()['JPEG turned 6']


@pytest.fixture(scope='module')
def checkpoint():
  return checkpoint_of()


@pytest.fixture(scope='module')
def paths(tmp_path_factory, checkpoint):
  """By dtype."""
  folder = tmp_path_factory.mktemp('models')
  for dtype in ('float32', 'int8'):
    board.write_model(checkpoint, folder, 'small', dtype)
  return {x: folder / f'small.{x}.onnx' for x in ('float32', 'int8')}


@pytest.fixture
def engine(paths, checkpoint):
  engine = engine_lib.Engine(
    {'small': served_model.ServedModel(paths['float32'], 1)},
    lambda name, *asked: explained(checkpoint, *asked),
  )
  # A machine that is busy with other things is no fault of an image.
  engine._decoder._seconds = 600
  yield engine
  engine.close()


@pytest.mark.slow
def test_rollout_for_a_class_is_that_of_jax(engine, checkpoint):
  _, sights = engine.add(DATA).result()
  (seen,) = sights.values()
  x = checkpoint.normalize(jnp.asarray(seen.pixels_HWC[None]))
  layers = Layers(checkpoint.model, checkpoint.params, x)
  found = engine.explained(seen, 'small', 5, 'max', 0.5).result()
  want = rollout.rollout(layers, 'max', 0.5, np.array([5]))[0]
  np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize(('layer', 'discard'), [(None, 0.55), (2, 0)])
def test_rollout_is_that_of_jax(layer, discard):
  """On the same weights, none of them alike."""
  rng = np.random.default_rng(0)
  weights = rng.dirichlet(np.ones(21), (3, 21)).astype(np.float32)
  read = rng.dirichlet(np.ones(21)).astype(np.float32)
  fused = [
    rollout.fuse(x[None, None], 'mean', discard)
    for x in (weights if layer is None else weights[[layer]])
  ]
  want = rollout.maps(fused, read[None], (4, 5))[0]
  before = weights.copy()
  got = served_model.rollout(weights, read, (4, 5), discard, layer)
  np.testing.assert_allclose(got, want, atol=1e-6)
  np.testing.assert_array_equal(weights, before)


def test_an_error_reaches_who_asked_and_the_next_is_answered(
  engine, monkeypatch, caplog
):
  digest, sights = engine.add(DATA).result()
  seen = sights[engine.models['small'].view]
  with monkeypatch.context() as patched:
    patched.setattr(engine.models['small'], 'run', lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      engine.answer(digest, seen, 'small').result()
  assert len(engine.answer(digest, seen, 'small').result().probability_C) == 7
  assert not caplog.records


def test_a_known_image_is_answered_while_others_are_decoded(
  engine, monkeypatch
):
  """However many they are."""
  (seen,) = engine.add(DATA).result()[1].values()
  start = threading.Event()
  see = engine._decoder.see
  monkeypatch.setattr(
    engine._decoder, 'see', lambda data: start.wait() and see(data)
  )
  try:
    with served(engine) as port:
      digest = post(port)[2]['image']
      waiting = [engine.add(DATA + bytes([i])) for i in range(50)]
      assert post(port, f'image={digest}&discard=0.5', b'')[0] == 200
      # An image that was decoded before also gets a new answer.
      assert engine.answer('x', seen, 'small').result(timeout=60)
      assert not any(future.done() for future in waiting)
  finally:
    start.set()
  for future in waiting[2:]:
    future.cancel()
  assert waiting[1].result()[0] != digest


def test_an_answer_is_computed_once(engine, monkeypatch):
  digest, sights = engine.add(DATA).result()
  assert digest == hashlib.sha256(DATA).hexdigest()
  model = engine.models['small']
  seen = sights[model.view]
  first = engine.answer(digest, seen, 'small').result()
  monkeypatch.setattr(model, 'run', lambda seen: 1 / 0)
  assert engine.answer(digest, seen, 'small').result() is first
  assert engine.images.get(digest) is sights and engine.images.get('x') is None


def test_places_are_counted(engine, monkeypatch):
  monkeypatch.setattr(engine_lib, 'MAX_WAITING', 1)
  with engine.place():
    with pytest.raises(HTTPException) as refused, engine.place():
      pass
    assert refused.value.status_code == 503
    assert int(refused.value.headers['Retry-After']) >= 1
  with engine.place():
    assert engine.waiting == 1
  assert engine.waiting == 0


def test_the_oldest_is_forgotten():
  found = engine_lib.LruCache(10)
  found.put('a', 1, 4)
  found.put('b', 2, 4)
  assert found.get('a') == 1
  found.put('c', 3, 4)
  assert [found.get(x) for x in 'abc'] == [1, None, 3]
  found.put('c', 4, 6)
  assert (found.get('a'), found.get('c')) == (1, 4)
  # What is larger than all is remembered alone, or a large model would run
  # again for every move of a slider.
  found.put('d', 5, 11)
  assert [found.get(x) for x in 'acd'] == [None, None, 5]
  found.put('e', 6, 1)
  assert (found.get('d'), found.get('e')) == (None, 6)


@contextlib.contextmanager
def served(engine):
  """Gives the port of the server in a thread, with the command's settings."""
  app = server_lib.PageServer(engine, '', protection.LOOPBACK).app()
  config = listening.config_of(app)
  server = uvicorn.Server(config)
  listener = socket.create_server(('127.0.0.1', 0))
  thread = threading.Thread(target=server.run, args=[[listener]])
  thread.start()
  try:
    yield listener.getsockname()[1]
  finally:
    server.should_exit = True
    thread.join()
    listener.close()


def post(port, query='', data=DATA):
  return ask(port, f'/api/predict?{query}', data)


@pytest.mark.edge
def test_slow_clients_and_full_queues_are_refused(engine, monkeypatch):
  head = b'POST /api/predict HTTP/1.1\r\nHost: localhost\r\n'
  with served(engine) as port:
    status, _, answer = post(port, 'class=0&fusion=max&discard=0.5')
    assert status == 200
    (seen,) = engine.add(DATA).result()[1].values()
    want = engine.explain('small', seen.pixels_HWC, 0, 'max', 0.5)
    values = answer['map'].pop('values')
    np.testing.assert_allclose(values, want, atol=2e-6)
    assert np.max(values) == 1 and values == np.round(values, 6).tolist()
    assert answer['map'] == {
      **{'fusion': 'max', 'discard': 0.5, 'layer': None, 'class': 0}
    }
    status, _, body = post(port, 'class=3&layer=1')
    assert status == 400 and 'Leave out layer' in body['error']
    with monkeypatch.context() as patched:
      patched.setattr(engine_lib, 'MAX_WAITING', 0)
      status, headers, body = post(port)
      assert status == 503 and int(headers['Retry-After']) >= 1
      with socket.create_connection(('127.0.0.1', port)) as sent:
        sent.sendall(head + b'Content-Length: 900\r\n\r\n123')
        assert answered(sent) == 503  # before the rest has come
    with monkeypatch.context() as patched:
      patched.setattr(server_lib, 'MAX_BODIES_BYTES', 100)
      status, headers, body = post(port)
      assert status == 503 and int(headers['Retry-After']) >= 1
    for begun, answer in (
      (b'', b''),
      (head, b''),
      (head + b'Content-Length: 900\r\n\r\n123', b'HTTP/1.1 408'),
    ):
      # No head is waited for as long as a body is, and no body as a head.
      head_s, body_s = (600, 0.1) if answer else (0.1, 600)
      monkeypatch.setattr(protection, 'HEADER_SECONDS', head_s)
      monkeypatch.setattr(protection, 'BODY_SECONDS', body_s)
      with socket.create_connection(('127.0.0.1', port)) as sent:
        try:
          sent.sendall(begun)
          got = sent.recv(12)
        except ConnectionError:
          got = b''
        assert got == answer
    monkeypatch.undo()
    assert post(port, f'image={"0" * 64}', b'')[0] == 404
    assert post(port)[0] == 200


@pytest.fixture
def later_s(monkeypatch):
  """How many seconds later it is for a server, in a list."""
  later_s = [0]
  monkeypatch.setattr(
    asyncio.BaseEventLoop, 'time', lambda loop: time.monotonic() + later_s[0]
  )
  return later_s


@pytest.mark.edge
def test_a_head_has_one_time_however_it_comes(engine, monkeypatch, later_s):
  monkeypatch.setattr(protection, 'HEADER_SECONDS', 600)
  head = b'GET /healthz HTTP/1.1\r\nHost: localhost\r\n'
  with served(engine) as port:
    with socket.create_connection(('127.0.0.1', port)) as sent:
      sent.sendall(head)
      for seconds in (400, 300):
        # With an answer to others, what came is read and what was due is done.
        assert post(port)[0] == 200
        later_s[0] += seconds
        with contextlib.suppress(ConnectionError):
          sent.sendall(b'X: 1\r\n')
      assert post(port)[0] == 200
      assert is_closed(sent)


@pytest.mark.edge
def test_an_answer_comes_before_its_body_and_waits_for_it(
  engine, monkeypatch, later_s
):
  """Until the body is complete or its time is over."""
  monkeypatch.setattr(protection, 'BODY_SECONDS', 600)
  monkeypatch.setattr(protection, 'HEADER_SECONDS', 60)
  head = b'GET /healthz HTTP/1.1\r\nHost: localhost\r\n'
  with served(engine) as port:
    for rest in (b'', b'2' * 8999):
      with socket.create_connection(('127.0.0.1', port)) as sent:
        sent.sendall(head + b'Content-Length: 9000\r\n\r\n1')
        assert answered(sent) == 200
        later_s[0] += 100
        sent.sendall(b'')
        assert post(port)[0] == 200
        if rest:
          sent.sendall(rest)
          assert sent.recv(1) == b''
          continue
        assert not is_closed(sent)
        later_s[0] += 700
        assert post(port)[0] == 200
        assert is_closed(sent)


@pytest.mark.edge
def test_large_bodies_are_refused(engine, monkeypatch):
  """By what is said of them, and by what comes."""
  monkeypatch.setattr(server_lib, 'MAX_BODY_BYTES', 6)
  with served(engine) as port:
    with socket.create_connection(('127.0.0.1', port)) as sent:
      head = b'POST /api/predict HTTP/1.1\r\nHost: localhost\r\n'
      sent.sendall(head + b'Content-Length: 7\r\n\r\n')
      assert answered(sent) == 413
    connection = http.client.HTTPConnection('127.0.0.1', port)
    with contextlib.closing(connection):
      parts = iter([b'abc', b'defg'])
      connection.request('POST', '/api/predict', parts, encode_chunked=True)
      assert connection.getresponse().status == 413


def is_closed(sent):
  """Whether the server has closed a connection, without waiting for that."""
  sent.setblocking(False)
  try:
    return sent.recv(1) == b''
  except BlockingIOError:
    return False
  except ConnectionError:
    return True


def answered(sent):
  """Reads an answer to its end, in however many parts it comes."""
  answer = http.client.HTTPResponse(sent)
  answer.begin()
  answer.read()
  return answer.status
