"""A ViT that also predicts what the next shot of a video looks like.

VIVI, "Self-Supervised Learning of Video-Induced Visual Invariances"
(1912.02783), learns so besides classes.
"""

from typing import Any, ClassVar

import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array


class VideoViT(ViT):
  """A ViT with a linear layer from a representation to that of the next shot.

  Its logits are those of the classes of images; `next_shot` BD in its dict is
  the representation and what is added to it, at the start nothing.
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
