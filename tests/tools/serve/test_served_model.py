"""Answers of models from outputs made by hand, and what is told of them."""

import types

import numpy as np
import pytest

from vit_jax.data.preprocessing import Preprocessing
from vit_jax.tools.serve.decoder import Seen

served_model, server_lib = (
  pytest.importorskip(
    f'vit_jax.tools.serve.{name}', reason='needs the extra `serve`'
  )
  for name in ('served_model', 'server')
)


class Session:
  """A file with outputs for an image, instead of onnxruntime's."""

  def __init__(self, outputs, inputs):
    self._outputs = outputs
    self._inputs = [
      types.SimpleNamespace(name=name, shape=('batch', *shape))
      for name, shape in inputs.items()
    ]
    self._saved = {
      'mean': '[0.5, 0.25, 0]',
      'std': '[0.5, 1, 2]',
      'resize_small': '40',
      'interpolation': 'bicubic',
      'class_names': '[]',
      'loss': 'softmax',
      'grid': '[1, 2]',
      'description': 'a model',
    }

  def __call__(self, path, options, providers):
    self.options = options
    return self

  def get_inputs(self):
    return self._inputs

  def get_outputs(self):
    return [
      types.SimpleNamespace(name=name, shape=('batch', *x.shape[1:]))
      for name, x in self._outputs.items()
    ]

  def get_modelmeta(self):
    return types.SimpleNamespace(custom_metadata_map=self._saved)

  def run(self, names, given):
    self.given = given
    return [self._outputs[name] for name in names]


def opened(session, tmp_path, monkeypatch):
  """Returns the session's model; a run takes 3 s."""
  now = iter([10.0, 13.0])
  clock = types.SimpleNamespace(perf_counter=now.__next__)
  monkeypatch.setattr(served_model, 'time', clock)
  monkeypatch.setattr(served_model.onnxruntime, 'InferenceSession', session)
  path = tmp_path / 'a.b.float32.onnx'
  path.touch()
  return served_model.ServedModel(path, 3)


def test_the_outputs_become_an_answer(tmp_path, monkeypatch):
  rng = np.random.default_rng(0)
  outputs = {
    'read': rng.random((1, 3)),
    'logits': np.log(np.float32([[1, 2, 1, 4]])),
  }
  for name in ('mean', 'min', 'max'):
    outputs[f'attention_{name}'] = rng.random((1, 5, 3, 3))
  session = Session(outputs, {'images': (4, 6, 3)})
  # A class named after a folder with odd bytes, as Python decodes them.
  session._saved['class_names'] = r'["a", "b\udce9", "c", "\u00fc"]'
  model = opened(session, tmp_path, monkeypatch)
  assert (model.name, model.about['dtype']) == ('a.b', 'float32')
  given = Preprocessing(40, (0.5, 0.25, 0), (0.5, 1, 2), 'bicubic')
  assert model.view == ((4, 6), given, False)
  assert (model.layers, model.grid) == (5, (1, 2))
  assert model.class_names == ['a', 'b?', 'c', 'ü']
  assert session.options.intra_op_num_threads == 3
  assert session.options.enable_cpu_mem_arena is False
  white = Seen(np.full((4, 6, 3), 255, np.uint8), (0, 0, 1, 1), (4, 6))
  answer = model.run(white)
  (images_BHWC,) = session.given.values()
  assert images_BHWC.dtype == np.float32
  np.testing.assert_array_equal(images_BHWC[:, 3, 5], [[1, 0.75, 0.5]])
  assert answer.seconds == 3 and answer.boxes_Q4 is None
  want_C = [0.125, 0.25, 0.125, 0.5]
  np.testing.assert_allclose(answer.probability_C, want_C, rtol=1e-6)
  np.testing.assert_array_equal(answer.read_L, outputs['read'][0])
  assert [*answer.fused] == ['mean', 'min', 'max']
  for name, x_XLL in answer.fused.items():
    np.testing.assert_array_equal(x_XLL, outputs[f'attention_{name}'][0])


def test_objects_are_the_last_but_one_class_and_in_the_image(
  tmp_path, monkeypatch
):
  """DETR's boxes are centres and sizes, and may reach beyond the image."""
  boxes_BQ4 = np.array([[[0.1, 0.5, 0.4, 0.2], [0.9, 0.5, 0.4, 1.2]]])
  outputs = {
    'logits': np.log(np.float32([[[1, 2, 1], [3, 1, 4]]])),
    'boxes': boxes_BQ4.astype(np.float32),
  }
  session = Session(outputs, {'images': (4, 6, 3), 'sizes': (2,)})
  model = opened(session, tmp_path, monkeypatch)
  assert model.finds_objects and model.view.keeps_shape
  assert model.class_names == ['0', '1']
  # A grid is one of patches: without attention there is no map of them.
  assert (model.layers, model.grid) == (0, None)
  black = Seen(np.zeros((4, 6, 3), np.uint8), (0, 0, 1, 1), (4, 5))
  answer = model.run(black)
  assert session.given['sizes'].dtype == np.int32
  assert session.given['sizes'].tolist() == [[4, 5]]
  want_QC = [[0.25, 0.5], [0.375, 0.125]]
  np.testing.assert_allclose(answer.probability_C, want_QC, rtol=1e-6)
  want_Q4 = [[0, 0.4, 0.3, 0.6], [0.7, 0, 1, 1]]
  np.testing.assert_allclose(answer.boxes_Q4, want_Q4, rtol=1e-6)
  assert (answer.fused, answer.read_L) == ({}, None)


def test_many_equals_keep_their_order():
  """Which of a few they do however they are sorted."""
  model = types.SimpleNamespace(class_names=[str(c) for c in range(100)])
  want = [*range(1, 100, 2), *range(0, 100, 2)]
  found = server_lib._likeliest(np.tile([0.001, 0.019], 50), model, 100)
  assert [x['index'] for x in found] == want
  answer = served_model.Answer(
    np.tile([[0.5, 0.25], [0.25, 0.75]], (50, 1)),
    *(np.arange(400.0).reshape(100, 4), {}, None, 0),
  )
  found = server_lib._objects(answer, model, 0)
  assert [x['box'][0] for x in found] == [4 * q for q in want]


def test_objects_are_those_from_the_threshold_on():
  model = types.SimpleNamespace(class_names=('cat', 'dog', 'cow'))
  boxes_Q4 = np.arange(1, 17).reshape(4, 4) / 18 + 1e-7
  answer = served_model.Answer(
    np.array([[0.2, 0.5, 0], [0.9, 0, 0], [0, 0, 0.5], [0.4, 0.3, 0.2]]),
    *(boxes_Q4, {}, None, 0),
  )
  found = server_lib._objects(answer, model, 0.5)
  assert [(x['name'], x['probability'], x['box']) for x in found] == [
    ('cat', 0.9, [0.27778, 0.33333, 0.38889, 0.44444]),
    ('dog', 0.5, [0.05556, 0.11111, 0.16667, 0.22222]),
    ('cow', 0.5, [0.5, 0.55556, 0.61111, 0.66667]),
  ]
  assert server_lib._objects(answer, model, 0.95) == []
  assert server_lib._objects(answer._replace(boxes_Q4=None), model, 0) is None
