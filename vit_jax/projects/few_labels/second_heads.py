"""ViTs with a second head, which learns from images without labels."""

from typing import Any, ClassVar

import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array

TURNS = 4


class RotationViT(ViT):
  """A ViT that also tells by how much its image was turned (1803.07728).

  Its logits are those of the classes of images; `logits_rotation` B4 in its
  dict are those of `TURNS` turns, by 90 degrees each.
  """

  kind: ClassVar[str] = 'rotation_vit'
  task_params: ClassVar[tuple[str, ...]] = (*ViT.task_params, 'head_rotation')

  def describe(self, image_size: tuple[int, int]) -> str:
    return f'{super().describe(image_size)}, telling rotations'

  def classify(self, x_BLD: Array, y_BD: Array) -> tuple[Array, dict[str, Any]]:
    """Returns the classes' logits BC, and those of the turns in a dict."""
    logits_BC, more = super().classify(x_BLD, y_BD)
    turns_B4 = heads.classifier(y_BD, TURNS, 0.0, 'head_rotation')
    return logits_BC, more | {'logits_rotation': turns_B4}


class VideoViT(ViT):
  """A ViT that also predicts the next shot of a video, for VIVI (1912.02783).

  `next_shot` BD in its dict is the representation plus a linear change of it,
  which starts at zero.
  """

  kind: ClassVar[str] = 'video_vit'
  task_params: ClassVar[tuple[str, ...]] = (*ViT.task_params, 'head_next')

  def describe(self, image_size: tuple[int, int]) -> str:
    return f'{super().describe(image_size)}, predicting shots'

  def classify(self, x_BLD: Array, y_BD: Array) -> tuple[Array, dict[str, Any]]:
    """Returns the classes' logits BC, and the next shot's in a dict."""
    logits_BC, more = super().classify(x_BLD, y_BD)
    change_BD = heads.classifier(y_BD, y_BD.shape[-1], 0.0, 'head_next')
    next_BD = y_BD + change_BD.astype(y_BD.dtype)
    return logits_BC, more | {'next_shot': next_BD}
