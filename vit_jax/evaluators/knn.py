"""k-NN on frozen features, as in DINO (2104.14294, appendix F.1).

The k training images with the highest cosine similarity s vote for their class.
A vote has the weight exp(s / T), where T is the temperature.

Dimension letters: N training images, R training images of a block, M test
images, D features, C classes, k neighbours.
"""

import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evaluators import ridge
from vit_jax.evaluators.probe import spread
from vit_jax.training import sharding

K, TEMPERATURE = 20, 0.07
# Training images per block. Devices hold the similarities of a block to all
# test images.
_BLOCK = 1024
# Features RD and labels R; a row with a negative label is padding.
Block = tuple[np.ndarray, np.ndarray]


def accuracy(
  blocks: Iterable[Block],
  test_MD: np.ndarray,
  labels_M: np.ndarray,
  *,
  num_classes: int,
  mesh: jax.sharding.Mesh,
  k: int = K,
) -> float:
  """Returns the share of test images whose true class has the largest vote.

  All processes must call it with the same arrays. The test images are sharded
  over the mesh's batch axes and compared with one block of training images at a
  time. So all devices together hold about M (D + 2 k + R) numbers; each also
  holds a block. With fewer than `k` training images, all of them vote. Raises
  ValueError if a feature is not finite.
  """
  ridge.check_finite('test', test_MD)
  queries_MD = spread(_unit(test_MD), mesh)
  nearest = (
    spread(np.full((len(test_MD), k), -np.inf, np.float32), mesh),
    spread(np.zeros((len(test_MD), k), np.int32), mesh),
  )
  merge = jax.jit(_merge, donate_argnums=0)
  for x_RD, labels_R in blocks:
    ridge.check_finite('training', x_RD[labels_R >= 0])
    block = _unit(x_RD), labels_R.astype(np.int32)
    placed = (sharding.replicate(x, mesh) for x in block)
    nearest = merge(nearest, queries_MD, *placed)
  vote = jax.jit(
    functools.partial(_votes, num_classes=num_classes),
    out_shardings=sharding.replicated(mesh),
  )
  found_M = np.asarray(vote(*nearest))[: len(test_MD)]
  return float(np.mean(found_M == labels_M))


def blocks_of(x_ND: np.ndarray, labels_N: np.ndarray) -> Iterator[Block]:
  """Splits arrays into the blocks that `accuracy` takes."""
  for i in range(0, len(x_ND), _BLOCK):
    yield x_ND[i : i + _BLOCK], labels_N[i : i + _BLOCK]


def _unit(x_XD: np.ndarray) -> np.ndarray:
  """Scales rows to length 1; a row of zeros stays zero."""
  length_X1 = np.linalg.norm(x_XD, axis=1, keepdims=True)
  return (x_XD / np.maximum(length_X1, 1e-12)).astype(np.float32)


def _merge(
  nearest: tuple[jax.Array, jax.Array],
  queries_MD: jax.Array,
  x_RD: jax.Array,
  labels_R: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Merges a block into the k nearest training images of earlier blocks.

  `nearest` and the result are the similarities, in descending order, and the
  labels, both Mk. Among equal similarities, the earlier training image is kept.
  """
  similar_Mk, labels_Mk = nearest
  k = similar_Mk.shape[1]
  similar_MR = jnp.dot(queries_MD, x_RD.T, precision=jax.lax.Precision.HIGHEST)
  similar_MR = jnp.where(labels_R[None] < 0, -jnp.inf, similar_MR)
  of_block_Mk, index_Mk = jax.lax.top_k(similar_MR, min(k, len(labels_R)))
  similar_MX = jnp.concatenate([similar_Mk, of_block_Mk], axis=1)
  labels_MX = jnp.concatenate([labels_Mk, labels_R[index_Mk]], axis=1)
  similar_Mk, index_Mk = jax.lax.top_k(similar_MX, k)
  return similar_Mk, jnp.take_along_axis(labels_MX, index_Mk, axis=1)


def _votes(
  similar_Mk: jax.Array, labels_Mk: jax.Array, *, num_classes: int
) -> jax.Array:
  """Returns the class with the largest vote, int32 M."""
  # Subtracting the maximum keeps exp finite at small temperatures.
  weights_Mk = jnp.exp((similar_Mk - similar_Mk[:, :1]) / TEMPERATURE)
  is_class_MkC = labels_Mk[..., None] == jnp.arange(num_classes)[None, None]
  votes_MC = jnp.sum(weights_Mk[..., None] * is_class_MkC, axis=1)
  return jnp.argmax(votes_MC, axis=1)
