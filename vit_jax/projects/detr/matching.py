"""Which query answers for which object: the matching of DETR (2005.12872).

Of an image with objects to be found, each is given to a query of its own, so
that the costs of all pairs together are as low as they can be (equation 1).
"""

import functools

import jax
import jax.numpy as jnp
import optax.assignment

from vit_jax.projects.detr import boxes
from vit_jax.training import sharding

# What takes the place of a cost that is no number, of which the search would
# have no end. The loss is none then either, and training says so.
_WORST = 1e6


def costs(
  logits_BQC: jax.Array,
  boxes_BQ4: jax.Array,
  labels_BM: jax.Array,
  targets_BM4: jax.Array,
  l1: float,
  giou: float,
) -> jax.Array:
  """Returns what each object costs with each query, float32 BQM.

  -p(class) + l1 |difference of the boxes| - giou GIoU: the probability itself
  instead of its logarithm, as in section 3.1.

  Args:
    logits_BQC: of C - 1 classes and of no object.
    boxes_BQ4: predicted (cx, cy, w, h).
    labels_BM: classes of objects; -1 for a row that is none.
    targets_BM4: their boxes.
    l1: weight of the boxes' L1 distance.
    giou: weight of their generalised IoU.
  """
  p_BQC = jax.nn.softmax(logits_BQC.astype(jnp.float32))
  p_BQM = jnp.take_along_axis(p_BQC, jnp.maximum(labels_BM, 0)[:, None], axis=2)
  a_BQ14, b_B1M4 = boxes_BQ4[:, :, None], targets_BM4[:, None]
  distance_BQM = jnp.sum(jnp.abs(a_BQ14 - b_B1M4), axis=-1)
  iou_BQM = boxes.generalized_iou(boxes.corners(a_BQ14), boxes.corners(b_B1M4))
  return l1 * distance_BQM - p_BQM - giou * iou_BQM


def match(costs_BQM: jax.Array, is_object_BM: jax.Array) -> jax.Array:
  """Returns the query of each object, int32 BM.

  The sum of the costs of `is_object_BM` is the lowest that there is where no
  two have the same query. Rows that are none get query 0. They come last in an
  image, and only as many of them are looked at as the image
  with the most objects has on this device, up to a power of two.

  Raises:
    ValueError: if there are more objects than queries.
  """
  _, Q, M = costs_BQM.shape
  if M > Q:
    raise ValueError(
      f'There are up to {M} objects an image and {Q} queries, each of which '
      'finds one: lower objective.max_objects or raise model.num_queries.'
    )
  costs_BQM = jnp.where(jnp.isfinite(costs_BQM), costs_BQM, _WORST)

  def first(m: int, costs_BQM: jax.Array, is_object_BM: jax.Array) -> jax.Array:
    is_object_B1m = is_object_BM[:, None, :m]
    # A row that is none has a query of its own behind the others, which no
    # object takes, and is done with in one step. With equal costs for all it
    # would try the queries of all such rows before it.
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
