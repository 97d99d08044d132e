"""The layers of DETR's encoder and decoder (2005.12872, appendix A.3).

Norms come after the sums. Q is the number of queries; the other dimension
letters are those of `layers`.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from vit_jax.models.layers import MultiHeadAttention, constrain, dropout
from vit_jax.models.model import Partitions

Array = jax.Array

PARTITIONS: Partitions = (
  (r'linear1/kernel$', ('fsdp', 'tensor')),
  (r'linear1/bias$', ('tensor',)),
  (r'linear2/kernel$', (('tensor', 'fsdp'), None)),
)
# Of LayerNorm.
EPSILON = 1e-5


class PostNormLayer(nn.Module):
  """What layers of encoder and decoder share: a norm after every sum.

  Attributes:
    heads: N.
    mlp_dim: M.
    dropout: rate after attention's softmax, after every branch and in the MLP.
    dtype: of the computation.
    capture: as the model's `__call__` has it.
  """

  heads: int
  mlp_dim: int
  dropout: float
  dtype: Any
  capture: tuple[str, ...] = ()

  def attend(
    self,
    name: str,
    norm: str,
    queries: tuple[Array, Array],
    seen: tuple[Array, Array],
    mask_B1L: Array | None,
    key: Array | None,
  ) -> tuple[Array, Array | None]:
    """Returns the queries after attention, and its weights or None.

    Queries BQD and what is seen, BLD, come with their positions, which are
    added to queries and keys and not to values.
    """
    (x_BQD, places_BQD), (seen_BLD, seen_places_BLD) = queries, seen
    key_weights, key_branch = _split(key, 2)
    y_BQD, weights_BNQL = MultiHeadAttention(
      self.heads,
      dtype=self.dtype,
      weights='attention' in self.capture,
      dropout=self.dropout,
      name=name,
    )(
      x_BQD + places_BQD,
      seen_BLD + seen_places_BLD,
      seen_BLD,
      mask_B1L,
      key=key_weights,
    )
    y_BQD = x_BQD + dropout(y_BQD, self.dropout, key_branch)
    return self.norm(y_BQD, norm), weights_BNQL

  def mlp(self, x_BLD: Array, norm: str, key: Array | None) -> Array:
    """Returns the tokens after the MLP."""
    key_hidden, key_branch = _split(key, 2)
    init: dict[str, Any] = {
      'kernel_init': nn.initializers.xavier_uniform(),
      'dtype': self.dtype,
    }
    y_BLM = nn.relu(nn.Dense(self.mlp_dim, name='linear1', **init)(x_BLD))
    y_BLM = dropout(y_BLM, self.dropout, key_hidden)
    y_BLD = nn.Dense(x_BLD.shape[-1], name='linear2', **init)(y_BLM)
    y_BLD = dropout(y_BLD, self.dropout, key_branch)
    return self.norm(x_BLD + y_BLD, norm)

  def norm(self, x: Array, name: str) -> Array:
    """Returns LayerNorm of the last dimension."""
    return nn.LayerNorm(EPSILON, dtype=self.dtype, name=name)(x)


class EncoderLayer(PostNormLayer):
  """Attention among the places of a feature map, then an MLP."""

  @nn.compact
  def __call__(
    self,
    x_BLD: Array,
    key: Array | None,
    places_BLD: Array,
    mask_B1L: Array | None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the tokens after this layer and what `capture` names of it."""
    key_attention, key_mlp = _split(key, 2)
    x = constrain(x_BLD, 'BLD'), places_BLD
    x_BLD, weights_BNLL = self.attend(
      'self_attn', 'norm1', x, x, mask_B1L, key_attention
    )
    x_BLD = self.mlp(x_BLD, 'norm2', key_mlp)
    found = {'attention': weights_BNLL, 'blocks': x_BLD}
    return x_BLD, {name: found[name] for name in self.capture}


class DecoderLayer(PostNormLayer):
  """Attention among queries, from them to the encoded image, then an MLP."""

  @nn.compact
  def __call__(
    self,
    x_BQD: Array,
    key: Array | None,
    queries_1QD: Array,
    memory_BLD: Array,
    places_BLD: Array,
    mask_B1L: Array | None,
  ) -> tuple[Array, dict[str, Any]]:
    """Returns the queries' tokens after this layer, captured as `outputs` too.

    `queries_1QD` are what the queries have for positions, the same for all
    images, as `places_BLD` may be.
    """
    key_self, key_cross, key_mlp = _split(key, 3)
    x = constrain(x_BQD, 'BLD'), queries_1QD
    x_BQD, _ = self.attend('self_attn', 'norm1', x, x, None, key_self)
    x_BQD, weights_BNQL = self.attend(
      'multihead_attn',
      'norm2',
      (x_BQD, queries_1QD),
      (memory_BLD, places_BLD),
      mask_B1L,
      key_cross,
    )
    x_BQD = self.mlp(x_BQD, 'norm3', key_mlp)
    found: dict[str, Array | None] = {'outputs': x_BQD}
    if 'attention' in self.capture:
      found['decoder_attention'] = weights_BNQL
    return x_BQD, found


def _split(key: Array | None, n: int) -> Sequence[Array | None]:
  return [None] * n if key is None else list(jax.random.split(key, n))
