"""A ViT that predicts corrupted patches (section 4.6, appendix B.1.2).

Some patches are corrupted after the embedding of equation 1. A linear layer on
each patch's output predicts the patch's colours.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.fields import field
from vit_jax.models.vit import ViT

Array = jax.Array

TARGETS = ('mean_colour', 'downsized', 'pixels')
# Number of mean colours: red, green and blue have 8 values each.
COLOURS = 512
# Side in pixels of a downsized patch.
SMALL = 4
# Kinds of patches. The model does not predict KEPT patches. It predicts MASKED
# patches, which the mask token replaces; OTHER patches, which another patch
# replaces; and SAME patches, which stay unchanged.
KEPT, MASKED, OTHER, SAME = range(4)


class MaskedViT(ViT):
  """Maps images and their corruption to a prediction for every patch."""

  kind = 'masked_vit'
  task_params = ('mask_embedding', 'prediction')

  target: str = field(
    'mean_colour',
    "Prediction target of a patch: its 'mean_colour', one of 512; the colours "
    "of the patch 'downsized' to 4 x 4; or its normalised 'pixels'.",
    valid=TARGETS,
  )

  @property
  def task(self) -> str:
    return 'patches'

  def outputs(self, outputs: Array, aux: Mapping[str, Any]) -> dict[str, Array]:
    del aux
    return {'predictions': outputs}

  def prediction_shape(self, side: int) -> tuple[int, ...]:
    """Returns the shape of the prediction for a patch of `side` pixels."""
    return {
      'mean_colour': (COLOURS,),
      'downsized': (SMALL * SMALL, COLOURS),
      'pixels': (side * side * 3,),
    }[self.target]

  def side(self, image_size: tuple[int, int]) -> int:
    """Returns the side in pixels of the image area that a token covers."""
    return image_size[0] // self.grid(image_size)[0]

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    if self.target == 'downsized' and self.side(image_size) % SMALL:
      raise ValueError(
        f'Patches of {self.side(image_size)} pixels cannot be downsized to '
        f'{SMALL} x {SMALL}: choose a multiple of {SMALL} as patch size, or '
        'another objective.target.'
      )
    if (
      self.pool not in ('cls', 'gap')
      or self.representation_size
      or self.num_classes
    ):
      raise ValueError(
        f'model.pool is {self.pool!r} and model.representation_size is '
        f'{self.representation_size}: masked patches do not train a head. Set '
        'model.pool to cls or gap and model.representation_size to 0.'
      )
    if self.grid(image_size) == (1, 1):
      raise ValueError(
        'The image is a single patch, so there are no other patches to predict '
        'it from. Choose a smaller model.patch_size or a larger '
        'data.image_size.'
      )

  def describe(self, image_size: tuple[int, int]) -> str:
    return f'{super().describe(image_size)}, predicting {self.target}'

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

    Args:
      images_BHWC: images in [-1, 1].
      train: see `ViT`.
      capture: see `ViT`.
      corruption: the kind of each patch (`KEPT`, `MASKED`, `OTHER` or `SAME`)
        and, for `OTHER`, the index of the patch that replaces it; both
        integers BL.

    Returns:
      Predictions (B, L, *prediction_shape) of the L patches in float32, and the
      same dict as `ViT`.
    """
    x_BhwD, x_BLD = self.embed(images_BHWC)
    B, h, w, D = x_BhwD.shape
    mask_D = self.param('mask_embedding', nn.initializers.normal(0.02), (D,))
    if corruption is not None:
      x_BLD = self._corrupted(x_BLD, mask_D, *corruption)
    x_BLD, captured = self.encode(x_BLD, (h, w), train=train, capture=capture)
    aux = {
      'stem': x_BhwD,
      **captured,
      'tokens': x_BLD,
      'pre_logits': self.represent(x_BLD),
    }
    shape = self.prediction_shape(images_BHWC.shape[1] // h)
    predicted = nn.DenseGeneral(
      shape, kernel_init=nn.initializers.zeros, name='prediction'
    )(x_BLD[:, -h * w :].astype(jnp.float32))
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
