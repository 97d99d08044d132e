"""Linear probe: logistic regression on the features of a training set.

Dimension letters: N training examples, M test examples, D features, C classes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from vit_jax.data import cores
from vit_jax.evaluators import ridge
from vit_jax.training import sharding

# Penalties to try, for standardised features and the mean loss.
L2_GRID = tuple(2.0**power for power in range(-16, 1, 2))

# A fit ends when no entry of the gradient is larger than this. Probabilities
# are then accurate to about 1e-4. (In float32, entries can fall to 1e-8.)
TOLERANCE = 1e-6
MAX_ITERATIONS = 1000

_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class Probe:
  """A linear classifier of centred features, and its accuracy.

  Attributes:
    heldout_accuracy: accuracy on a held-out tenth of the training set, after
      training on the rest; NaN if there was a single penalty.
    accuracy: accuracy on the test set, after training on the whole training
      set.
    iterations: number of L-BFGS iterations in the last fit.
    converged: whether the gradient fell below the tolerance in that fit.
    mean_D: mean of the training features, which is subtracted first.
  """

  l2: float
  heldout_accuracy: float
  accuracy: float
  iterations: int
  converged: bool
  mean_D: np.ndarray
  kernel_DC: np.ndarray
  bias_C: np.ndarray


def fit_probe(
  features_ND: np.ndarray,
  labels: np.ndarray,
  test_MD: np.ndarray,
  test_labels: np.ndarray,
  *,
  num_classes: int,
  mesh: jax.sharding.Mesh,
  l2_grid: Sequence[float] = L2_GRID,
  tolerance: float = TOLERANCE,
) -> Probe:
  """Fits a logistic regression to all training examples, and tests it.

  The fit minimises over W and b

    mean_n -log softmax(W' x_n + b)[label_n] + l2 / 2 |W|^2

  with standardised features x, by L-BFGS. This is scikit-learn's
  `LogisticRegression` with C = 1 / (N l2), or 2 / (N l2) for two classes. A
  held-out tenth of the training set (see `hold_out`) chooses the penalty with
  the best accuracy, or the highest of equally good penalties. Penalties are
  tried from high to low, and each trial starts from the result of the previous
  trial.

  If examples have several classes, the labels are 0/1 NC. The loss is then the
  sum of the classes' binary cross-entropies, and the accuracy is the mean over
  all pairs of example and class.

  All processes must call it with the same arrays. The training set is sharded
  over the mesh's batch axes. Features must be finite.

  Args:
    l2_grid: penalties to choose from. A single penalty is used without a trial;
      several penalties raise ValueError for fewer than ten training examples.
    tolerance: a fit ends when no gradient entry is larger, or after
      `MAX_ITERATIONS`.
  """
  mean_D, std_D = ridge.moments(features_ND)
  # Differences are computed in float64, because means may be large compared
  # with deviations. Blocks save memory.
  x_ND = np.empty(features_ND.shape, np.float32)
  for i in range(0, len(x_ND), _BLOCK):
    x_ND[i : i + _BLOCK] = (features_ND[i : i + _BLOCK] - mean_D) / std_D
  data = spread(x_ND, mesh), spread(labels.astype(np.int32), mesh)
  everywhere = sharding.replicated(mesh)
  fit, measure = (
    jax.jit(function, out_shardings=everywhere)
    for function in (_fit, _accuracy)
  )
  params = {
    'kernel': np.zeros((features_ND.shape[1], num_classes), np.float32),
    'bias': np.zeros(num_classes, np.float32),
  }
  params = jax.device_put(params, everywhere)
  l2, heldout_accuracy = l2_grid[0], math.nan
  if len(l2_grid) > 1:
    is_heldout_N = hold_out(labels)
    rest_N, heldout_N = (
      spread(x.astype(np.float32), mesh) for x in (~is_heldout_N, is_heldout_N)
    )
    heldout_accuracy, tried = -1.0, params
    is_first = jax.process_index() == 0
    with cores.progress(
      'linear probe', len(l2_grid), 'fits', shown=is_first
    ) as bar:
      for penalty in sorted(l2_grid, reverse=True):
        tried, *_ = fit(tried, *data, rest_N, penalty, tolerance)
        accuracy = float(measure(tried, *data, heldout_N))
        bar.update()
        if accuracy > heldout_accuracy:
          l2, heldout_accuracy, params = penalty, accuracy, tried
  ones_N = spread(np.ones(len(labels), np.float32), mesh)
  params, iterations, size = jax.device_get(
    fit(params, *data, ones_N, l2, tolerance)
  )
  kernel_DC = params['kernel'].astype(np.float64) / std_D[:, None]
  bias_C = params['bias'].astype(np.float64)
  return Probe(
    l2=l2,
    heldout_accuracy=heldout_accuracy,
    accuracy=ridge.accuracy(test_MD, test_labels, mean_D, kernel_DC, bias_C),
    iterations=int(iterations),
    converged=bool(float(size) <= tolerance),
    mean_D=mean_D,
    kernel_DC=kernel_DC,
    bias_C=bias_C,
  )


def hold_out(labels: np.ndarray) -> np.ndarray:
  """Selects about a tenth of the examples to hold out, bool N.

  Holds out n / 10 of the n examples of a class, rounded down or up. If labels
  are 0/1 NC, every set of classes counts as a class. Raises ValueError if there
  are fewer than ten examples.
  """
  if len(labels) < 10:
    raise ValueError(
      f'{len(labels)} training examples are too few for a linear probe, '
      'which holds out a tenth. Give at least ten.'
    )
  _, labels_N = np.unique(labels, axis=0, return_inverse=True)
  order_N = np.random.RandomState(0).permutation(len(labels_N))
  order_N = order_N[np.argsort(labels_N[order_N], kind='stable')]
  is_heldout_N = np.zeros(len(labels_N), bool)
  is_heldout_N[order_N[5::10]] = True
  return is_heldout_N


def _logits(params: Any, x_ND: jax.Array) -> jax.Array:
  # By default accelerators multiply float32 at a lower precision, at which the
  # gradient would not reach the tolerance.
  product_NC = jnp.dot(
    x_ND, params['kernel'], precision=jax.lax.Precision.HIGHEST
  )
  return product_NC + params['bias'][None, :]


def _fit(
  params: Any,
  x_ND: jax.Array,
  labels: jax.Array,
  weight_N: jax.Array,
  l2: jax.Array,
  tolerance: jax.Array,
) -> tuple[Any, jax.Array, jax.Array]:
  """Returns parameters, iterations, and the largest gradient entry."""

  def objective(params: Any) -> jax.Array:
    logits_NC = _logits(params, x_ND)
    if labels.ndim == 2:
      losses_NC = optax.sigmoid_binary_cross_entropy(logits_NC, labels)
      losses_N = losses_NC.sum(axis=1)
    else:
      losses_N = optax.softmax_cross_entropy_with_integer_labels(
        logits_NC, labels
      )
    mean = jnp.sum(weight_N * losses_N) / jnp.sum(weight_N)
    return mean + l2 / 2 * jnp.sum(jnp.square(params['kernel']))

  solver = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(objective)

  def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
    params, state = carry
    value, grad = value_and_grad(params, state=state)
    updates, state = solver.update(
      grad, state, params, value=value, grad=grad, value_fn=objective
    )
    return optax.apply_updates(params, updates), state

  def iterations(state: Any) -> jax.Array:
    return optax.tree.get(state, 'count')

  def size(state: Any) -> jax.Array:
    return optax.tree.norm(optax.tree.get(state, 'grad'), ord=jnp.inf)

  def goes_on(carry: tuple[Any, Any]) -> jax.Array:
    _, state = carry
    return (iterations(state) == 0) | (
      (iterations(state) < MAX_ITERATIONS) & (size(state) > tolerance)
    )

  params, state = jax.lax.while_loop(
    goes_on, step, (params, solver.init(params))
  )
  return params, iterations(state), size(state)


def _accuracy(
  params: Any, x_ND: jax.Array, labels: jax.Array, weight_N: jax.Array
) -> jax.Array:
  hits_N = ridge.hits(_logits(params, x_ND), labels)
  return jnp.sum(weight_N * hits_N) / jnp.sum(weight_N)


def spread(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
  """Shards an array over the batch axes.

  Appends rows of zeros until the shards have equal sizes. The array must be
  equal in all processes.
  """
  missing = [(0, -len(x) % sharding.shards(mesh))] + [(0, 0)] * (x.ndim - 1)
  x = np.pad(x, missing) if missing[0][1] else x
  return jax.make_array_from_callback(
    x.shape, NamedSharding(mesh, sharding.BATCH), lambda index: x[index]
  )
