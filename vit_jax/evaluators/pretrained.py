"""Predictions, features and attention maps of a checkpoint.

  import vit_jax
  vit = vit_jax.load('runs/mine')          # see opening.open_checkpoint
  vit.predict(['a.jpg', 'b.jpg'], topk=1)  # [[('dog', 0.97)], [('cat', 0.99)]]
  vit.logits(images)                       # BC
  vit.features(images, layer='block_3')    # BD
  vit.features(images, patches=True)       # BhwD
  vit.attention(images)                    # a list of BNLL, one per layer
  vit.rollout(images, of='dog')            # Bhw

An image is a path, a Pillow image or a uint8 array HWC of any size. All methods
take one image, a list of images or an array BHWC, and apply the checkpoint's
preprocessing. Methods raise UnreadableImage by default; `stream` yields it. For
an empty list, all methods raise ValueError.
"""

import os
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.data import decode
from vit_jax.models.fields import check_value
from vit_jax.training import features
from vit_jax.visualize import attention_maps
from vit_jax.visualize import rollout as rollout_lib

# Batches are padded to one of these sizes, because each new size is compiled.
_BATCH_SIZES = (1, 4, 16, 32)


def load(path: str | os.PathLike) -> 'TrainedModel':
  """Opens any checkpoint; see `opening.open_checkpoint`."""
  return TrainedModel(opening.open_checkpoint(path))


class TrainedModel:
  """A trained model with its preprocessing and class names.

  Attributes:
    checkpoint: the opened checkpoint.
    class_names: C names; may be empty.
    image_size: (H, W) of preprocessed images.
  """

  def __init__(self, checkpoint: opening.Checkpoint):
    """Takes an opened checkpoint."""
    self.checkpoint = checkpoint
    self.class_names = checkpoint.class_names
    self.image_size = checkpoint.image_size
    self._layers: dict[tuple[str, bool], Any] = {}

  def __repr__(self) -> str:
    place, text = self.checkpoint.path, self.checkpoint.describe()
    return f'TrainedModel({place!r}: {text})'

  def predict(
    self, images: Any, topk: int = 5, on_bad_image: str = 'error'
  ) -> list[list[tuple[str, float]]]:
    """Returns the likeliest classes of each image, the likeliest first.

    The list of an image has `topk` pairs (name, probability), or fewer if there
    are fewer classes. Names are those of `Checkpoint.class_name`.
    Probabilities are the softmax of the logits, or their sigmoid if the model
    was trained with the sigmoid loss.

    If `on_bad_image` is 'skip', the list of an unreadable image is empty.

    Raises:
      UnreadableImage: if an image is unreadable and `on_bad_image` is 'error'.
      ValueError: if an argument is invalid, the model does not classify images,
        or a logit is not finite.
    """
    check_value('on_bad_image', on_bad_image, ('error', 'skip'))
    found = self.stream(images, topk)
    if on_bad_image == 'error':
      return list(map(_readable, found))
    return [x if isinstance(x, list) else [] for x in found]

  def stream(
    self, images: Any, topk: int = 5
  ) -> Iterator[list[tuple[str, float]] | decode.UnreadableImage]:
    """Yields the list of `predict` for each image, or an UnreadableImage."""
    if topk < 1:
      raise ValueError(f'topk is {topk}; it must be 1 or more.')
    for logits_C in self._logits(images):
      if isinstance(logits_C, decode.UnreadableImage):
        yield logits_C
        continue
      p_C = np.asarray(self.checkpoint.probabilities(logits_C))
      most_k = np.argsort(-p_C, kind='stable')[:topk]
      yield [(self.checkpoint.class_name(c), float(p_C[c])) for c in most_k]

  def logits(self, images: Any) -> np.ndarray:
    """Returns logits, float32 BC.

    Raises ValueError if the model does not classify images, or a logit is not
    finite.
    """
    return np.stack([*map(_readable, self._logits(images))])

  def _logits(self, images: Any) -> Iterator[Any]:
    if not self.checkpoint.model.num_classes:
      raise ValueError(f'{self.checkpoint.path} has no head. Use features().')
    features.check_classifies(self.checkpoint.model)
    found = self._each(images, self.checkpoint.logits)
    for (_, name), logits_C in zip(_listed(images), found, strict=True):
      if not isinstance(logits_C, decode.UnreadableImage):
        self.checkpoint.check_finite(logits_C, name)
      yield logits_C

  def features(
    self, images: Any, layer: str = 'pre_logits', patches: bool = False
  ) -> np.ndarray:
    """Returns the representation at a layer (see `features.layer`), float32 BD.

    With `patches`, returns the tokens of the patches, BhwD, without the class
    token and registers. 'pre_logits' then means the encoder's output or the
    last feature map, and 'logits' is invalid.

    Raises ValueError if the layer is unknown.
    """
    if (layer, patches) not in self._layers:
      function = features.layer(self.checkpoint.model, layer, patches)
      self._layers[layer, patches] = jax.jit(function)
    return self._all(
      images,
      lambda x: self._layers[layer, patches](
        self.checkpoint.on_device, self.checkpoint.normalize(jnp.asarray(x))
      ),
    )

  def attention(self, images: Any) -> list[Any]:
    """Returns the softmax weights BNLL of each layer, from the first.

    The class token and registers come before the patches.

    Raises ValueError if the model lacks attention between all tokens.
    """
    images_BHWC = self._all(images, np.asarray)
    return [jax.device_get(x) for x in self._layers_of(images_BHWC).attention()]

  def rollout(self, images: Any, of: str | int | None = None) -> np.ndarray:
    """Returns attention rollout Bhw, with a maximum of 1 in each image.

    If `of` is the name or number of a class, the maps explain this class. A map
    is 0 everywhere if no patch reaches the output.

    Raises ValueError if the model lacks attention between all tokens, or `of`
    is unknown, ambiguous, or given for a model that does not classify images.
    """
    number = None if of is None else self.checkpoint.class_index(of)

    def maps(images_BHWC: np.ndarray) -> jax.Array:
      wanted = None if number is None else np.full(len(images_BHWC), number)
      return rollout_lib.rollout(self._layers_of(images_BHWC), class_B=wanted)

    return self._all(images, maps)

  def _layers_of(self, images_BHWC: np.ndarray) -> attention_maps.Layers:
    x_BHWC = self.checkpoint.normalize(jnp.asarray(images_BHWC))
    return attention_maps.Layers(
      self.checkpoint.model, self.checkpoint.on_device, x_BHWC
    )

  def _all(self, images: Any, function: Any) -> np.ndarray:
    return np.stack([*map(_readable, self._each(images, function))])

  def _each(self, images: Any, function: Any) -> Iterator[Any]:
    """Applies a function to batches; yields each image's row or its error."""
    listed, transform = _listed(images), self.checkpoint.transform()
    if not listed:
      raise ValueError('The list of images is empty. Give at least one image.')

    def load(named: tuple[Any, str]) -> np.ndarray | decode.UnreadableImage:
      try:
        return transform.image(_read(*named), named[1])
      except decode.UnreadableImage as e:
        return e

    blank_HWC = np.zeros((*self.image_size, 3), np.uint8)
    with futures.ThreadPoolExecutor() as pool:
      most = _BATCH_SIZES[-1]
      for start in range(0, len(listed), most):
        loaded: list[Any] = list(pool.map(load, listed[start : start + most]))
        size = next(n for n in _BATCH_SIZES if n >= len(loaded))
        filled = [x if isinstance(x, np.ndarray) else blank_HWC for x in loaded]
        filled += [blank_HWC] * (size - len(filled))
        rows = np.asarray(function(np.stack(filled)))
        for image, row in zip(loaded, rows, strict=False):
          yield row if isinstance(image, np.ndarray) else image


def _readable(found: Any) -> Any:
  if isinstance(found, decode.UnreadableImage):
    raise found
  return found


def _listed(images: Any) -> list[tuple[Any, str]]:
  """Returns one or many images as a list of (image, name for messages)."""
  is_batch = isinstance(images, list | tuple) or (
    getattr(images, 'ndim', 0) == 4
  )
  return [
    (x, os.fspath(x) if isinstance(x, str | os.PathLike) else f'number {i}')
    for i, x in enumerate(images if is_batch else [images])
  ]


def _read(image: Any, name: str) -> bytes | np.ndarray:
  """Returns the argument for `transform.image`: bytes or an array."""
  if isinstance(image, str | os.PathLike):
    return decode.read_file(name)
  if hasattr(image, 'convert'):  # a Pillow image
    with decode.naming_errors(name):
      image = decode.from_pillow(image)
  pixels = np.asarray(image)
  if pixels.dtype.kind in 'OSU':
    raise TypeError(
      f'Image {name} is a {type(image).__name__}. Give a path, a Pillow image '
      'or an array, or a list of them.'
    )
  return pixels
