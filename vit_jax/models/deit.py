"""DeiT (2012.12877): a second token whose head learns a teacher's labels."""

from typing import Any

import jax

from vit_jax.models import fields, heads
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

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    fields.check_only(
      self,
      'DeiT',
      pool=('cls',),
      representation_size=(0,),
      norm_pooled=(False,),  # would normalise the class token only
    )

  def classify(self, aux: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    """Returns the mean logits BC, and `aux` extended by each token's logits."""
    C, bias = self.num_classes, self.head_bias
    cls_BC = heads.classifier(aux['pre_logits'], C, bias)
    dist_BC = heads.classifier(aux['tokens'][:, 1], C, bias, 'head_dist')
    each = {'logits_cls': cls_BC, 'logits_dist': dist_BC}
    return (cls_BC + dist_BC) / 2, aux | each
