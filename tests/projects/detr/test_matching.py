"""Matching against scipy's, and against the original's on the golden file."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from tests.projects.detr.conftest import objects_of
from vit_jax.projects.detr import set_losses
from vit_jax.training import sharding

match = jax.jit(set_losses.match)


def test_matches_of_the_original(golden):
  objects = objects_of(golden)
  labels_BM, found = objects['labels'], (golden['logits'], golden['boxes'])
  found_BQM = set_losses.costs(
    *(x[-1] for x in found), labels_BM, objects['boxes'], 5.0, 2.0
  )
  query_BM = np.asarray(match(found_BQM, jnp.asarray(labels_BM >= 0)))
  for i in range(3):
    query_N, object_N = golden[f'match{i}']
    np.testing.assert_array_equal(query_BM[i][object_N], query_N)


def test_costs_are_those_of_the_formula():
  """Of a query that has all of an image, and boxes in its middle and aside."""
  p_C = np.array([0.5, 0.3, 0.2])
  found = set_losses.costs(
    jnp.log(p_C)[None, None],
    jnp.array([[[0.5, 0.5, 1.0, 1.0]]]),
    jnp.array([[0, 1, -1]]),
    jnp.array([[[0.5, 0.5, 0.2, 0.2], [1.5, 0.5, 1.0, 1.0], [0.0] * 4]]),
    5.0,
    2.0,
  )
  # One is 1.6 away and has .04 of its area; two side by side have no more in
  # common than they leave out of what is around them.
  want = [5 * 1.6 - 0.5 - 2 * 0.04, 5 * 1.0 - 0.3 - 2 * 0.0]
  np.testing.assert_allclose(found[0, 0, :2], want, rtol=1e-5)


def test_costs_are_those_of_scipy():
  """Rounded costs have ties."""
  rng = np.random.default_rng(0)
  costs_BQM = np.round(rng.normal(size=(2000, 9, 7))).astype(np.float32)
  is_object_BM = np.arange(7) < rng.integers(0, 8, 2000)[:, None]
  query_BM = np.asarray(match(costs_BQM, is_object_BM))
  for costs_QM, query_M, is_object_M in zip(
    costs_BQM, query_BM, is_object_BM, strict=True
  ):
    costs_QN, query_N = costs_QM[:, is_object_M], query_M[is_object_M]
    rows, columns = scipy.optimize.linear_sum_assignment(costs_QN)
    assert len(set(query_N)) == len(query_N)
    # Of at most seven costs of about one; seen are 4e-7.
    np.testing.assert_allclose(
      costs_QN[query_N, np.arange(len(query_N))].sum(),
      costs_QN[rows, columns].sum(),
      atol=1e-5,
    )


@pytest.mark.parametrize('most', [0, 8, 9, 17])
def test_many_rows_are_matched_up_to_the_last_object(most):
  rng = np.random.default_rng(most)
  costs_BQM = rng.normal(size=(3, 20, 20)).astype(np.float32)
  counts_B = np.array([most, most // 2, 0])
  query_BM = np.asarray(match(costs_BQM, np.arange(20) < counts_B[:, None]))
  for costs_QM, query_M, n in zip(costs_BQM, query_BM, counts_B, strict=True):
    _, wanted_N = scipy.optimize.linear_sum_assignment(costs_QM[:, :n].T)
    np.testing.assert_array_equal(query_M[:n], wanted_N)
    assert not query_M[n:].any()


@pytest.mark.slow
def test_devices_search_by_themselves():
  """Else they would all go on until the last one has found its own."""
  mesh = sharding.make_mesh({'data': 4, 'fsdp': 2, 'tensor': 1})
  rows = jax.sharding.NamedSharding(mesh, sharding.BATCH)
  rng = np.random.default_rng(0)
  costs_BQM = rng.normal(size=(16, 20, 17)).astype(np.float32)
  # So that devices look at other numbers of objects.
  is_object_BM = np.arange(17) < np.arange(16)[:, None]
  given = jax.device_put((costs_BQM, is_object_BM), rows)

  def match(*args):
    with sharding.activations(mesh):
      return set_losses.match(*args)

  compiled = jax.jit(match).lower(*given).compile()
  assert not re.search('all-(reduce|gather)|permute', compiled.as_text())
  want_BM = set_losses.match(costs_BQM, is_object_BM)
  np.testing.assert_array_equal(
    np.where(is_object_BM, compiled(*given), -1),
    np.where(is_object_BM, want_BM, -1),
  )


def test_generalized_iou_of_boxes_drawn_by_hand():
  """The same, one inside, side by side, apart, and one across the other."""
  a_N4 = jnp.array([[0.0, 0.0, 1.0, 1.0]] * 4 + [[0.0, 1.0, 3.0, 2.0]])
  b_N4 = jnp.array(
    [
      [0.0, 0.0, 1.0, 1.0],
      [0.4, 0.4, 0.6, 0.6],
      [1.0, 0.0, 2.0, 1.0],
      [2.0, 2.0, 3.0, 3.0],
      [1.0, 0.0, 2.0, 3.0],
    ]
  )
  wanted_N = [1, 0.04, 0, -7 / 9, 1 / 5 - 4 / 9]
  got_N = set_losses.generalized_iou(a_N4, b_N4)
  np.testing.assert_allclose(got_N, wanted_N, atol=1e-6)


@pytest.mark.parametrize('size', [0.0, 1e-20])
def test_boxes_without_area_have_finite_gradients(size):
  def iou(box_4):
    return set_losses.generalized_iou(
      set_losses.corners(box_4),
      set_losses.corners(jnp.array([0.5, 0.5, size, size])),
    )

  for box in ([0.5, 0.5, size, size], [0.1, 0.2, size, 0.3], [0.5] * 4):
    value, gradient_4 = jax.value_and_grad(iou)(jnp.array(box))
    assert -1 <= value <= 1
    assert np.isfinite(gradient_4).all()
