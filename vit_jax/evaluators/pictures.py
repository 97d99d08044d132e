"""Draws attention and filters during training, for TensorBoard and wandb."""

import importlib.util
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.sources import Source
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.training import sharding
from vit_jax.visualize import draw, filters
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import rollout


class PicturesEvaluator(Evaluator):
  """Draws attention rollout on a few images, and the patch filters."""

  def __init__(self, name: str, parts: Parts, source: Source, count: int):
    """Takes the first `count` images of a source.

    Raises ValueError if the model lacks attention between all tokens, or
    `count` is not between 1 and the number of images.
    """
    model, images = parts.objective.model, parts.objective.images
    if model.attention != 'all':
      raise ValueError(
        f'evaluators.{name} draws attention between all tokens, which a '
        f'{type(model).__name__} lacks. Set evaluators.{name}.on=False.'
      )
    if not 0 < count <= len(source):
      raise ValueError(
        f'evaluators.{name}.images is {count}; it must be from 1 to '
        f'{len(source)}, the number of images.'
      )
    self.name = name
    transform = images.eval_transform()
    self._images_BHWC = np.stack(
      [np.asarray(transform(source[i])['image']) for i in range(count)]
    )

    def look(params: Any, images_BHWC: jax.Array) -> tuple[jax.Array, Any]:
      layers = Layers(model, params, images.normalize(images_BHWC))
      return rollout(layers), filters.first_kernel(params)[1]

    self._replicated = sharding.replicated(parts.mesh)
    self._look = parts.compiled(look)

  @classmethod
  def from_entry(cls, parts: Parts, name: str, entry: ConfigDict) -> Self:
    """Raises ImportError if TensorBoard is missing and W&B is off.

    Also raises the ValueErrors of `__init__` and `Parts.source`.
    """
    if not parts.config.wandb and not importlib.util.find_spec('tensorboard'):
      raise ImportError(
        f'evaluators.{name} writes to TensorBoard, which is not installed. Run '
        "pip install -e '.[tensorboard]', name a W&B project with "
        f'--config.wandb, or set evaluators.{name}.on=False.'
      )
    return cls(name, parts, parts.source(entry.split), entry.images)

  def run(self, params: Any) -> dict[str, np.ndarray]:
    images_BHWC = jax.device_put(self._images_BHWC, self._replicated)
    maps_Bhw, kernel_PPCD = jax.device_get(self._look(params, images_BHWC))
    if jax.process_index():
      return {}
    rows = [
      {'image': image_HWC, 'rollout': draw.overlay(image_HWC, map_hw)}
      for image_HWC, map_hw in zip(self._images_BHWC, maps_Bhw, strict=True)
    ]
    components = filters.principal_components(kernel_PPCD, filters.COMPONENTS)
    return {
      f'{self.name}/rollout': draw.pixels(draw.sheet(rows, [''] * len(rows))),
      f'{self.name}/filters': draw.pixels(draw.filters(components)),
    }
