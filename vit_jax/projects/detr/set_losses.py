"""Box utilities, bipartite matching and set losses (2005.12872).

Boxes are (centre x, centre y, width, height), or corners (x0, y0, x1, y1).
Each loss is a sum over the queries or objects of an image. In training, the
caller divides by counts of the batch, so microbatches do not change the loss.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import optax.assignment

from vit_jax.models.model import Batch
from vit_jax.training import sharding

# Replaces smaller areas in divisions, so that boxes without area have finite
# gradients. Gradients divide by the square of this constant, which float32 can
# represent.
_LEAST_AREA = 1e-12


def corners(boxes_X4: jax.Array) -> jax.Array:
  """Converts (cx, cy, w, h) to (x0, y0, x1, y1)."""
  centre_X2, size_X2 = jnp.split(boxes_X4, 2, axis=-1)
  return jnp.concatenate(
    [centre_X2 - size_X2 / 2, centre_X2 + size_X2 / 2], axis=-1
  )


def generalized_iou(a_X4: jax.Array, b_X4: jax.Array) -> jax.Array:
  """Returns the GIoU of pairs of boxes, in [-1, 1]; boxes are corners.

  GIoU is the IoU minus the share of the smallest enclosing box that neither box
  covers (1902.09630, algorithm 1). Leading dimensions broadcast. Boxes without
  area give finite values and gradients.
  """

  def area(low_X2: jax.Array, high_X2: jax.Array) -> jax.Array:
    return jnp.prod(jnp.maximum(high_X2 - low_X2, 0), axis=-1)

  a0_X2, a1_X2 = jnp.split(a_X4, 2, axis=-1)
  b0_X2, b1_X2 = jnp.split(b_X4, 2, axis=-1)
  both_X = area(jnp.maximum(a0_X2, b0_X2), jnp.minimum(a1_X2, b1_X2))
  around_X = area(jnp.minimum(a0_X2, b0_X2), jnp.maximum(a1_X2, b1_X2))
  either_X = area(a0_X2, a1_X2) + area(b0_X2, b1_X2) - both_X
  either_X = jnp.maximum(either_X, _LEAST_AREA)
  around_X = jnp.maximum(around_X, _LEAST_AREA)
  return both_X / either_X - (around_X - either_X) / around_X


def likeliest(logits_BQC: jax.Array, aux: Batch) -> Batch:
  """Finds the likeliest class of each query among all but "no object".

  The arguments are the outputs of `DETR`. Returns probabilities `scores` BQ,
  classes `labels` BQ, corners `boxes` BQ4 and, with masks, `mask_logits` BQhw.
  """
  p_BQC = jax.nn.softmax(logits_BQC.astype(jnp.float32))[..., :-1]
  found = {
    'scores': jnp.max(p_BQC, axis=-1),
    'labels': jnp.argmax(p_BQC, axis=-1),
    'boxes': corners(aux['boxes'][-1]),
  }
  if 'mask_logits' in aux:
    found['mask_logits'] = aux['mask_logits']
  return found


# Replaces costs that are not finite. With them, the search may give one query
# to two objects. They also make the loss not finite, and the training loop then
# stops.
_WORST = 1e6


def costs(
  logits_BQC: jax.Array,
  boxes_BQ4: jax.Array,
  labels_BM: jax.Array,
  targets_BM4: jax.Array,
  l1: float,
  giou: float,
) -> jax.Array:
  """Returns the matching cost of each query and object, float32 BQM.

  The cost is -p(class) + l1 |difference of the boxes| - giou GIoU, with the
  probability p and not its logarithm, as in section 3.1. Boxes are
  (cx, cy, w, h), and labels are -1 in empty rows.
  """
  p_BQC = jax.nn.softmax(logits_BQC.astype(jnp.float32))
  p_BQM = jnp.take_along_axis(p_BQC, jnp.maximum(labels_BM, 0)[:, None], axis=2)
  a_BQ14, b_B1M4 = boxes_BQ4[:, :, None], targets_BM4[:, None]
  distance_BQM = jnp.sum(jnp.abs(a_BQ14 - b_B1M4), axis=-1)
  iou_BQM = generalized_iou(corners(a_BQ14), corners(b_B1M4))
  return l1 * distance_BQM - p_BQM - giou * iou_BQM


def match(costs_BQM: jax.Array, is_object_BM: jax.Array) -> jax.Array:
  """Returns the query of each object, int32 BM.

  The assignment has the lowest total cost over the objects, and no two objects
  share a query (equation 1). M is the number of rows for objects, at most Q.
  Rows without an object must come last; they get query 0. Costs must be below
  1e6.

  On each device, the search covers as many of the M rows as the fullest image
  has objects, rounded up to 8, 16, 32 and so on.
  """
  _, Q, M = costs_BQM.shape
  costs_BQM = jnp.where(jnp.isfinite(costs_BQM), costs_BQM, _WORST)

  def first(m: int, costs_BQM: jax.Array, is_object_BM: jax.Array) -> jax.Array:
    is_object_B1m = is_object_BM[:, None, :m]
    # Each empty row gets an extra query at cost 0, so that the search assigns
    # it at once. With equal costs for all queries, each empty row would first
    # try the queries that earlier empty rows have taken.
    is_own_Bmm = jnp.eye(m, dtype=bool)[None] & ~is_object_B1m
    costs_BXm = jnp.concatenate(
      [
        jnp.where(is_object_B1m, costs_BQM[:, :, :m], 2 * _WORST),
        jnp.where(is_own_Bmm, 0.0, 2 * _WORST),
      ],
      axis=1,
    )
    found_Bm = jax.vmap(_query_of_each)(costs_BXm)
    return jnp.pad(jnp.where(found_Bm < Q, found_Bm, 0), ((0, 0), (0, M - m)))

  sizes = [*(2**i for i in range(3, M.bit_length()) if 2**i < M), M]

  def search(costs_BQM: jax.Array, is_object_BM: jax.Array) -> jax.Array:
    most = jnp.max(jnp.sum(is_object_BM, axis=1))
    return jax.lax.switch(
      jnp.searchsorted(jnp.array(sizes), most),
      [functools.partial(first, m) for m in sizes],
      costs_BQM,
      is_object_BM,
    )

  return sharding.on_each_device(search)(costs_BQM, is_object_BM)


def _query_of_each(costs_QM: jax.Array) -> jax.Array:
  query_M, object_M = optax.assignment.hungarian_algorithm(costs_QM)
  return jnp.zeros_like(object_M).at[object_M].set(query_M)


def box_losses(
  logits_BQC: jax.Array,
  boxes_BQ4: jax.Array,
  query_BM: jax.Array,
  objects: Batch,
  no_object: float,
) -> Batch:
  """Returns sums of class and box losses for each image, float32 B.

  `objects` has `labels` int32 BM, -1 in empty rows, and `boxes` float32 BM4.
  `no_object` is the weight of the cross-entropy of queries without an object.

  Returns:
    cross_entropy: weighted, in nats, summed over all queries.
    l1: L1 distances of boxes, summed over objects.
    giou: 1 - GIoU of boxes, summed over objects.
    class_accuracy: number of objects whose query has the correct class.
  """
  _, Q, C = logits_BQC.shape
  labels_BM, targets_BM4 = objects['labels'], objects['boxes']
  is_object_BM = labels_BM >= 0

  def at(x_BQX: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BQX, query_BM[..., None], axis=1)

  def total(x_BM: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(is_object_BM, x_BM, 0.0), axis=1)

  # Empty rows get the index Q, which mode='drop' ignores.
  place_BM = jnp.where(is_object_BM, query_BM, Q)
  wanted_BQ = jax.vmap(
    lambda place_M, labels_M: (
      jnp.full(Q, C - 1).at[place_M].set(labels_M, mode='drop')
    )
  )(place_BM, labels_BM)
  nats_BQ = optax.softmax_cross_entropy_with_integer_labels(
    logits_BQC.astype(jnp.float32), wanted_BQ
  )
  weight_BQ = jnp.where(wanted_BQ == C - 1, no_object, 1.0)
  found_BM4 = at(boxes_BQ4.astype(jnp.float32))
  iou_BM = generalized_iou(corners(found_BM4), corners(targets_BM4))
  return {
    'cross_entropy': jnp.sum(weight_BQ * nats_BQ, axis=1),
    'l1': total(jnp.sum(jnp.abs(found_BM4 - targets_BM4), axis=-1)),
    'giou': total(1 - iou_BM),
    'class_accuracy': total(jnp.argmax(at(logits_BQC), axis=-1) == labels_BM),
  }


def mask_losses(
  mask_logits_BQhw: jax.Array, query_BM: jax.Array, objects: Batch
) -> Batch:
  """Returns mask losses, summed over the objects of each image, float32 B.

  `objects` has `labels`, see `box_losses`, and `masks`, bool BMHW. Logits are
  resized to (H, W).

  Returns:
    mask: focal loss with alpha .25 and gamma 2 (1708.02002), averaged over
      pixels.
    dice: 1 - (2 |a b| + 1) / (|a| + |b| + 1), where a are the predicted
      probabilities, b is the mask, and |x| is the sum over pixels.
  """
  labels_BM, masks_BMHW = objects['labels'], objects['masks']
  B, M, H, W = masks_BMHW.shape
  logits_BMhw = jnp.take_along_axis(
    mask_logits_BQhw.astype(jnp.float32), query_BM[:, :, None, None], axis=1
  )
  logits_BMX = jax.image.resize(
    logits_BMhw, (B, M, H, W), 'linear', antialias=False
  ).reshape(B, M, -1)
  masks_BMX = masks_BMHW.reshape(B, M, -1).astype(jnp.float32)
  focal_BMX = optax.sigmoid_focal_loss(
    logits_BMX, masks_BMX, alpha=0.25, gamma=2.0
  )
  p_BMX = jax.nn.sigmoid(logits_BMX)
  both_BM = jnp.sum(p_BMX * masks_BMX, axis=-1)
  sizes_BM = jnp.sum(p_BMX + masks_BMX, axis=-1)
  total = functools.partial(jnp.sum, axis=1, where=labels_BM >= 0)
  return {
    'mask': total(jnp.mean(focal_BMX, axis=-1)),
    'dice': total(1 - (2 * both_BM + 1) / (sizes_BM + 1)),
  }
