"""Accuracy of a linear probe on every layer, as in figure 2 of iGPT."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.evaluators.fewshot_curves import ProbeResult
from vit_jax.models.model import Model
from vit_jax.training import metric_log, plots
from vit_jax.training.features import Function, layer

CSV, PLOT = 'layers.csv', 'layers.png'


def names(model: Model) -> list[str]:
  """Returns every layer, as `features.layer` calls them, and `pre_logits`."""
  return [*(f'block_{i}' for i in range(model.num_blocks)), 'pre_logits']


def every_layer(model: Model) -> Function:
  """Returns the function that gives all of `names`, one after the other, BX.

  The model runs once for all of them when it is compiled.
  """
  functions = [layer(model, name) for name in names(model)]

  def function(params: Any, images_BHWC: jax.Array) -> jax.Array:
    found = [f(params, images_BHWC) for f in functions]
    return jnp.concatenate(found, axis=-1)

  return function


def split(
  model: Model, params: Any, size: tuple[int, int], x_NX: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns what `every_layer` gave of images of `size` by layer, ND."""
  image_1HWC = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
  widths = [
    jax.eval_shape(layer(model, name), params, image_1HWC).shape[-1]
    for name in names(model)
  ]
  parts = np.split(x_NX, np.cumsum(widths)[:-1], axis=-1)
  return dict(zip(names(model), parts, strict=True))


def csv_text(found: Mapping[str, ProbeResult]) -> str:
  """Returns a line for each layer: its name, penalty and accuracy."""
  rows = [(name, x.l2, x.accuracy) for name, x in found.items()]
  return metric_log.csv_text([('layer', 'l2', 'accuracy'), *rows])


def table(found: Mapping[str, ProbeResult]) -> str:
  """Returns the accuracies for a terminal, the best one marked."""
  best = max(found, key=lambda name: found[name].accuracy)
  return '\n'.join(
    f'{name:<10}  {x.accuracy:7.2%}{"  best" if name == best else ""}'
    for name, x in found.items()
  )


def plot(found: Mapping[str, ProbeResult], title: str) -> bytes:
  """Returns a PNG of accuracy over depth."""
  figure = plots.figure(7, 4)
  y_label = 'test accuracy of a linear probe'
  axes = plots.accuracy_axes(
    figure, title, 'layer (the last: pre_logits)', y_label
  )
  accuracies = [x.accuracy for x in found.values()]
  axes.plot(range(len(found)), accuracies, markersize=5, **plots.style(0))
  every = 1 + len(found) // 20
  axes.set_xticks(range(0, len(found), every))
  return plots.png(figure)
