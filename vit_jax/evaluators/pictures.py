"""What a model looks at, again and again while it learns, for TensorBoard."""

import importlib.util
from typing import Any

import jax
import numpy as np

from vit_jax import sharding
from vit_jax.data import augment
from vit_jax.data.sources import Source
from vit_jax.data.transforms import EvalTransform
from vit_jax.objectives.classification import Classification
from vit_jax.visualize import draw, filters
from vit_jax.visualize.layers import Layers
from vit_jax.visualize.rollout import rollout


class PicturesEvaluator:
  """Draws attention rollout on a few images, and the patch filters.

  Attributes:
    name: prefix of the pictures.
  """

  def __init__(
    self,
    name: str,
    objective: Classification,
    source: Source,
    transform: EvalTransform,
    count: int,
    mesh: jax.sharding.Mesh,
  ):
    """Args:

    name: prefix of the pictures.
    objective: whose model it is.
    source: the first of its images are looked at.
    transform: brings them to the model's size.
    count: how many.
    mesh: of the parameters.

    Raises:
      ValueError: if the model has no attention, or there is no TensorBoard to
        write to.
    """
    if not objective.model.attention:
      raise ValueError(
        f'evaluators.{name} draws attention, which a '
        f'{type(objective.model).__name__} has not: leave its split empty.'
      )
    if not importlib.util.find_spec('tensorflow'):
      raise ValueError(
        f'evaluators.{name} writes to TensorBoard, which needs TensorFlow: pip '
        "install -e '.[tensorboard]', or leave its split empty."
      )
    if not 0 < count <= len(source):
      raise ValueError(
        f'evaluators.{name}.images is {count}, and there are {len(source)}.'
      )
    self.name = name
    self._images_BHWC = np.stack(
      [np.asarray(transform(source[i])['image']) for i in range(count)]
    )

    def look(params: Any, images_BHWC: jax.Array) -> tuple[jax.Array, Any]:
      normalized_BHWC = augment.normalize(
        images_BHWC, objective.mean, objective.std
      )
      layers = Layers(objective.model, params, normalized_BHWC)
      return rollout(layers), filters.first_kernel(params)[1]

    self._replicated = sharding.replicated(mesh)
    self._look = jax.jit(look, out_shardings=self._replicated)

  def run(self, params: Any) -> dict[str, np.ndarray]:
    """Returns pictures uint8 HWC by name; none but in the first process."""
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
