"""ViTs with a second head that learns without labels."""

from typing import Any

import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array

TURNS = 4  # number of rotations


class RotationViT(ViT):
  """A ViT that also predicts the rotation of its image (1803.07728).

  The returned dict has `logits_rotation` B4: logits of rotations by 0, 90, 180
  and 270 degrees.
  """

  kind = 'rotation_vit'
  task_params = (*ViT.task_params, 'head_rotation')

  def classify(self, aux: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    turns_B4 = heads.classifier(aux['pre_logits'], TURNS, 0.0, 'head_rotation')
    return super().classify(aux | {'logits_rotation': turns_B4})


class VideoViT(ViT):
  """A ViT that also predicts a video's next shot, for VIVI (1912.02783).

  The returned dict has `next_shot` BD, the predicted representation. It is
  `pre_logits` plus a linear layer of `pre_logits` that starts as zero.
  """

  kind = 'video_vit'
  task_params = (*ViT.task_params, 'head_next')

  def classify(self, aux: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    y_BD = aux['pre_logits']
    change_BD = heads.classifier(y_BD, y_BD.shape[-1], 0.0, 'head_next')
    next_BD = y_BD + change_BD.astype(y_BD.dtype)
    return super().classify(aux | {'next_shot': next_BD})
