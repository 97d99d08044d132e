"""A board's folder, started where there is no JAX, and asked over the network.

Its answers are those of the checkpoint on the same files, as the server's
decoder has them: test_uploads.py has how near that is to the checkpoint's.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest
from PIL import Image

from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from tests.tools.serve.pictures_to_send import every_kind
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.projects.detr import detections
from vit_jax.tools.serve import board
from vit_jax.tools.serve.decoder import Seen, View, see
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import rollout

REASON = 'needs the extra `serve`'
for library in ('onnx', 'onnxruntime', 'starlette', 'uvicorn'):
  pytest.importorskip(library, reason=REASON)
served_model = pytest.importorskip('vit_jax.tools.serve.served_model')


VIT = {'patch_size': 8, 'width': 32, 'depth': 3, 'mlp_dim': 48, 'heads': 4}
KINDS = every_kind()
DETR = {
  'name': 'detr',
  'num_queries': 6,
  'width': 32,
  'heads': 4,
  'mlp_dim': 48,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'backbone': 'plain',
  'backbone_layers': (1, 1),
  'backbone_width': 32,
}
TOLERANCE = 1e-4
TOKEN = 'a-Secret'
# What a board does not have: importing any of it fails. A signal makes it give
# back what memory it can, and say so.
START = """
import ctypes, gc, os, runpy, signal, sys
trim = getattr(ctypes.CDLL(None), 'malloc_trim', int)
signal.signal(
  signal.SIGUSR1,
  lambda *_: (gc.collect(), trim(0), os.write(1, b'cleaned\\n')),
)
for name in ('jax', 'flax', 'torch', 'vit_jax.models.vit'):
  sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition('/')[0])
from vit_jax.tools.serve import decoder, listening, protection
# A machine that is busy with other things is no fault of an image.
decoder.Decoder.__init__.__defaults__ = (600.0,)
{more}
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def checkpoint_of(**fields):
  """Returns a model with names, and images cut from their centre."""
  checkpoint = random_checkpoint(None, (32, 48), **VIT | fields)
  return dataclasses.replace(
    checkpoint,
    path='/some/where/runs/small/checkpoints/12',
    preprocessing=Preprocessing(
      50, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 'bilinear'
    ),
  )


@contextlib.contextmanager
def running(folder, *options, more=''):
  """Starts a board's folder, and gives its port and process.

  The process has what it said as `said`. It does `more`, Python code, before it
  serves.
  """
  code = START.format(more=more)
  process = subprocess.Popen(
    [sys.executable, '-c', code, folder / 'serve.py', '--port=0', *options],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
  )
  process.said = said = []
  # Until the end, because a full pipe would stop it.
  reader = threading.Thread(target=lambda: said.extend(process.stdout))
  try:
    for line in process.stdout:
      said.append(line)
      if match := re.search(r' at http://127.0.0.1:(\d+)', line):
        break
    else:
      raise AssertionError(''.join(said))
    reader.start()
    yield int(match[1]), process
  finally:
    process.terminate()
    process.wait()
    if reader.ident:
      reader.join()
    process.stdout.close()


@pytest.fixture(scope='module')
def checkpoints():
  return {
    'small': checkpoint_of(),
    'pooled': checkpoint_of(pool='map', registers=1),
  }


@pytest.fixture(scope='module')
def folder(tmp_path_factory, checkpoints):
  """With a model in float32 alone and one in both."""
  folder = tmp_path_factory.mktemp('page') / 'board'
  assert board.write(checkpoints['small'], str(folder), 'int8') == []
  board.write_model(
    checkpoints['pooled'], folder / 'models', 'pooled', 'float32'
  )
  return folder


@pytest.fixture(scope='module')
def port(folder):
  with running(folder, '--dtype=float32', '--threads=1') as (port, _):
    yield port


def ask(port, path, data=None, method=None, **headers):
  """Returns status, headers and what JSON says, or text."""
  connection = http.client.HTTPConnection('127.0.0.1', port)
  with contextlib.closing(connection):
    names = {k.replace('_', '-'): v for k, v in headers.items()}
    connection.request(
      method or ('GET' if data is None else 'POST'), path, data, names
    )
    response = connection.getresponse()
    body = response.read().decode()
  if response.headers.get_content_type() == 'application/json':
    body = json.loads(body)
  return response.status, response.headers, body


def predict(port, data=b'', **query):
  status, _, body = ask(
    port, '/api/predict?' + urllib.parse.urlencode(query), data
  )
  return status, body


@pytest.mark.slow
@pytest.mark.parametrize('name', ['small', 'pooled'])
def test_answers_are_those_of_the_checkpoint(port, checkpoints, name):
  """Classes, and maps by each way to fuse the heads."""
  checkpoint = checkpoints[name]
  view = View(checkpoint.image_size, checkpoint.preprocessing)
  sent = {x: KINDS[x] for x in ('JPEG turned 6', 'PNG with alpha', 'BMP')}
  images = np.stack([see(x, view).pixels_HWC for x in sent.values()])
  layers = Layers(
    checkpoint.model, checkpoint.params, checkpoint.normalize(images)
  )
  maps = {f: np.asarray(rollout(layers, f)) for f in ('mean', 'min', 'max')}
  wanted_BC = jax.nn.softmax(checkpoint.logits(images))
  for i, (kind, data) in enumerate(sent.items()):
    start = time.perf_counter()
    status, first = predict(port, data, model=name, top=7)
    took = time.perf_counter() - start
    assert status == 200, (kind, first)
    assert first['model'] == name
    assert first['box'] == pytest.approx([*see(data, view).box])
    seconds = first['seconds']
    assert min(seconds.values()) >= 0 < seconds['model']
    assert sum(seconds.values()) < took + 1e-3
    assert seconds == {k: round(x, 4) for k, x in seconds.items()}
    got = {x['name']: x['probability'] for x in first['classes']}
    want = dict(zip(checkpoint.class_names, wanted_BC[i].tolist(), strict=True))
    assert got == pytest.approx(want, abs=TOLERANCE), kind
    assert [x['name'] for x in first['classes']] == sorted(
      got, key=lambda x: -got[x]
    )
    for fusion, want in maps.items():
      _, again = predict(port, model=name, image=first['image'], fusion=fusion)
      values = np.array(again['map']['values'])
      np.testing.assert_allclose(values, want[i], atol=TOLERANCE)


@pytest.mark.slow
def test_settings_change_the_map(port):
  _, first = predict(port, KINDS['BMP'], discard=0)
  seen = [first['map']['values']]
  for query in (
    {'discard': 0.6},
    {'layer': 0},
    {'layer': 2},
    {'fusion': 'max'},
  ):
    _, found = predict(port, image=first['image'], **query)
    assert found['classes'] == first['classes']
    assert found['seconds']['decode'] == 0
    assert np.max(found['map']['values']) == 1
    assert found['map'] == found['map'] | query
    assert found['map']['values'] not in seen
    seen.append(found['map']['values'])
  _, without = predict(port, image=first['image'], map=0, top=2)
  assert without['map'] is None
  assert without['classes'] == first['classes'][:2]


@pytest.mark.edge
def test_unknown_parameters_are_said(port):
  status, _, body = ask(port, '/api/predict?colour=red', KINDS['BMP'])
  assert status == 400
  assert 'parameters are model, image, top' in body['error']


def test_what_is_around_it(port):
  status, headers, page = ask(port, '/')
  assert status == 200 and '<h1>' in page
  policy = headers['Content-Security-Policy']
  assert "default-src 'none'" in policy and 'unsafe' not in policy
  assert policy.count("'sha256-") == 2
  assert not re.search(r'(src|href)="(https?:)?//|style="| on\w+="', page)
  assert ask(port, '/healthz')[2] == {'status': 'ok'}
  models = {x['name']: x for x in ask(port, '/api/models')[2]['models']}
  assert models['small']['image_size'] == [32, 48]
  assert models['small']['grid'] == [4, 6]
  assert models['small']['dtype'] == 'float32'
  assert not models['small']['explains_classes']
  api = ask(port, '/openapi.json')[2]
  for path, methods in api['paths'].items():
    (method,) = methods
    assert ask(port, path, method=method.upper())[0] not in (404, 405)
  status, headers, _ = ask(port, '/api/predict', method='DELETE')
  assert (status, headers['Allow']) == (405, 'POST')
  for path in ('/models/small.float32.onnx', '/../serve.py', '/%2e%2e/etc'):
    status, headers, body = ask(port, path)
    assert status == 404 and 'openapi.json' in body['error']
    assert headers['X-Content-Type-Options'] == 'nosniff'
  # No redirect, which would lead to whatever host a request names.
  assert ask(port, '/api/predict/', b'', Host='localhost.x')[0] == 404


def test_an_answer_is_what_the_description_says(port):
  """Every part of it, of the types that are written there."""
  paths = ask(port, '/openapi.json')[2]['paths']
  answer = paths['/api/predict']['post']['responses']['200']
  schema = answer['content']['application/json']['schema']
  _, found = predict(port, KINDS['BMP'], top=2)
  assert schema['type'] == 'object'
  assert set(schema['properties']) == set(found)
  jsonschema = pytest.importorskip('jsonschema')
  validator = jsonschema.Draft202012Validator(schema)
  validator.validate(found)
  objects = schema['properties']['objects']['items']['properties']
  thing = found['classes'][0] | {'box': [0.25, 0, 1, 0.5]}
  assert set(objects) == set(thing)
  # Of a model that finds objects, which has no map.
  validator.validate(found | {'classes': [], 'objects': [thing], 'map': None})
  (named,) = {frozenset(x) for x in found['classes']}
  items = schema['properties']['classes']['items']
  assert named == set(items['properties'])
  assert set(found['seconds']) == set(
    schema['properties']['seconds']['properties']
  )


def test_others_pages_and_names_are_not_answered(port):
  data = KINDS['BMP']
  assert ask(port, '/api/predict', data, Sec_Fetch_Site='cross-site')[0] == 403
  assert ask(port, '/api/predict', data, Host='evil.example')[0] == 403
  assert ask(port, '/api/predict', data, Host=f'localhost:{port}')[0] == 200


def test_the_token_is_asked_for(folder):
  with running(folder, f'--token={TOKEN}', '--dtype=int8') as (port, _):
    data = KINDS['BMP']
    for wrong in ({}, {'Authorization': f'Bearer {TOKEN[:-1]}'}):
      for path in ('/api/predict', '/api/models'):
        sent = data if 'predict' in path else None
        status, headers, _ = ask(port, path, sent, **wrong)
        assert (status, headers['WWW-Authenticate']) == (401, 'Bearer')
    # What is open to all does not name a model.
    assert 'small' not in json.dumps(ask(port, '/openapi.json')[2])
    right = {'Authorization': f'Bearer {TOKEN}'}
    assert ask(port, '/api/predict', data, **right)[0] == 200
    assert ask(port, '/healthz')[0] == ask(port, '/')[0] == 200
    models = ask(port, '/api/models', **right)[2]['models']
    assert [x['dtype'] for x in models] == ['float32', 'int8']


@pytest.mark.edge
def test_the_folder_is_whole_or_not_there(tmp_path):
  headless = checkpoint_of(num_classes=0)
  with pytest.raises(ValueError, match='has no head, so it cannot predict'):
    board.write(headless, str(tmp_path / 'board'), 'float32')
  assert list(tmp_path.iterdir()) == []
  with pytest.raises(FileExistsError):
    board.write(headless, str(tmp_path), 'float32')


@pytest.mark.parametrize(
  ('path', 'name'),
  {
    'gs://bucket/l16/checkpoints/9': 'l16',
    'a b/ü.x.safetensors': 'ü_x',
    # In the workdir itself, and of a name that says nothing.
    'checkpoints/300': '300',
    'runs/.npz': 'model',
    'hub/models--google--vit-base/snapshots/3f49326eb0': 'vit-base',
  }.items(),
)
def test_names(path, name):
  assert board.name_of(path) == name


@pytest.mark.edge
def test_a_folder_without_models_says_so(tmp_path):
  script = tmp_path / 'serve.py'
  script.write_text(board._START)
  result = subprocess.run(
    [sys.executable, script],
    capture_output=True,
    text=True,
    env=os.environ | {'PYTHONPATH': os.fspath(ROOT)},
  )
  assert result.returncode == 2
  assert result.stderr == (
    f'error: {tmp_path}/models has no models. Write the folder again with '
    'python -m vit_jax.convert CHECKPOINT FOLDER --to=board.\n'
  )


@pytest.mark.slow
def test_objects_are_those_of_predict(tmp_path):
  """A board's, on images that do not fill what the model sees."""
  checkpoint = dataclasses.replace(
    random_checkpoint(None, (48, 48), **DETR), path='/some/detr'
  )
  board.write(checkpoint, str(tmp_path / 'board'), 'float32')
  detector = detections.Detector(checkpoint, 0.0)
  with running(tmp_path / 'board') as (port, _):
    (model,) = ask(port, '/api/models')[2]['models']
    assert model['finds_objects'] and model['classes'] == 7
    assert (model['layers'], model['grid']) == (0, None)
    for kind in ('JPEG of 70 x 91', 'JPEG turned 6', 'PNG with alpha'):
      path = tmp_path / 'image'
      seen = see(KINDS[kind], View((48, 48), Preprocessing(), True))
      shown_HWC = seen.pixels_HWC[: seen.size[0], : seen.size[1]]
      Image.fromarray(shown_HWC).save(path, 'PNG')
      shown_HWC, want = detector(str(path))
      height, width = shown_HWC.shape[:2]
      status, found = predict(port, KINDS[kind], threshold=0)
      assert (status, found['classes'], found['map']) == (200, [], None)
      got = found['objects']
      np.testing.assert_allclose(
        [x['box'] for x in got],
        want.boxes_N4 / [width, height, width, height],
        atol=TOLERANCE,
      )
      scores = [x['probability'] for x in got]
      np.testing.assert_allclose(scores, want.scores_N, atol=TOLERANCE)
      assert [x['index'] for x in got] == want.labels_N.tolist()
      assert [x['name'] for x in got] == [
        checkpoint.class_names[c] for c in want.labels_N
      ]
      least = scores[1]
      _, likely = predict(port, image=found['image'], threshold=least)
      assert likely['objects'] == got[:2]


def test_probabilities_of_several_classes_are_sigmoids(tmp_path):
  checkpoint = dataclasses.replace(checkpoint_of(depth=1), loss='sigmoid')
  board.write_model(checkpoint, tmp_path, 'x', 'float32')
  path = tmp_path / 'x.float32.onnx'
  images = checkpoint.transform().image(KINDS['BMP'], 'BMP')[None]
  served = served_model.ServedModel(path, 1)
  answer = served.run(Seen(images[0], (0, 0, 1, 1), (32, 48)))
  want_C = jax.nn.sigmoid(checkpoint.logits(images))[0]
  np.testing.assert_allclose(answer.probability_C, want_C, atol=TOLERANCE)


def test_classes_of_one_name_are_told_apart(tmp_path):
  """As ImageNet's two cranes, by what `predict` calls them."""
  names = ('crane', 'crow', 'crane', *'abcd')
  checkpoint = dataclasses.replace(checkpoint_of(depth=1), class_names=names)
  board.write_model(checkpoint, tmp_path, 'x', 'float32')
  served = served_model.ServedModel(tmp_path / 'x.float32.onnx', 1)
  assert served.class_names == [checkpoint.class_name(c) for c in range(7)]
  assert served.class_names[:3] == ['crane (0)', 'crow', 'crane (2)']
