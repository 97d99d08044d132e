"""Computes features of every image of a source, as NumPy arrays."""

import collections
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import cores
from vit_jax.data.images import Images
from vit_jax.data.sources import Record, Source
from vit_jax.models.model import Model
from vit_jax.training import preemption, sharding

# Maps parameters and normalised images BHWC to an array with B rows.
Function = Callable[[Any, jax.Array], jax.Array]


def global_batches(
  source: Source,
  transform: Callable[[Record], Any],
  *,
  mesh: jax.sharding.Mesh,
  **kwargs: int,
) -> Iterator[dict[str, jax.Array]]:
  """Yields the batches of `loader.eval_batches` as global arrays.

  Raises UnreadableImage as `eval_batches` does, and Preempted after SIGTERM or
  Ctrl-C inside a `preemption_notice`.
  """
  from vit_jax.data import loader  # imports Grain; `predict` does not need it

  index, count = sharding.batch_share(mesh)
  for batch in loader.eval_batches(
    source, transform, process_index=index, process_count=count, **kwargs
  ):
    preemption.end_evaluation()
    yield sharding.global_batch(batch, mesh)


def fetched(outputs: Iterable[Any], ahead: int) -> Iterator[Any]:
  """Yields outputs as NumPy arrays; meanwhile devices compute `ahead` more."""
  pending: collections.deque[Any] = collections.deque()
  for output in outputs:
    pending.append(output)
    if len(pending) > ahead:
      yield jax.device_get(pending.popleft())
  yield from map(jax.device_get, pending)


def layer(model: Model, name: str, patches: bool = False) -> Function:
  """Returns the function that computes a layer's representation, float32 BD.

  The name is 'pre_logits' (the input of the head), 'logits' or 'block_N'. N is
  the number of a layer, or of a ResNet's stage, from 0. A block gives the class
  token of the layer's output. Without a class token, it gives the mean over the
  patches or over the feature map.

  With `patches`, the function computes each patch's representation, BhwD.
  'pre_logits' then means the encoder's output tokens or the last feature map.

  Raises:
    ValueError: if the layer is unknown, or is 'logits' with `patches`.
  """
  match = re.fullmatch(r'block_(\d+)', name)
  is_block = match and int(match[1]) < model.num_blocks
  if not is_block and name not in model.vectors:
    known = *model.vectors, f'block_0 to block_{model.num_blocks - 1}'
    raise ValueError(
      f'layer is {name!r}. For a {type(model).__name__} use one of '
      f'{", ".join(known)}.'
    )
  if patches and name == 'logits':
    raise ValueError(
      f'layer {name!r} of a {type(model).__name__} has no patches: use '
      'pre_logits, or a block such as block_0.'
    )
  captured = {'capture': ('blocks',)} if match else {}

  def function(params: Any, images_BHWC: jax.Array) -> jax.Array:
    apply: Any = model.apply
    logits_BC, aux = apply({'params': params}, images_BHWC, **captured)
    if match:
      x = aux['blocks'][int(match[1])]
      x = x if patches else model.pool_block(x)
    elif patches:
      x = aux['tokens']
    else:
      x = logits_BC if name == 'logits' else aux['pre_logits']
    if patches and x.ndim == 3:  # the stages of a ResNet are already a grid
      _, H, W, _ = images_BHWC.shape
      x = x[:, len(model.extra_tokens) :].reshape(
        len(x), *model.grid((H, W)), -1
      )
    return x.astype(jnp.float32)

  return function


def check_classifies(model: Model) -> None:
  """Raises ValueError if a model does not classify whole images."""
  if 'logits' not in model.vectors:
    what = f'predicts {model.task}' if model.num_classes else 'has no head'
    raise ValueError(
      f'This model, a {type(model).__name__}, {what} and does not classify '
      'whole images. Give the checkpoint of a classifier.'
    )


def top_k(model: Model, k: int) -> Function:
  """Returns the function that computes the k likeliest classes, int32 Bk.

  The row of an image is -2 if one of its logits is not finite. Raises
  ValueError if the model does not classify images.
  """
  check_classifies(model)

  def function(params: Any, images_BHWC: jax.Array) -> jax.Array:
    logits_BC, _ = model.apply({'params': params}, images_BHWC)
    is_finite_B1 = jnp.isfinite(logits_BC).all(-1, keepdims=True)
    return jnp.where(is_finite_B1, jax.lax.top_k(logits_BC, k)[1], -2)

  return function


class Extractor:
  """Applies a function to every image of a source, on all devices and hosts."""

  def __init__(
    self,
    function: Function,
    images: Images,
    *,
    batch_size: int,
    mesh: jax.sharding.Mesh,
    workers: int = 0,
  ):
    """Jits the function; `batch_size` is the global batch size."""

    def forward(
      params: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
      return function(params, images.normalize(batch['image'])), batch['index']

    # Rows are replicated, so that every process can read all rows.
    self._forward = jax.jit(forward, out_shardings=sharding.replicated(mesh))
    self._batches: dict[str, Any] = {
      'batch_size': batch_size,
      'mesh': mesh,
      'workers': workers,
    }
    self._transform = images.eval_transform()

  def __call__(
    self, params: Any, source: Source, description: str = ''
  ) -> np.ndarray:
    """Returns the rows of all images in the source's order, in every process.

    If `description` is not empty, a progress bar is shown. Raises the errors of
    `batches`.
    """
    rows_NX = np.empty(0)
    for values_BX, index_B in self.batches(params, source, description):
      if not rows_NX.size:
        # Concatenating batches would need memory for all rows twice.
        shape = (len(source), *values_BX.shape[1:])
        rows_NX = np.empty(shape, values_BX.dtype)
      is_image_B = index_B >= 0
      rows_NX[index_B[is_image_B]] = values_BX[is_image_B]
    return rows_NX

  def batches(
    self, params: Any, source: Source, description: str = ''
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields rows BX and image indices B; the index is negative for padding.

    Raises the errors of `global_batches`, and at the end ValueError if images
    have become unreadable since the source was checked.
    """
    count = 0
    shown = cores.progress(
      description,
      len(source),
      'images',
      shown=bool(description) and jax.process_index() == 0,
    )
    batches = global_batches(source, self._transform, **self._batches)
    outputs = (self._forward(params, batch) for batch in batches)
    with shown:
      for values_BX, index_B in fetched(outputs, ahead=2):
        yield values_BX, index_B
        count += (images := int(np.sum(index_B >= 0)))
        shown.update(images)
    if count < len(source):
      raise ValueError(
        f'{len(source) - count} of {len(source)} images have become '
        'unreadable since they were checked. Mend or remove them.'
      )
