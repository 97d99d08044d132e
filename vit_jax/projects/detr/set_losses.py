"""Losses of a set of predicted boxes, each matched with one object or none.

Sums over an image each, so that whoever calls can divide by what a whole batch
has, however it is split.
"""

import jax
import jax.numpy as jnp
import optax

from vit_jax.models.model import Batch
from vit_jax.projects.detr import boxes


def of_boxes(
  logits_BQC: jax.Array,
  boxes_BQ4: jax.Array,
  query_BM: jax.Array,
  objects: Batch,
  no_object: float,
) -> Batch:
  """Returns the losses of matched queries, a sum over each image, float32 B.

  Args:
    logits_BQC: of C - 1 classes and of no object.
    boxes_BQ4: predicted (cx, cy, w, h).
    query_BM: the query of each object.
    objects: `labels` int32 BM, -1 for a row that is none, and their `boxes`
      float32 BM4.
    no_object: weight of the cross-entropy of queries without an object.

  Returns:
    'ce': weighted cross-entropies of all queries in nats; 'l1': differences of
    the boxes; 'giou': 1 - GIoU; 'hits': matched queries whose likeliest class
    is right.
  """
  _, Q, C = logits_BQC.shape
  labels_BM, targets_BM4 = objects['labels'], objects['boxes']
  is_object_BM = labels_BM >= 0

  def at(x_BQX: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BQX, query_BM[..., None], axis=1)

  def total(x_BM: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(is_object_BM, x_BM, 0.0), axis=1)

  # Rows that are none go behind the last query, where they are dropped.
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
  iou_BM = boxes.generalized_iou(
    boxes.corners(found_BM4), boxes.corners(targets_BM4)
  )
  return {
    'ce': jnp.sum(weight_BQ * nats_BQ, axis=1),
    'l1': total(jnp.sum(jnp.abs(found_BM4 - targets_BM4), axis=-1)),
    'giou': total(1 - iou_BM),
    'hits': total(jnp.argmax(at(logits_BQC), axis=-1) == labels_BM),
  }


def of_masks(
  mask_logits_BQhw: jax.Array, query_BM: jax.Array, objects: Batch
) -> Batch:
  """Returns the losses of matched masks, a sum over each image, float32 B.

  Args:
    mask_logits_BQhw: predicted, brought to the size of the objects' masks.
    query_BM: the query of each object.
    objects: `labels` int32 BM, -1 for a row that is none, and `masks` BMHW of 1
      and 0.

  Returns:
    'mask': focal losses with alpha .25 and gamma 2 (1708.02002), means over the
    pixels; 'dice': 1 - (2 |a b| + 1) / (|a| + |b| + 1).
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

  def total(x_BM: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(labels_BM >= 0, x_BM, 0.0), axis=1)

  return {
    'mask': total(jnp.mean(focal_BMX, axis=-1)),
    'dice': total(1 - (2 * both_BM + 1) / (sizes_BM + 1)),
  }
