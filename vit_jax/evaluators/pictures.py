"""Draws attention and filters during training, for TensorBoard and wandb."""

import importlib.util
from typing import Any

import jax
import numpy as np

from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.training import sharding
from vit_jax.visualize import draw, filters
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import rollout


class PicturesEvaluator(Evaluator):
  """Draws attention rollout on images, and the first convolution's filters.

  The filters are drawn as their principal components (ViT paper, figure 7).
  """

  def __post_init__(self) -> None:
    """Takes the first images of a split.

    Raises the errors of `Parts.source`, ImportError if TensorBoard is missing
    and W&B is off, and ValueError if the model lacks attention between all
    tokens.
    """
    parts, name = self.parts, self.name
    if not parts.config.wandb and not importlib.util.find_spec('tensorboard'):
      raise ImportError(
        f'evaluators.{name} writes to TensorBoard, which is not installed. Run '
        "pip install -e '.[tensorboard]', name a W&B project with "
        f'--config.wandb, or set evaluators.{name}.on=False.'
      )
    source = parts.source(self.entry.split)
    model, images = parts.objective.model, parts.objective.images
    if model.attention != 'all':
      raise ValueError(
        f'evaluators.{name} draws attention between all tokens, which a '
        f'{type(model).__name__} lacks. Set evaluators.{name}.on=False.'
      )
    transform = images.eval_transform()
    count = min(self.entry.images, len(source))
    self._images_BHWC = np.stack(
      [np.asarray(transform(source[i])['image']) for i in range(count)]
    )

    def look(params: Any, images_BHWC: jax.Array) -> tuple[jax.Array, Any]:
      layers = Layers(model, params, images.normalize(images_BHWC))
      return rollout(layers), filters.first_kernel(params)[1]

    self._look = parts.compiled(look)

  def run(self, params: Any) -> dict[str, np.ndarray]:
    images_BHWC = jax.device_put(
      self._images_BHWC, sharding.replicated(self.parts.mesh)
    )
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
