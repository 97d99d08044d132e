"""DeiT with distillation: a second token whose head learns a teacher's labels.

Touvron et al., "Training data-efficient image transformers & distillation
through attention" (2012.12877), section 4.
"""

from typing import Any

import jax

from vit_jax.models import heads
from vit_jax.models.vit import ViT

Array = jax.Array


class DistilledViT(ViT):
  """A ViT with a class and a distillation token, and a linear head on each.

  The logits are the mean of both heads' logits, as in the published code. The
  paper averages the probabilities instead.
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
        f'model.pool is {self.pool!r} and model.representation_size is '
        f'{self.representation_size}: DeiT has linear heads on its class and '
        "distillation tokens. Set model.pool to 'cls' and "
        'model.representation_size to 0.'
      )

  def classify(self, x_BLD: Array, y_BD: Array) -> tuple[Array, dict[str, Any]]:
    """Returns the mean logits BC, and a dict with each token's logits."""
    C, bias = self.num_classes, self.head_bias
    cls_BC = heads.classifier(y_BD, C, bias)
    dist_BC = heads.classifier(x_BLD[:, 1], C, bias, 'head_dist')
    each = {'logits_cls': cls_BC, 'logits_dist': dist_BC}
    return (cls_BC + dist_BC) / 2, each
