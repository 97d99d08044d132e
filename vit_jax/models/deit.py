"""DeiT with distillation: a second learned token that a teacher's labels train.

Touvron et al., "Training data-efficient image transformers & distillation
through attention" (2012.12877), section 4.
"""

from typing import Any

import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array


class DistilledViT(ViT):
  """A ViT with tokens [class, distillation, patches] and a head for each.

  Its logits are the mean of both heads', as in the published code; the paper
  averages their softmax.
  """

  kind = 'deit'
  task_params = ('head', 'head_dist')

  @property
  def extra_tokens(self) -> tuple[str, ...]:
    return ('cls', 'dist', *self.registers * ('registers',))

  def body(self) -> 'DistilledViT':
    return self.clone(num_classes=0, head_bias=0.0, parent=None)

  def describe(self, image_size: tuple[int, int]) -> str:
    return f'distilled {super().describe(image_size)}'

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    if self.pool != 'cls' or self.representation_size:
      raise ValueError(
        f'model.pool is {self.pool!r} and model.representation_size '
        f'{self.representation_size}: DeiT has linear heads on its two '
        "tokens, 'cls' and 0."
      )

  def classify(self, x_BLD: Array, y_BD: Array) -> tuple[Array, dict[str, Any]]:
    """Returns the mean of the logits BC, and each token's in a dict."""
    C, bias = self.num_classes, self.head_bias
    cls_BC = heads.classifier(y_BD, C, bias)
    dist_BC = heads.classifier(x_BLD[:, 1], C, bias, 'head_dist')
    each = {'logits_cls': cls_BC, 'logits_dist': dist_BC}
    return (cls_BC + dist_BC) / 2, each
