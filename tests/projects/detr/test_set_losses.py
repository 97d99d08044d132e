"""Losses of sets against those of the original, and where nothing is left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import ROOT
from vit_jax.projects.detr import set_losses

GOLDEN = ROOT / 'tests/golden/detr_losses.npz'
box_losses = jax.jit(set_losses.box_losses)
mask_losses = jax.jit(set_losses.mask_losses)
NO_OBJECT = 0.1


@pytest.fixture(scope='module')
def golden():
  with np.load(GOLDEN) as file:
    return dict(file)


def objects_of(golden, rows=5):
  """Returns labels, boxes and masks of three images, padded to M rows."""
  labels_BM = np.full((3, rows), -1, np.int32)
  boxes_BM4 = np.zeros((3, rows, 4), np.float32)
  masks_BMHW = np.zeros((3, rows, 40, 48), bool)
  for i in range(3):
    n = len(golden[f'target{i}/labels'])
    labels_BM[i, :n] = golden[f'target{i}/labels']
    boxes_BM4[i, :n] = golden[f'target{i}/boxes']
    masks_BMHW[i, :n] = golden[f'target{i}/masks']
  return {'labels': labels_BM, 'boxes': boxes_BM4, 'masks': masks_BMHW}


@jax.jit
def matched(logits_BQC, boxes_BQ4, objects):
  costs_BQM = set_losses.costs(
    logits_BQC, boxes_BQ4, objects['labels'], objects['boxes'], 5.0, 2.0
  )
  return set_losses.match(costs_BQM, objects['labels'] >= 0)


def test_losses_of_the_original(golden):
  objects = objects_of(golden)
  count = np.sum(objects['labels'] >= 0)
  total = 0.0
  for i, suffix in enumerate(['_0', '']):
    found = golden['logits'][i], golden['boxes'][i]
    query_BM = matched(*found, objects)
    sums = box_losses(*found, query_BM, objects, NO_OBJECT)
    queries = found[0].shape[0] * found[0].shape[1]
    got = {
      'loss_ce': sums['cross_entropy'].sum()
      / (NO_OBJECT * queries + (1 - NO_OBJECT) * count),
      'loss_bbox': sums['l1'].sum() / count,
      'loss_giou': sums['giou'].sum() / count,
    }
    total += got['loss_ce'] + 5 * got['loss_bbox'] + 2 * got['loss_giou']
    if not suffix:
      got['class_error'] = 100 * (1 - sums['class_accuracy'].sum() / count)
      sums = mask_losses(golden['mask_logits'], query_BM, objects)
      got['loss_mask'] = sums['mask'].sum() / count
      got['loss_dice'] = sums['dice'].sum() / count
      total += got['loss_mask'] + got['loss_dice']
    for name, value in got.items():
      np.testing.assert_allclose(
        value, golden[f'loss/{name}{suffix}'], rtol=1e-5, err_msg=name
      )
  np.testing.assert_allclose(total, golden['loss/total'], rtol=1e-5)


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
