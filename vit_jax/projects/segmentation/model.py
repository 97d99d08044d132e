"""A ViT for semantic segmentation, with a linear layer on every patch."""

from typing import Any

import jax

from vit_jax.models import fields, heads
from vit_jax.models.vit import ViT

Array = jax.Array


class SegmentationViT(ViT):
  """Maps images to class logits of their patches.

  The head reads the encoded tokens of the patches, but not the class token or
  the registers.
  """

  kind = 'segmentation_vit'
  task_params = ('head',)

  task = 'masks'
  vectors = ('pre_logits',)

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    fields.check_only(
      self, 'segmentation', representation_size=(0,), norm_pooled=(False,)
    )

  def classify(self, aux: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Returns logits BhwC in float32, and the same dict as `ViT`."""
    B, h, w, D = aux['stem'].shape
    patches_ND = aux['tokens'][:, len(self.extra_tokens) :].reshape(-1, D)
    logits_NC = heads.classifier(patches_ND, self.num_classes, self.head_bias)
    return logits_NC.reshape(B, h, w, -1), aux
