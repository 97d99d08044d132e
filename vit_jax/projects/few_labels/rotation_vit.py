"""A ViT that also tells by how much its image was turned.

Gidaris et al., "Unsupervised representation learning by predicting image
rotations" (1803.07728), which S4L (1905.03670) learns besides classes.
"""

from typing import Any, ClassVar

import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array

TURNS = 4


class RotationViT(ViT):
  """A ViT with a second linear head, of `TURNS` classes.

  Its logits are those of the classes of images; `logits_rotation` B4 in its
  dict are those of the turns, by 90 degrees each.
  """

  kind: ClassVar[str] = 'rotation_vit'
  task_params: ClassVar[tuple[str, ...]] = (
    *ViT.task_params,
    'head_rotation',
  )

  def describe(self, image_size: tuple[int, int]) -> str:
    return f'{super().describe(image_size)}, telling rotations'

  def classify(self, x_BLD: Array, y_BD: Array) -> tuple[Array, dict[str, Any]]:
    """Returns the classes' logits BC, and those of the turns in a dict."""
    logits_BC, more = super().classify(x_BLD, y_BD)
    turns_B4 = heads.classifier(y_BD, TURNS, 0.0, 'head_rotation')
    return logits_BC, more | {'logits_rotation': turns_B4}
