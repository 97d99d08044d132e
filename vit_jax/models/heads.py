"""Pooling and classification heads (ViT paper, section 3.1, appendix D.3)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import layers
from vit_jax.models.model import Partitions

PARTITIONS: Partitions = (
  (r'head(_dist|_rotation|_next)?/kernel$', ('fsdp', None)),
)


class MAPHead(nn.Module):
  """Multi-head attention pooling: a learned probe attends to tokens.

  "Scaling Vision Transformers" (2106.04560) uses this head, which comes from
  Set Transformer. Parameters have the names of the big_vision files.
  """

  fields: layers.EncoderFields

  @nn.compact
  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    """Returns the pooled vectors BD."""
    f = self.fields
    B, _, D = x_BLD.shape
    probe_11D = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, D))
    y_B1D, _ = layers.MultiHeadAttention(
      f.heads, dtype=f.dtype, name='MultiHeadDotProductAttention_0'
    )(jnp.broadcast_to(probe_11D, (B, 1, D)), x_BLD)
    y_B1D = y_B1D + layers.MlpBlock(
      f.mlp_dim, f.gelu, dtype=f.dtype, name='MlpBlock_0'
    )(layers.norm(y_B1D, f, 'LayerNorm_0'))
    return y_B1D[:, 0]


def classifier(
  y_BD: jax.Array, num_classes: int, head_bias: float, name: str = 'head'
) -> jax.Array:
  """Returns logits BC of a linear layer with a zero-initialised kernel.

  Computes in float32 even if `y_BD` is bfloat16, because bfloat16 logits have
  too few digits for a loss over thousands of classes.
  """
  logits_BC = nn.Dense(
    num_classes,
    kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.constant(head_bias),
    name=name,
  )(layers.constrain(y_BD.astype(jnp.float32), 'BD'))
  return layers.constrain(logits_BC, 'BC')
