"""Losses of sets where rows, pixels or areas are missing, and their dtypes.

test_objective.py compares them with the original.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.projects.detr.conftest import objects_of
from vit_jax.projects.detr import set_losses

box_losses = jax.jit(set_losses.box_losses)
mask_losses = jax.jit(set_losses.mask_losses)
NO_OBJECT = 0.1


@jax.jit
def matched(logits_BQC, boxes_BQ4, objects):
  costs_BQM = set_losses.costs(
    logits_BQC, boxes_BQ4, objects['labels'], objects['boxes'], 5.0, 2.0
  )
  return set_losses.match(costs_BQM, objects['labels'] >= 0)


def test_padding_is_no_object(golden):
  """Neither the number of rows nor what stands in them changes anything."""
  found = golden['logits'][-1], golden['boxes'][-1]

  def sums(objects):
    query_BM = matched(*found, objects)
    masks = mask_losses(golden['mask_logits'], query_BM, objects)
    return box_losses(*found, query_BM, objects, NO_OBJECT) | masks

  few, many = (objects_of(golden, rows) for rows in (4, 7))
  is_padding_BM = many['labels'] < 0
  many['boxes'][is_padding_BM] = 0.7
  many['masks'][is_padding_BM] = True
  for name, want_B in sums(few).items():
    np.testing.assert_allclose(sums(many)[name], want_B, rtol=1e-6)


def test_what_is_said_in_bfloat16_is_added_up_in_float32(golden):
  objects = objects_of(golden)
  query_BM = jnp.array([[0, 1, 2, 3, 4]] * 3)
  names = ('logits', 'boxes', 'mask_logits')
  half = [jnp.asarray(golden[name]).astype(jnp.bfloat16) for name in names]
  got, want = (
    box_losses(logits[-1], boxes[-1], query_BM, objects, NO_OBJECT)
    | mask_losses(masks, query_BM, objects)
    for logits, boxes, masks in (half, [x.astype(jnp.float32) for x in half])
  )
  for name, x_B in want.items():
    assert got[name].dtype == np.float32
    np.testing.assert_allclose(got[name], x_B, rtol=1e-5, err_msg=name)
  costs = [
    set_losses.costs(
      x[-1], golden['boxes'][-1], objects['labels'], objects['boxes'], 5.0, 2.0
    )
    for x in (half[0], half[0].astype(jnp.float32))
  ]
  np.testing.assert_allclose(*costs, rtol=1e-6)


def test_masks_coarser_than_what_is_said_of_them():
  """Each pixel is between the four in its middle, as PyTorch has it."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(1, 2, 8, 12)).astype(np.float32)
  coarse = logits.reshape(1, 2, 4, 2, 6, 2).mean((3, 5))
  objects = {
    'labels': jnp.array([[3, 0]]),
    'masks': jnp.asarray(rng.random((1, 2, 4, 6)) < 0.5),
  }
  query = jnp.array([[1, 0]])
  got, want = (
    mask_losses(jnp.asarray(x), query, objects) for x in (logits, coarse)
  )
  for name in ('mask', 'dice'):
    np.testing.assert_allclose(got[name], want[name], rtol=1e-5)


@pytest.mark.fast('no area')
@pytest.mark.parametrize('case', ['no objects', 'no area', 'all the same'])
def test_gradients_are_finite(golden, case):
  objects = objects_of(golden)
  if case == 'no objects':
    objects['labels'][:] = -1
  elif case == 'no area':
    objects['boxes'][..., 2:] = 0.0
    objects['masks'][:] = False
  else:
    objects['labels'][:], objects['boxes'][:] = 0, golden['boxes'][-1][0, 0]

  def loss(logits_BQC, boxes_BQ4, mask_logits_BQhw):
    query_BM = matched(logits_BQC, boxes_BQ4, objects)
    sums = set_losses.box_losses(
      logits_BQC, boxes_BQ4, query_BM, objects, NO_OBJECT
    ) | set_losses.mask_losses(mask_logits_BQhw, query_BM, objects)
    return sum(jnp.sum(x) for x in sums.values())

  # Some boxes predicted are none either.
  boxes_BQ4 = jnp.asarray(golden['boxes'][-1]).at[:, :3, 2:].set(0.0)
  value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(
    golden['logits'][-1], boxes_BQ4, golden['mask_logits']
  )
  assert np.isfinite(value)
  assert all(np.isfinite(x).all() for x in grads)
  assert np.any(grads[0])
