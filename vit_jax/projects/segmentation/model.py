"""A ViT for semantic segmentation, with a linear layer on every patch."""

from typing import Any, ClassVar

import flax.linen as nn
import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array


class SegmentationViT(ViT):
  """Maps images to class logits of their patches.

  The head reads the encoded tokens of the patches, but not the class token or
  the registers.
  """

  kind: ClassVar[str] = 'segmentation_vit'
  task_params: ClassVar[tuple[str, ...]] = ('head',)

  @property
  def task(self) -> str:
    return 'masks'

  @property
  def vectors(self) -> tuple[str, ...]:
    return ('pre_logits',)

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    if self.representation_size:
      raise ValueError(
        f'model.representation_size is {self.representation_size}: the head of '
        'segmentation is one linear layer. Use 0.'
      )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Any]]:
    """Returns logits BhwC in float32, and the same dict as `ViT`."""
    x_BhwD, x_BLD = self.embed(images_BHWC)
    B, h, w, D = x_BhwD.shape
    x_BLD, captured = self.encode(x_BLD, (h, w), train=train, capture=capture)
    aux = {
      'stem': x_BhwD,
      **captured,
      'tokens': x_BLD,
      'pre_logits': self.represent(x_BLD),
    }
    patches_ND = x_BLD[:, len(self.extra_tokens) :].reshape(-1, D)
    logits_NC = heads.classifier(patches_ND, self.num_classes, self.head_bias)
    return logits_NC.reshape(B, h, w, -1), aux
