"""The server in this process, beside JAX, with what a test can slow down."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.serve.pictures_to_send import every_kind
from tests.tools.serve.test_server import checkpoint_of
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.tools.serve import board
from vit_jax.tools.serve.__main__ import explained
from vit_jax.tools.serve.uploads import Seen, View
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


def test_rollout_for_a_class_is_that_of_jax(engine, checkpoint):
  _, sights = engine.add(DATA)
  (seen,) = sights.values()
  x = checkpoint.normalize(jnp.asarray(seen.pixels_HWC[None]))
  layers = Layers(checkpoint.model, checkpoint.params, x)
  for number, fusion, discard in ((2, 'mean', 0), (5, 'max', 0.5)):
    found = engine.explained(seen, 'small', number, fusion, discard).result()
    want = rollout.rollout(layers, fusion, discard, np.array([number]))[0]
    np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize('layer', [None, 2])
@pytest.mark.parametrize('discard', [0, 0.55])
def test_rollout_is_that_of_jax(layer, discard):
  """On the same weights, none of them alike."""
  rng = np.random.default_rng(0)
  weights = rng.dirichlet(np.ones(21), (3, 21)).astype(np.float32)
  read = rng.dirichlet(np.ones(21)).astype(np.float32)
  fused = [
    {'all': rollout.fuse(x[None, None], 'mean', discard)}
    for x in (weights if layer is None else weights[[layer]])
  ]
  want = rollout.maps(fused, read[None], (4, 5))[0]
  before = weights.copy()
  got = served_model.rollout(weights, read, (4, 5), discard, layer)
  np.testing.assert_allclose(got, want, atol=1e-6)
  np.testing.assert_array_equal(weights, before)


def held_up(model, monkeypatch):
  """Has a model wait for an event, and returns it and the sizes of batches."""
  sizes, start, run = [], threading.Event(), model.run

  def slow(seen):
    sizes.append(len(seen))
    start.wait()
    return run(seen)

  monkeypatch.setattr(model, 'run', slow)
  return sizes, start


def test_what_waits_for_one_model_runs_at_once(engine, monkeypatch):
  """In the order asked; int8 one by one, where others change an answer."""
  model = engine.models['small']
  run = model.run
  sizes, start = held_up(model, monkeypatch)
  found = {}
  for data in list(every_kind().values())[:9]:
    digest, sights = engine.add(data)
    found[digest] = engine.answer(digest, sights[model.view], 'small')
    while not sizes:
      time.sleep(0.01)
  start.set()
  for digest, future in found.items():
    probability_C = future.result().probability_C
    seen = engine.known(digest)[model.view]
    (alone,) = run([seen])
    np.testing.assert_allclose(probability_C, alone.probability_C, atol=1e-5)
  assert sizes == [1, 4, 4]
  # Remembered, it does not run again.
  engine.answer(digest, seen, 'small').result()
  assert sizes == [1, 4, 4]


def test_an_error_reaches_who_asked_and_the_next_is_answered(
  engine, monkeypatch, caplog
):
  digest, sights = engine.add(DATA)
  seen = sights[engine.models['small'].view]
  with monkeypatch.context() as patched:
    patched.setattr(engine.models['small'], 'run', lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      engine.answer(digest, seen, 'small').result()
  assert len(engine.answer(digest, seen, 'small').result().probability_C) == 7
  assert not caplog.records


def test_whoever_asked_may_be_gone(engine, monkeypatch, caplog):
  """As when the server ends, which cancels what it waits for."""
  model = engine.models['small']
  sizes, start = held_up(model, monkeypatch)
  futures, mapped = [], None
  for data in list(every_kind().values())[:3]:
    digest, sights = engine.add(data)
    seen = sights[model.view]
    futures.append(engine.answer(digest, seen, 'small'))
    while not sizes:
      time.sleep(0.01)
    # Alone, so that nobody is left of those that are next.
    mapped = mapped or engine.explained(seen, 'small', 0, 'mean', 0.0)
  running, waiting, last = futures
  assert waiting.cancel() and mapped.cancel() and not running.cancel()
  start.set()
  assert len(last.result().probability_C) == 7
  assert sizes == [1, 1]
  assert not caplog.records


class Pretended:
  """A decoder that sees black, and models that answer what they were given."""

  batches = True

  def __init__(self, views=None):
    self.view = View((2, 3), Preprocessing())
    self.ran, self._views = [], views
    self.begun, self.start = threading.Event(), threading.Event()

  def see(self, data):
    black = np.zeros((2, 3, 3), np.uint8)
    return [Seen(black, (0, 0, 1, 1), (2, 3)) for _ in self._views]

  def run(self, seen):
    self.ran.append(len(seen))
    self.begun.set()
    self.start.wait()
    return [
      served_model.Answer(np.arange(4.0), np.zeros((5, 4)), {}, None, 0.25)
      for _ in seen
    ]

  def close(self):
    pass


@pytest.fixture
def pretended(monkeypatch):
  """An engine with two models that batch and one that does not."""
  monkeypatch.setattr(engine_lib, 'Decoder', Pretended)
  models = {name: Pretended() for name in ('a', 'b', 'alone')}
  models['alone'].batches = False
  calls = []

  def explain(*args):
    calls.append(args)
    return len(calls)

  engine = engine_lib.Engine(models, explain)
  engine.calls = calls
  yield engine
  for model in models.values():
    model.start.set()
  engine.close()


def test_others_go_on_waiting_while_one_model_runs(pretended):
  """Whoever waits for the same model runs with the next, up to four of them."""
  models = pretended.models
  _, sights = pretended.add(b'')
  seen = sights[models['a'].view]
  done = []

  def ask(name, digest):
    future = pretended.answer(digest, seen, name)
    future.add_done_callback(lambda _: done.append(digest))
    return future

  futures = [ask('a', 'a0')]
  models['a'].begun.wait()
  for digest in ('b0', 'a1', 'l0', 'a2', 'b1', 'l1', 'a3', 'a4', 'a5'):
    name = 'alone' if digest[0] == 'l' else digest[0]
    futures.append(ask(name, digest))
    if digest == 'a3':
      mapped = pretended.explained(seen, 'a', 7, 'max', 0.5)
  for model in models.values():
    model.start.set()
  for future in futures:
    assert future.result().seconds == 0.25
  assert mapped.result() == 1
  pretended.close()  # what is done with an answer may still be under way
  ((name, pixels_HWC, *rest),) = pretended.calls
  assert (name, *rest) == ('a', 7, 'max', 0.5)
  assert pixels_HWC is seen.pixels_HWC
  assert [model.ran for model in models.values()] == [[1, 4, 1], [2], [1, 1]]
  assert done == ['a0', 'b0', 'b1', *('a1', 'a2', 'a3', 'a4'), 'l0', 'l1', 'a5']
  assert dict(pretended.counts) == {
    **{('images', 'a'): 6, ('batches', 'a'): 3, ('seconds', 'a'): 1.5},
    **{('images', 'b'): 2, ('batches', 'b'): 1, ('seconds', 'b'): 0.5},
    **{('images', 'alone'): 2, ('batches', 'alone'): 2},
    ('seconds', 'alone'): 0.5,
  }


def test_what_is_remembered_is_counted(pretended):
  for model in pretended.models.values():
    model.start.set()
  assert pretended.remembered_bytes == 0
  digest, sights = pretended.add(b'abc')
  # By what everybody calls it.
  assert digest.startswith('ba7816bf8f01cfea414140de5dae2223b00361a3')
  assert len(sights) == 1 and pretended.remembered_bytes == 18
  assert pretended.known(digest) is sights and pretended.known('x') is None
  assert pretended.add(b'abc')[1] is sights
  (seen,) = sights.values()
  for name in ('a', 'b'):
    pretended.answer(digest, seen, name).result()
  pretended.close()
  for name in ('a', 'b'):
    assert pretended.answer(digest, seen, name).done()
  # Of each: four probabilities and five boxes of float64.
  assert pretended.remembered_bytes == 18 + 2 * 8 * (4 + 20)


def test_places_are_counted(engine, monkeypatch):
  monkeypatch.setattr(engine_lib, 'MAX_WAITING', 1)
  with engine.place():
    with pytest.raises(engine_lib.Busy) as refused, engine.place():
      pass
    assert refused.value.seconds >= 1
  with engine.place():
    assert engine.waiting == 1
  assert engine.waiting == 0


def test_the_oldest_is_forgotten():
  found = engine_lib.Remembered(10)
  found.put('a', 1, 4)
  found.put('b', 2, 4)
  assert found.get('a') == 1
  found.put('c', 3, 4)
  assert [found.get(x) for x in 'abc'] == [1, None, 3]
  found.put('c', 4, 6)
  assert (found.get('a'), found.get('c'), found.nbytes) == (1, 4, 10)
  # What is larger than all is remembered alone, or a large model would run
  # again for every move of a slider.
  found.put('d', 5, 11)
  assert [found.get(x) for x in 'acd'] == [None, None, 5]
  found.put('e', 6, 1)
  assert (found.get('d'), found.get('e'), found.nbytes) == (None, 6, 1)


@contextlib.contextmanager
def served(engine, **options):
  """Gives the port of the server in a thread, with the command's protocol.

  `options` are uvicorn's.
  """
  app = server_lib.PageServer(engine, '', protection.LOOPBACK).app()
  config = uvicorn.Config(
    app,
    http=protection.ImpatientProtocol,
    h11_max_incomplete_event_size=protection.MAX_HEADER_BYTES,
    lifespan='off',
    log_config=None,
    **options,
  )
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
  connection = http.client.HTTPConnection('127.0.0.1', port)
  with contextlib.closing(connection):
    connection.request('POST', f'/api/predict?{query}', data)
    response = connection.getresponse()
    return response.status, response.headers, json.loads(response.read())


@pytest.mark.edge
def test_slow_clients_and_full_queues_are_refused(engine, monkeypatch):
  head = b'POST /api/predict HTTP/1.1\r\nHost: localhost\r\n'
  with served(engine) as port:
    status, _, answer = post(port, 'class=0&fusion=max&discard=0.5')
    assert status == 200
    (seen,) = engine.add(DATA)[1].values()
    want = engine.explain('small', seen.pixels_HWC, 0, 'max', 0.5)
    values = answer['map'].pop('values')
    np.testing.assert_allclose(values, want, atol=2e-6)
    assert np.max(values) == 1 and values == np.round(values, 6).tolist()
    assert answer['map'] == {
      **{'fusion': 'max', 'discard': 0.5, 'layer': None, 'class': 0}
    }
    status, _, body = post(port, 'class=3&layer=1')
    assert status == 400 and 'leave out layer' in body['error']
    with monkeypatch.context() as patched:
      patched.setattr(engine_lib, 'MAX_WAITING', 0)
      status, headers, body = post(port)
      assert status == 503 and int(headers['Retry-After']) >= 1
      with socket.create_connection(('127.0.0.1', port)) as sent:
        sent.sendall(head + b'Content-Length: 900\r\n\r\n123')
        assert answered(sent) == 503  # before the rest has come
    with monkeypatch.context() as patched:
      patched.setattr(protection, 'MAX_BODIES_BYTES', 100)
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


PATIENT = {'loop': 'asyncio', 'timeout_keep_alive': 6000}


@pytest.mark.edge
@pytest.mark.parametrize('before', [0, 1])
def test_a_head_has_one_time_however_it_comes(
  engine, monkeypatch, later_s, before
):
  """The first of a connection, and those after an answer."""
  monkeypatch.setattr(protection, 'HEADER_SECONDS', 600)
  head = b'GET /healthz HTTP/1.1\r\nHost: localhost\r\n'
  with served(engine, **PATIENT) as port:
    with socket.create_connection(('127.0.0.1', port)) as sent:
      for _ in range(before):
        sent.sendall(head + b'\r\n')
        assert answered(sent) == 200
      sent.sendall(head)
      for seconds in (400, 300):
        # With an answer to others, what came is read and what was due is done.
        assert post(port)[0] == 200
        later_s[0] += seconds
        with contextlib.suppress(ConnectionError):
          sent.sendall(b'X: 1\r\n')
      assert post(port)[0] == 200
      sent.setblocking(False)
      # Where it were open still, there would be nothing to read yet.
      with contextlib.suppress(ConnectionError):
        assert sent.recv(1) == b''


@pytest.mark.edge
def test_a_body_that_nobody_reads_is_not_waited_for(
  engine, monkeypatch, later_s
):
  monkeypatch.setattr(protection, 'BODY_SECONDS', 600)
  monkeypatch.setattr(protection, 'HEADER_SECONDS', 6000)
  with served(engine, **PATIENT) as port:
    with socket.create_connection(('127.0.0.1', port)) as sent:
      head = b'GET /healthz HTTP/1.1\r\nHost: localhost\r\n'
      sent.sendall(head + b'Content-Length: 9000\r\n\r\n1')
      assert answered(sent) == 200
      # With an answer to others, what came is read and what was due is done.
      assert post(port)[0] == 200
      later_s[0] = 700
      assert post(port)[0] == 200
      sent.setblocking(False)
      # Where it were open still, there would be nothing to read yet.
      with contextlib.suppress(ConnectionError):
        assert sent.recv(1) == b''
    # One that arrives is no fault, nor is waiting for its end any more.
    with socket.create_connection(('127.0.0.1', port)) as sent:
      for _ in range(2):
        sent.sendall(head + b'Content-Length: 2\r\n\r\n1')
        assert answered(sent) == 200
        sent.sendall(b'2')
      assert post(port)[0] == 200
      later_s[0] = 1400
      assert post(port)[0] == 200
      sent.sendall(head + b'\r\n')
      assert answered(sent) == 200


def answered(sent):
  """Reads an answer to its end, in however many parts it comes."""
  answer = http.client.HTTPResponse(sent)
  answer.begin()
  answer.read()
  return answer.status


def test_the_faster_is_taken(paths, monkeypatch, capsys):
  both = list(paths.values())
  for dtype, path in paths.items():
    assert listening.choose(both, dtype, 1) == path
    assert listening.choose([path], 'faster', 1) == path
  assert listening.choose(both, 'faster', 1) in both
  said = capsys.readouterr().out
  assert said.startswith('timed     small: float32 ') and 'int8' in said
