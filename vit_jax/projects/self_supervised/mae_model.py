"""The model of masked autoencoders (MAE, arXiv 2111.06377).

The encoder, a ViT, sees the visible patches alone. A small decoder sees its
outputs and a learned mask token for each hidden patch, all with positions, and
predicts the pixels of every patch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import layers
from vit_jax.models.encoder import Encoder
from vit_jax.models.fields import field
from vit_jax.models.vit import ViT

Array = jax.Array


class Decoder(nn.Module):
  """From the encoder's tokens to the pixels of every patch."""

  fields: layers.EncoderFields
  pixels: int

  @nn.compact
  def __call__(
    self, x_BKD: Array, grid: tuple[int, int], order_BL: Array, extra: int
  ) -> Array:
    """Returns the predicted pixels BLX in float32, patches in raster order.

    `x_BKD` has `extra` tokens and then the first patches of `order_BL`.
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


class MAEViT(ViT):
  """Images and the order of their patches to predictions for every patch."""

  kind: ClassVar[str] = 'mae_vit'
  task_params: ClassVar[tuple[str, ...]] = ('decoder',)
  after_layers: ClassVar[str] = f'{ViT.after_layers}|^decoder/'
  cast_params: ClassVar[tuple[str, ...]] = (
    r'^(decoder/)?Transformer/.*/kernel$',
  )

  decoder_width: int = field(
    512, "The decoder's D.", valid='[4, inf)', multiple=4
  )
  decoder_depth: int = field(8, "The decoder's layers.", valid=layers.DEPTHS)
  decoder_heads: int = field(16, "The decoder's N.", valid='[1, inf)')

  @property
  def task(self) -> str:
    return 'patches'

  @property
  def decoder_fields(self) -> layers.EncoderFields:
    """The fields of the decoder's layers."""
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

  def outputs(self, outputs: Array, aux: Mapping[str, Any]) -> dict[str, Array]:
    del aux
    return {'predictions': outputs}

  def check(self, image_size: tuple[int, int]) -> None:
    super().check(image_size)
    layers.check_heads(self.decoder_fields)
    for name, only in (
      ('posemb', ('learned1d', 'learned2d', 'sincos2d')),
      ('posemb_at', ('input',)),
      ('axial', (False,)),
      ('rope', (0.0,)),
      ('stem_width', (0,)),
      ('pool', ('cls', 'gap')),
      ('representation_size', (0,)),
      ('num_classes', (0,)),
    ):
      if (value := getattr(self, name)) not in only:
        raise ValueError(
          f'model.{name} is {value!r}: the encoder of a masked autoencoder '
          'sees some patches alone, with positions added at the input, and '
          f'trains no head. Use {" or ".join(map(repr, only))}.'
        )
    if self.grid(image_size) == (1, 1):
      raise ValueError(
        'The image is a single patch, with no other to predict it from. Choose '
        'a smaller model.patch_size or a larger data.image_size.'
      )

  def describe(self, image_size: tuple[int, int]) -> str:
    return (
      f'{super().describe(image_size)}, a decoder of {self.decoder_depth} '
      f'layers of {self.decoder_heads} heads, width {self.decoder_width}'
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

    Args:
      images_BHWC: images in [-1, 1].
      train: whether to drop out, which needs the random key 'dropout'.
      capture: as `ViT` takes it.
      order_BL: a permutation of the patches of each image, by number.
      visible: how many patches of `order_BL` the encoder sees, the first ones;
        without an order it sees all.

    Returns:
      Predicted pixels BLX in float32, rows, columns and RGB of each patch, and
      a dict as that of `ViT`.
    """
    x_BhwD, x_BLD = self.embed(images_BHWC)
    B, h, w, _ = x_BhwD.shape
    visible_BK = None if order_BL is None else order_BL[:, :visible]
    x_BLD, captured = self.encode(
      x_BLD, (h, w), train=train, capture=capture, visible_BK=visible_BK
    )
    aux = {
      'stem': x_BhwD,
      **captured,
      'tokens': x_BLD,
      'pre_logits': self.represent(x_BLD),
    }
    if order_BL is None:
      order_BL = jnp.broadcast_to(jnp.arange(h * w)[None], (B, h * w))
    decoder = Decoder(
      self.decoder_fields, 3 * self.patch_size**2, name='decoder'
    )
    extra = len(self.extra_tokens)
    return decoder(x_BLD, (h, w), order_BL, extra), aux
