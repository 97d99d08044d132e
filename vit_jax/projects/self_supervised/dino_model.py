"""The model of DINO (2104.14294): a ViT and a projection head."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.fields import field
from vit_jax.models.vit import ViT

Array = jax.Array


class Projection(nn.Module):
  """The projection head (appendix C): an MLP and a weight-normalised layer.

  The output of three dense layers is scaled to length 1. The logits are its dot
  products with K vectors. These have length 1, or learned lengths with `scale`.
  """

  outputs: int  # K
  hidden: int
  bottleneck: int
  scale: bool
  batch_norm: bool
  dtype: Any

  @nn.compact
  def __call__(self, y_BD: Array) -> Array:
    """Returns the logits BK in float32."""
    init = nn.initializers.truncated_normal(0.02)
    for i, width in enumerate((self.hidden, self.hidden, self.bottleneck)):
      if i:
        if self.batch_norm:
          y_BD = standardize(y_BD)
        y_BD = nn.gelu(y_BD, approximate=False)
      y_BD = nn.Dense(
        width, dtype=self.dtype, kernel_init=init, name=f'layer_{i}'
      )(y_BD)
    kernel_DK = self.param(
      'kernel', nn.initializers.lecun_normal(), (self.bottleneck, self.outputs)
    )
    logits_BK = unit(y_BD, axis=1) @ unit(kernel_DK, axis=0)
    if self.scale:
      scale_K = self.param('scale', nn.initializers.ones, (self.outputs,))
      logits_BK *= scale_K[None]
    return logits_BK


def standardize(y_BD: Array) -> Array:
  """Gives each column of a batch the mean 0 and the variance 1, in float32."""
  y_BD = y_BD.astype(jnp.float32)
  centred_BD = y_BD - jnp.mean(y_BD, axis=0, keepdims=True)
  variance_1D = jnp.mean(jnp.square(centred_BD), axis=0, keepdims=True)
  return centred_BD * jax.lax.rsqrt(variance_1D + 1e-5)


def unit(x: Array, axis: int) -> Array:
  """Scales vectors along an axis to length 1, in float32; zeros stay zero."""
  x = x.astype(jnp.float32)
  square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


class DINOViT(ViT):
  """Maps images to representations and, for training, to K logits."""

  kind = 'dino_vit'
  task_params = (*ViT.task_params, 'projection')
  flop_capture = ('projected',)
  after_layers = f'{ViT.after_layers}|^projection/'

  prototypes: int = field(65536, 'K, outputs of the head.', valid='[2, inf)')
  hidden: int = field(2048, 'Hidden width of the head.', valid='[1, inf)')
  bottleneck: int = field(256, 'Width of the bottleneck.', valid='[1, inf)')
  last_scale: bool = field(False, 'Learn the lengths of the prototypes.')
  batch_norm: bool = field(
    False,
    "Standardise the head's hidden layers over the views of one size, which "
    'keeps hybrids from collapsing. The loss on the test split then depends on '
    'its batches. The authors standardise over all views.',
  )

  @nn.compact
  def __call__(
    self,
    images_BHWC: Array,
    *,
    train: bool = False,
    capture: tuple[str, ...] = (),
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the representations BD, and the same dict as `ViT`.

    `capture` may also contain 'projected', for the logits BK in float32.
    """
    of_body = tuple(name for name in capture if name != 'projected')
    x_BhwD, x_BLD = self.embed(images_BHWC)
    aux = self.encode(x_BhwD, x_BLD, train=train, capture=of_body)
    y_BD = aux['pre_logits']
    if 'projected' in capture or self.is_initializing():
      aux['projected'] = Projection(
        self.prototypes,
        self.hidden,
        self.bottleneck,
        self.last_scale,
        self.batch_norm,
        self.dtype,
        name='projection',
      )(y_BD)
    return y_BD, aux
