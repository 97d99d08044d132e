"""A model's attention, one layer at a time.

The forward pass keeps only the input tokens of each layer. Attention weights
are recomputed from them, so only one layer's weights are in memory at a time.
All weights of ViT-L/16 at 512 pixels take 1.6 GB per image.
"""

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from vit_jax.models import attention
from vit_jax.models.encoder import Encoder
from vit_jax.models.layers import EncoderBlock, Projection
from vit_jax.training import features

Array = jax.Array


class Layers:
  """The attention weights of a ViT for a batch of images.

  Attributes:
    grid: (h, w) of the patch grid.
    read_BL: weight of each token of the last layer in the image's
      representation. It is 1 for a class token (1/2 each for DeiT's class and
      distillation tokens), even if the model also reads the mean of the
      patches. Without class tokens, all patches share it equally. With
      attention pooling, it is the pooling's weight, averaged over heads.
    logits_BC: main output of the model; logits BC of a classifier.
  """

  def __init__(self, model: Any, params: Any, images_BHWC: Array):
    """Runs the model once, on normalised images.

    Raises ValueError if `model.attention` is not 'all'.
    """
    if model.attention != 'all':
      raise ValueError(
        f'This model is a {type(model).__name__}. Attention needs a model in '
        'which every patch attends to every other. Use a ViT or a hybrid that '
        'is not axial.'
      )
    self._model = model.clone(scan=False, remat='none')
    self._params = model.unstack_layers(params)
    self._images_BHWC = images_BHWC
    _, H, W, _ = images_BHWC.shape
    self.grid = model.grid((H, W))
    self.logits_BC, self.read_BL, self._layers, self._last_BLD = _forward(
      self._model, self._params, images_BHWC
    )

  def attention(self) -> Iterator[Array]:
    """Yields the softmax weights BNLL of each layer, from the first."""
    for layer in self._layers:
      params = self._params['Transformer'][layer.name]
      yield _weights(layer.block, params, *layer.inputs)

  def gradients(self, class_B: Array) -> Iterator[tuple[Array, Array]]:
    """Yields weights and gradients BNLL of each layer, from the last.

    The gradient is the derivative of each image's logit of the class `class_B`
    with respect to each attention weight (after the softmax).

    Raises ValueError if the model does not classify images.
    """
    features.check_classifies(self._model)
    dx_BLD = _of_logit(
      self._model, self._last_BLD, self._params, self._images_BHWC, class_B
    )
    for layer in reversed(self._layers):
      params = self._params['Transformer'][layer.name]
      weights, gradients, dx_BLD = _backward(
        layer.block, params, dx_BLD, *layer.inputs
      )
      yield weights, gradients


@struct.dataclass
class _Layer:
  """An encoder layer and its inputs; the dropout key is left out."""

  name: str = struct.field(pytree_node=False)
  block: nn.Module = struct.field(pytree_node=False)
  inputs: tuple[Array | None, ...]


@functools.partial(jax.jit, static_argnums=0)
def _forward(
  model: Any, params: Any, images_BHWC: Array
) -> tuple[Array, Array, list[_Layer], Array]:
  """Returns logits, `read_BL`, the layers, and the output of the last layer."""
  logits_BC, read_BL, calls = _applied(model, params, images_BHWC)
  layers = [
    _Layer(
      module.name,
      module.clone(parent=None, name=None, capture=('attention',)),
      (x_BLD, *others),
    )
    for module, (x_BLD, _, *others), _ in calls
  ]
  _, _, (last_BLD, _) = calls[-1]
  return logits_BC, read_BL, layers, last_BLD


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def _of_logit(
  model: Any, x_BLD: Array, params: Any, images_BHWC: Array, class_B: Array
) -> Array:
  """Returns the gradient of the logits of `class_B` with respect to `x_BLD`."""

  def replace(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    # Layers do not run: each returns `x_BLD`, the last layer's output.
    return (x_BLD, {}) if _is_layer(context) else next_fun(*args, **kwargs)

  with nn.intercept_methods(replace):
    logits_BC, _ = model.apply({'params': params}, images_BHWC)
  return jnp.take_along_axis(logits_BC, class_B[:, None], axis=1).sum()


def run(
  model: Any, params: Any, images_BHWC: Array
) -> tuple[Array, list[Array], Array]:
  """Returns logits BC, the weights BNLL of each layer, and `Layers.read_BL`.

  Exported programs use this function. The layers must not be scanned. `Layers`
  needs less memory.
  """
  logits_BC, read_BL, calls = _applied(
    model, params, images_BHWC, capture=('attention',)
  )
  weights = [captured['attention'] for _, _, (_, captured) in calls]
  return logits_BC, weights, read_BL


def _applied(
  model: Any, params: Any, images_BHWC: Array, **asked: Any
) -> tuple[Array, Array, list[tuple[Any, Any, Any]]]:
  """Returns logits BC, `Layers.read_BL`, and the calls of the layers.

  A call is a tuple of the module, its arguments and its result.
  """
  calls, pooled = [], {}

  def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    result, module = next_fun(*args, **kwargs), context.module
    if _is_layer(context):
      calls.append((module, args, result))
    elif isinstance(module, Projection) and module.path[0] == 'MAPHead_0':
      pooled[module.path[-1]] = result
    return result

  with nn.intercept_methods(note):
    logits_BC, aux = model.apply({'params': params}, images_BHWC, **asked)
  return logits_BC, _read(model, aux['tokens'].shape, pooled), calls


def _read(
  model: Any, shape: tuple[int, ...], pooled: dict[str, Array]
) -> Array:
  """Returns `Layers.read_BL`; `pooled` has a pooling head's query and key."""
  B, L, _ = shape
  extra = len(model.extra_tokens)
  if pooled:
    logits_BN1L = attention.logits(pooled['query'], pooled['key'])
    read_BL = jax.nn.softmax(logits_BN1L)[:, :, 0].mean(1)
    return jnp.pad(read_BL, ((0, 0), (extra, 0)))
  # Class tokens come first, patches last.
  count = model.class_tokens or L - extra
  start = 0 if model.class_tokens else extra
  row_L = jnp.zeros(L).at[start : start + count].set(1 / count)
  return jnp.broadcast_to(row_L, (B, L))


def _is_layer(context: Any) -> bool:
  return (
    isinstance(context.module, EncoderBlock)
    # The model's own encoder has a path of one name; a decoder's is longer.
    and isinstance(context.module.parent, Encoder)
    and len(context.module.parent.path) == 1
    and context.method_name == '__call__'
  )


@functools.partial(jax.jit, static_argnums=0)
def _weights(
  module: Any, params: Any, x_BLD: Array, *others: Array | None
) -> Array:
  _, captured = module.apply({'params': params}, x_BLD, None, *others)
  return captured['attention']


@functools.partial(jax.jit, static_argnums=0)
def _backward(
  module: Any, params: Any, dx_BLD: Array, x_BLD: Array, *others: Array | None
) -> tuple[Array, Array, Array]:
  """Returns a layer's weights, their gradient, and the input's gradient."""

  def run(x_BLD: Array, zeros_BNLL: Array) -> tuple[Array, Array]:
    added = {'MultiHeadDotProductAttention_1': {'weights': zeros_BNLL}}
    variables = {'params': params, 'perturbations': added}
    out_BLD, captured = module.apply(variables, x_BLD, None, *others)
    return out_BLD, captured['attention']

  B, L, _ = x_BLD.shape
  dtype = jnp.promote_types(x_BLD.dtype, jnp.float32)
  zeros_BNLL = jnp.zeros((B, module.fields.heads, L, L), dtype)
  _, vjp, weights_BNLL = jax.vjp(run, x_BLD, zeros_BNLL, has_aux=True)
  dx_BLD, gradients_BNLL = vjp(dx_BLD)
  return weights_BNLL, gradients_BNLL, dx_BLD
