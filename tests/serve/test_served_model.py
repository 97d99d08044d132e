"""Answers of models from outputs made by hand, and what is told of them."""

import types

import numpy as np
import pytest

served_model, server_lib = (
  pytest.importorskip(f'vit_jax.serve.{name}', reason='needs the extra `serve`')
  for name in ('served_model', 'server')
)


def test_an_answer_takes_what_its_arrays_take():
  answer = served_model.Answer(
    np.zeros(3, np.float64),
    None,
    {'mean': np.zeros((2, 5, 5), np.float32), 'max': np.zeros(7, np.float16)},
    np.zeros(100),
    0.5,
  )
  assert answer.nbytes == 3 * 8 + 50 * 4 + 7 * 2
  assert (
    answer._replace(boxes_Q4=np.zeros((6, 4))).nbytes == answer.nbytes + 192
  )


def test_probabilities_of_large_logits_are_finite():
  x_BC = np.float32([[-1e4, 0, 3], [1e4, 1e4, 0]])
  softmax_BC = served_model._probabilities(x_BC, 'softmax')
  odds = np.exp(3.0)
  want_BC = [[0, 1 / (1 + odds), odds / (1 + odds)], [0.5, 0.5, 0]]
  np.testing.assert_allclose(softmax_BC, want_BC, rtol=1e-12)
  sigmoid_BC = served_model._probabilities(x_BC, 'sigmoid')
  want_BC = [[0, 0.5, odds / (1 + odds)], [1, 1, 0.5]]
  np.testing.assert_allclose(sigmoid_BC, want_BC, rtol=1e-12)
  assert softmax_BC.dtype == sigmoid_BC.dtype == np.float64


def test_a_map_of_nothing_is_black():
  found = served_model.rollout(
    np.zeros((2, 7, 7), np.float32), np.zeros(7, np.float32), (2, 3)
  )
  np.testing.assert_array_equal(found, np.zeros((2, 3)))


def test_the_likeliest_come_first_and_equals_in_their_order():
  model = types.SimpleNamespace(class_names=('cat', 'dog', 'cow', 'hen'))
  found = server_lib._likeliest(np.array([0.1, 0.4, 0.4, 0.1]), model, 3)
  assert found == [
    {'index': 1, 'name': 'dog', 'probability': 0.4},
    {'index': 2, 'name': 'cow', 'probability': 0.4},
    {'index': 0, 'name': 'cat', 'probability': 0.1},
  ]


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
