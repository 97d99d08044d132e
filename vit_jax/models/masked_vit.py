"""A ViT that predicts corrupted patches (section 4.6, appendix B.1.2).

Some patches are corrupted after the embedding of equation 1. A linear layer on
each patch's output predicts the patch's colours.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import fields
from vit_jax.models.fields import field
from vit_jax.models.vit import ViT

Array = jax.Array

TARGETS = ('mean_colour', 'downsized', 'pixels')
# Number of mean colours: red, green and blue have 8 values each.
COLOURS = 512
# Side in pixels of a downsized patch.
SMALL = 4
# Kinds of patches. The loss ignores KEPT patches. It covers MASKED patches,
# which the mask token replaces; OTHER patches, which another patch replaces;
# and SAME patches, which stay unchanged.
KEPT, MASKED, OTHER, SAME = range(4)


class PatchViT(ViT):
  """Base of ViTs that predict hidden patches of an image from other patches."""

  task = 'patches'

  def outputs(self, outputs: Array, aux: Mapping[str, Any]) -> dict[str, Array]:
    return {'predictions': outputs}

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    fields.check_only(
      self,
      'the prediction of patches',
      pool=('cls', 'gap'),
      norm_pooled=(False,),
      representation_size=(0,),
      num_classes=(0,),
    )
    if self.grid(image_size) == (1, 1):
      raise ValueError(
        'The image is a single patch, so there are no other patches to predict '
        'it from. Use a smaller model.patch_size or a larger data.image_size.'
      )


class MaskedViT(PatchViT):
  """Maps images and their corruption to a prediction for every patch."""

  kind = 'masked_vit'
  task_params = ('mask_embedding', 'prediction')

  target: str = field(
    'mean_colour',
    "Prediction target of a patch: its 'mean_colour', one of 512; the colours "
    "of the patch 'downsized' to 4 x 4; or its normalised 'pixels'.",
    valid=TARGETS,
  )

  def prediction_shape(self, side: int) -> tuple[int, ...]:
    """Returns the shape of the prediction for a patch of `side` pixels."""
    return {
      'mean_colour': (COLOURS,),
      'downsized': (SMALL * SMALL, COLOURS),
      'pixels': (side * side * 3,),
    }[self.target]

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    side = image_size[0] // self.grid(image_size)[0]
    if self.target == 'downsized' and side % SMALL:
      raise ValueError(
        f'Patches of {side} pixels cannot be downsized to {SMALL} x {SMALL}: '
        f'choose a multiple of {SMALL} as patch size, or another '
        'objective.target.'
      )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
    corruption: tuple[Array, Array] | None = None,
  ) -> tuple[Array, dict[str, Any]]:
    """Predicts every patch.

    `ViT` documents the other arguments.

    Args:
      corruption: the kind of each patch (`KEPT`, `MASKED`, `OTHER` or `SAME`)
        and, for `OTHER`, the index of the patch that replaces it; both
        integers BL.

    Returns:
      Predictions (B, L, *prediction_shape) of the L patches in float32, and the
      same dict as `ViT`.
    """
    x_BhwD, x_BLD = self.embed(images_BHWC)
    _, h, w, D = x_BhwD.shape
    mask_D = self.param('mask_embedding', nn.initializers.normal(0.02), (D,))
    if corruption is not None:
      x_BLD = self._corrupted(x_BLD, mask_D, *corruption)
    aux = self.encode(x_BhwD, x_BLD, train=train, capture=capture)
    shape = self.prediction_shape(images_BHWC.shape[1] // h)
    predicted = nn.DenseGeneral(
      shape, kernel_init=nn.initializers.zeros, name='prediction'
    )(aux['tokens'][:, -h * w :].astype(jnp.float32))
    return predicted, aux

  def _corrupted(
    self, x_BLD: Array, mask_D: Array, kind_BL: Array, other_BL: Array
  ) -> Array:
    """Replaces the tokens of `MASKED` and `OTHER` patches."""
    extra = len(self.extra_tokens)
    patches_BLD = x_BLD[:, extra:]
    others_BLD = jnp.take_along_axis(patches_BLD, other_BL[..., None], axis=1)
    kind_BL1 = kind_BL[..., None]
    patches_BLD = jnp.where(
      kind_BL1 == MASKED,
      mask_D.astype(x_BLD.dtype),
      jnp.where(kind_BL1 == OTHER, others_BLD, patches_BLD),
    )
    return jnp.concatenate([x_BLD[:, :extra], patches_BLD], axis=1)
