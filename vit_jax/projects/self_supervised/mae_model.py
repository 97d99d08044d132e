"""The model of masked autoencoders (MAE, 2111.06377).

The encoder is a ViT that sees only the visible patches. A small decoder sees
the encoder's outputs and a learned mask token for each hidden patch.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import layers
from vit_jax.models.encoder import Encoder
from vit_jax.models.fields import check_only, field
from vit_jax.models.masked_vit import PatchViT

Array = jax.Array


class Decoder(nn.Module):
  """Maps the encoder's tokens to the pixels of every patch."""

  fields: layers.EncoderFields
  pixels: int  # X, values per patch

  @nn.compact
  def __call__(
    self, x_BKD: Array, grid: tuple[int, int], order_BL: Array, extra: int
  ) -> Array:
    """Returns the predicted pixels BLX in float32, patches in raster order.

    `order_BL` is a permutation of the patches of the grid (h, w). `x_BKD` are
    the encoder's outputs: first the class token and registers, whose number is
    `extra`, then the visible patches in the order of `order_BL`.
    """
    f = self.fields
    B, L = order_BL.shape
    x_BKD = nn.Dense(f.width, dtype=f.dtype, name='embedding')(x_BKD)
    mask_D = self.param(
      'mask_embedding', nn.initializers.normal(0.02), (f.width,)
    )
    hidden = L + extra - x_BKD.shape[1]
    mask_BXD = jnp.broadcast_to(mask_D.astype(f.dtype), (B, hidden, f.width))
    patches_BLD = jnp.concatenate([x_BKD[:, extra:], mask_BXD], axis=1)
    raster_BL1 = jnp.argsort(order_BL, axis=1)[..., None]
    patches_BLD = jnp.take_along_axis(patches_BLD, raster_BL1, axis=1)
    x_BLD = jnp.concatenate([x_BKD[:, :extra], patches_BLD], axis=1)
    x_BLD, _ = Encoder(f, name='Transformer')(x_BLD, grid)
    return nn.Dense(
      self.pixels,
      kernel_init=nn.initializers.xavier_uniform(),
      name='prediction',
    )(x_BLD[:, extra:].astype(jnp.float32))


class MAEViT(PatchViT):
  """Maps images and an order of their patches to the pixels of all patches."""

  kind = 'mae_vit'
  task_params = ('decoder',)
  after_layers = f'{PatchViT.after_layers}|^decoder/'
  cast_params = (r'^(decoder/)?Transformer/.*/kernel$',)

  decoder_width: int = field(
    512, 'Width of the decoder.', valid='[4, inf)', multiple=4
  )
  decoder_depth: int = field(8, 'Layers of the decoder.', valid=layers.DEPTHS)
  decoder_heads: int = field(16, 'Heads of the decoder.', valid='[1, inf)')

  @property
  def decoder_fields(self) -> layers.EncoderFields:
    return dataclasses.replace(
      self.encoder_fields,
      width=self.decoder_width,
      depth=self.decoder_depth,
      heads=self.decoder_heads,
      mlp_dim=4 * self.decoder_width,
      posemb='sincos2d',
      registers=0,
      pre_norm=False,
      final_norm=True,
      norm_pooled=False,
      dropout=0.0,
      stochastic_depth=0.0,
    )

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    layers.check_heads(self.decoder_fields, 'objective.decoder_')
    check_only(
      self,
      'a masked autoencoder',
      posemb=('learned1d', 'learned2d', 'sincos2d'),
      posemb_at=('input',),
      axial=(False,),
      rope=(0.0,),
      stem_width=(0,),
    )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
    order_BL: Array | None = None,
    visible: int = 0,
  ) -> tuple[Array, dict[str, Any]]:
    """Predicts every patch.

    `ViT` documents the other arguments.

    Args:
      order_BL: a permutation of the patches of each image; None if the encoder
        sees all patches.
      visible: number of patches at the start of `order_BL` that the encoder
        sees.

    Returns:
      Predicted pixels BLX in float32, where X is (row, column, RGB) of a patch,
      flattened; and the dict of `ViT`. Its `tokens` are the class token and
      registers, then the visible patches in the order of `order_BL`.
    """
    x_BhwD, x_BLD = self.embed(images_BHWC)
    B, h, w, _ = x_BhwD.shape
    visible_BK = None if order_BL is None else order_BL[:, :visible]
    aux = self.encode(
      x_BhwD, x_BLD, train=train, capture=capture, visible_BK=visible_BK
    )
    if order_BL is None:
      order_BL = jnp.broadcast_to(jnp.arange(h * w)[None], (B, h * w))
    decoder = Decoder(
      self.decoder_fields, 3 * self.patch_size**2, name='decoder'
    )
    extra = len(self.extra_tokens)
    return decoder(aux['tokens'], (h, w), order_BL, extra), aux
