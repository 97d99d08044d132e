"""Optimizers as optax chains, and learning-rate schedules.

The paper uses Adam and SGD (tables 3 and 4). LAMB, Muon and SAM are additions.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from vit_jax.checkpoints import adapters
from vit_jax.models.model import Model

Schedule = Callable[[jax.Array | int], jax.Array]

# Root mean square (RMS) of Muon's updates. Adam's updates have a similar RMS in
# practice (2502.16982), so Adam's learning rates and weight decays suit Muon.
MUON_RMS = 0.2


def schedule(
  peak_lr: float,
  decay: str,
  warmup_steps: int,
  total_steps: int,
  milestones_steps: Sequence[int] = (),
) -> Schedule:
  """Returns the learning-rate schedule: linear warm-up times a decay.

  At step t of T with w warm-up steps, the warm-up is min(1, (t + 1) / w). With
  p = clip((t - w) / (T - w), 0, 1), the decay is 1 - p (linear),
  (1 + cos(pi p)) / 2 (cosine), 0.1^k after k milestones (staircase), or 1
  (constant).

  Raises:
    ValueError: if the warm-up is not shorter than the run, or milestones and
      decay contradict each other.
  """
  if bool(milestones_steps) != (decay == 'staircase'):
    raise ValueError(
      f'optimizer.decay is {decay!r} and optimizer.milestones has '
      f'{len(milestones_steps)} entries. staircase needs at least one entry; '
      'the other decays need an empty list.'
    )
  if warmup_steps >= total_steps:
    raise ValueError(
      f'The warm-up of {warmup_steps} steps does not fit a run of '
      f'{total_steps}: shorten optimizer.warmup or lengthen total.'
    )

  def lr(step: jax.Array | int) -> jax.Array:
    warmup = jnp.minimum(1.0, (step + 1) / max(warmup_steps, 1))
    p = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0, 1)
    factor = {
      'linear': 1 - p,
      'cosine': (1 + jnp.cos(jnp.pi * p)) / 2,
      'constant': jnp.ones_like(p),
      'staircase': 0.1 ** sum(step >= m for m in milestones_steps),
    }[decay]
    return peak_lr * warmup * factor

  return lr


def kernels(params: Any) -> Any:
  """Returns a mask that is true for kernels, which weight decay applies to."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key == 'kernel', params
  )


def first_match(params: Any, patterns: Sequence[str]) -> Any:
  """Returns the index of the first pattern that matches each parameter's path.

  Patterns are regular expressions for paths joined by '/'. Parameters without a
  match get `len(patterns)`.

  Raises:
    ValueError: if a pattern matches no path, or is not a regular expression.
  """
  paths = jax.tree_util.tree_map_with_path(
    lambda path, _: jax.tree_util.keystr(path, simple=True, separator='/'),
    params,
  )
  for pattern in patterns:
    try:
      found = any(re.search(pattern, path) for path in jax.tree.leaves(paths))
    except (re.error, TypeError) as e:
      raise ValueError(
        f'The pattern {pattern!r} of optimizer.frozen or optimizer.lr_scales '
        f'is not a regular expression: {e}.'
      ) from e
    if not found:
      raise ValueError(
        f'The pattern {pattern!r} of optimizer.frozen or optimizer.lr_scales '
        'matches no trainable parameter. Remove or correct it. Parameters are '
        f'{", ".join(jax.tree.leaves(paths)[:3])}, and so on.'
      )

  def index(path: str) -> int:
    hits = (i for i, p in enumerate(patterns) if re.search(p, path))
    return next(hits, len(patterns))

  return jax.tree.map(index, paths)


def stop_frozen(params: Any, patterns: Sequence[str]) -> Any:
  """Stops gradients of the parameters that match a pattern."""
  return jax.tree.map(
    lambda x, i: x if i == len(patterns) else jax.lax.stop_gradient(x),
    params,
    first_match(params, patterns),
  )


def _path_factors(
  lr_scales: Sequence[tuple[str, float]],
) -> Callable[[Any], Any]:
  """Returns the function that maps parameters to the factors of `lr_scales`."""
  try:
    patterns, factors = zip(*lr_scales, strict=True)
    if not all(0 <= factor < float('inf') for factor in factors):
      raise ValueError
  except (TypeError, ValueError) as e:
    raise ValueError(
      f'optimizer.lr_scales is {lr_scales!r}: give pairs of a pattern and a '
      "factor of 0 or more, as in (('^head/', 10.0),)."
    ) from e

  return lambda params: jax.tree.map(
    lambda i: (*factors, 1.0)[i], first_match(params, patterns)
  )


def layer_factors(model: Model, decay: float) -> Callable[[Any], Any]:
  """Returns the function that maps parameters to learning-rate factors.

  With L layers, the factor of layer i (from 0) is decay^(L - i). It is
  decay^(L + 1) before the layers and 1 after them (BEiT, 2106.08254). Layers
  stacked for a scan get an array with a factor per layer.

  Raises:
    ValueError: if the model does not have a sequence of equal layers.
  """
  loop = model.depth_loop
  if loop is None:
    raise ValueError(
      f'optimizer.layer_decay is {decay}, but a {model.kind} has no '
      'sequence of equal layers: leave optimizer.layer_decay at 1.'
    )
  L = model.num_blocks

  def factor(path: tuple[Any, ...], x: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if re.search(model.after_layers, name):
      return 1.0
    if match := re.search(rf'(?:^|/){loop.prefix}(\d+)/', name):
      return decay ** (L - (int(match[1]) - loop.first))
    if re.search(rf'(?:^|/){loop.stacked}/', name):
      factors_L = decay ** np.arange(L, 0, -1)
      return np.float32(factors_L).reshape(L, *[1] * (x.ndim - 1))
    return decay ** (L + 1)

  return lambda params: jax.tree_util.tree_map_with_path(factor, params)


def _scale_by(factors: Callable[[Any], Any]) -> optax.GradientTransformation:
  def init(params: Any) -> optax.EmptyState:
    factors(params)  # raises for an invalid pattern
    return optax.EmptyState()

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(operator.mul, updates, factors(updates)), state

  return optax.GradientTransformation(init, update)


def stacked_axes(model: Model, path: tuple[Any, ...]) -> int | None:
  """Returns the number of leading layer axes of a parameter.

  It is 1 if a scan stacks the layers, 0 if they are unrolled, and None if the
  parameter is outside of the model's loops.
  """
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  for loop in model.loops:
    if re.search(rf'(?:^|/){loop.stacked}/', name):
      return 1
    if re.search(rf'(?:^|/){loop.prefix}\d+/', name):
      return 0
  return None


def hidden_matrices(model: Model) -> Callable[[Any], Any]:
  """Returns the function that finds the kernels of the model's `loops`.

  It maps parameters to a tree with the matrix axes of these kernels, and None
  for other parameters. Muon treats each kernel as a matrix from inputs to
  outputs. For queries, keys and values, heads N and head width K together are
  outputs; for the output projection they are inputs. For a convolution, rows,
  columns and input channels are inputs. Layers stacked for a scan are separate
  matrices.
  """

  def axes_of(path: tuple[Any, ...], x: Any) -> Any:
    first = stacked_axes(model, path)
    if first is None or path[-1].key != 'kernel':
      return None
    outputs = 2 if path[-2].key in ('query', 'key', 'value') else 1
    axes = tuple(range(first, x.ndim))
    return MuonDimensionNumbers(axes[:-outputs], axes[-outputs:])

  return lambda params: jax.tree_util.tree_map_with_path(axes_of, params)


def new_adapters(
  model: Model, params: Any, rank: int, pattern: str, key: jax.Array
) -> Any:
  """Returns the parameters that LoRA trains: adapters and task parameters.

  A and B are stored under their kernel's path (see `adapters.merged`). As in
  peft, A is uniform in (-D^-0.5, D^-0.5) for D inputs, and B is 0.

  Raises:
    ValueError: if the pattern matches no kernel of the layers, or is not a
      regular expression.
  """
  try:
    matches = re.compile(pattern).search
  except re.error as e:
    raise ValueError(
      f'optimizer.lora_on is {pattern!r}, which is not a regular expression: '
      f'{e}.'
    ) from e
  flat = flatten_dict(params)
  found = {p: x for p, x in flat.items() if p[0] in model.task_params}
  axes = flatten_dict(hidden_matrices(model)(params))
  for i, (path, sides) in enumerate(axes.items()):
    if sides is None or path in found or not matches('/'.join(path)):
      continue
    x = flat[path]
    stacked = x.shape[: sides.reduction_axis[0]]
    D, E = (
      math.prod(x.shape[axis] for axis in part)
      for part in (sides.reduction_axis, sides.output_axis)
    )
    found[*path, adapters.A] = jax.random.uniform(
      jax.random.fold_in(key, i),
      (*stacked, D, rank),
      minval=-(D**-0.5),
      maxval=D**-0.5,
    )
    found[*path, adapters.B] = jnp.zeros((*stacked, rank, E))
  if not any(path[-1] == adapters.A for path in found):
    raise ValueError(
      f'optimizer.lora_on is {pattern!r}, which matches no kernel in the '
      f'layers of a {model.kind}: give a regular expression for paths such as '
      + ', '.join('/'.join(path) for path, x in axes.items() if x)[:200]
    )
  return unflatten_dict(found)


def _muon(
  model: Model, momentum: float, dtype: str, adam: Any
) -> optax.GradientTransformation:
  """Returns Nesterov Muon for `hidden_matrices`, and Adam for the rest."""
  find = hidden_matrices(model)

  def scale(u: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
    sides = (
      math.prod(u.shape[axis] for axis in part)
      for part in (axes.reduction_axis, axes.output_axis)
    )
    # The RMS of an orthogonal matrix is 1 / sqrt(longer side).
    return u * (MUON_RMS * math.sqrt(max(sides)))

  muon = optax.chain(
    scale_by_muon(
      beta=np.float32(momentum), mu_dtype=dtype, weight_dimension_numbers=find
    ),
    optax.stateless(
      lambda updates, params: jax.tree.map(scale, updates, find(updates))
    ),
  )
  return optax.partition(
    {'muon': muon, 'adam': adam},
    lambda params: jax.tree.map(
      lambda x: 'muon' if x else 'adam',
      find(params),
      is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    ),
  )


def _trust_ratio(model: Model) -> optax.GradientTransformation:
  """Scales updates u of kernels w to u |w| / |u|, as LAMB does.

  This is algorithm 2 of 1904.00962 with the identity as phi. If a norm is 0, u
  stays. Parameters other than kernels are not scaled, as in the code of DeiT
  III. Layers stacked for a scan have separate norms.
  """

  def scale(path: tuple[Any, ...], u: jax.Array, w: jax.Array) -> jax.Array:
    if path[-1].key != 'kernel':
      return u
    axes = tuple(range(stacked_axes(model, path) or 0, u.ndim))
    norm_u, norm_w = (
      jnp.sqrt(jnp.sum(x**2, axis=axes, keepdims=True)) for x in (u, w)
    )
    has_both = (norm_u > 0) & (norm_w > 0)
    return u * jnp.where(has_both, norm_w / jnp.where(has_both, norm_u, 1), 1)

  return optax.stateless(
    lambda updates, params: jax.tree_util.tree_map_with_path(
      scale, updates, params
    )
  )


def sharpest(params: Any, grads: Any, rho: float) -> Any:
  """Moves parameters by the distance `rho` along the gradient, as SAM does.

  The result approximates the worst point at that distance (2010.01412,
  equation 2).
  """
  norm = jnp.maximum(optax.tree.norm(grads), 1e-12)
  return jax.tree.map(lambda w, g: w + rho / norm * g, params, grads)


def make(
  o: ConfigDict, lr: Schedule, model: Model, total_steps: int = 1
) -> optax.GradientTransformation:
  """Returns the optax chain of `config.optimizer`.

  Except for SGD, weight decay is decoupled and multiplied by the learning rate,
  as in AdamW. big_vision does not multiply by the peak learning rate:
  decay 0.1 with rate 1e-3 (table 3) is 1e-4 in big_vision's configs. SGD adds
  the gradient of an L2 penalty instead, as in BiT, so momentum accumulates it.

  LAMB is Adam with `_trust_ratio` after the weight decay. Muon (Jordan et al.
  2024) orthogonalises the momentum of `hidden_matrices`; Adam updates all other
  parameters. The second moment is always float32. Frozen parameters have no
  decay and no state, and the global norm excludes their gradients.

  Raises:
    ValueError: if `lr_scales` is invalid, or layer decay does not apply to the
      model. The result's `init` raises it if a pattern is not a regular
      expression or matches no parameter.
  """
  decay: Any = o.weight_decay
  if end := o.weight_decay_end:

    def decay(step: jax.Array) -> jax.Array:
      part = (1 + jnp.cos(jnp.pi * step / total_steps)) / 2
      return end + (o.weight_decay - end) * part

  decayed = (
    optax.add_decayed_weights(decay, mask=kernels)
    if decay
    else optax.identity()
  )
  # Python floats would be rounded to the moment's dtype: 0.9 to 0.8984 in
  # bfloat16.
  adam = optax.scale_by_adam(np.float32(o.b1), o.b2, mu_dtype=o.momentum_dtype)
  trace = optax.trace(
    np.float32(o.momentum), accumulator_dtype=o.momentum_dtype
  )
  direction = {
    'adam': lambda: (adam, decayed),
    'sgd': lambda: (decayed, trace),
    'lamb': lambda: (adam, decayed, _trust_ratio(model)),
    'muon': lambda: (_muon(model, o.momentum, o.momentum_dtype, adam), decayed),
  }[o.name]
  factors = []
  if o.lr_scales:
    factors.append(_path_factors(o.lr_scales))
  if o.layer_decay != 1:
    factors.append(layer_factors(model, o.layer_decay))
  chain = optax.chain(
    optax.clip_by_global_norm(o.clip_norm) if o.clip_norm else optax.identity(),
    *direction(),
    optax.scale_by_learning_rate(lr),
    *map(_scale_by, factors),
  )
  if not o.frozen:
    return chain

  def labels(params: Any) -> Any:
    return jax.tree.map(
      lambda i: 'trained' if i == len(o.frozen) else 'frozen',
      first_match(params, o.frozen),
    )

  return optax.partition(
    {'trained': chain, 'frozen': optax.set_to_zero()}, labels
  )
