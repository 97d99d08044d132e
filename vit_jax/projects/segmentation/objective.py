"""Semantic segmentation with the cross-entropy of every pixel's class."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.models.model import Batch, Metrics, Params, run
from vit_jax.objectives.objective import OF_CLASSES, Facts, Objective, sums
from vit_jax.projects.segmentation.data import (
  BACKGROUND,
  IGNORED,
  MaskTransform,
)
from vit_jax.projects.segmentation.model import SegmentationViT


@dataclasses.dataclass(frozen=True)
class Segmentation(Objective):
  """Learns the class of each pixel; class 0 is the background.

  Logits of patches are resized bilinearly to the image size.
  """

  unused = {
    **OF_CLASSES,
    'data.augment': '',
    'data.balance': 0.0,
    'data.crop_resize': 0.0,
    'data.resize_small': 0,
  }
  trained = SegmentationViT
  classes = 1

  model: SegmentationViT

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with the classes of the data and the background.

    Raises ValueError for data without classes, or with more than 254.
    """
    names = facts.class_names
    if not 0 < len(names) < IGNORED:
      raise ValueError(
        f'{config.data.name} has {len(names)} classes; segmentation needs 1 to '
        f'{IGNORED - 1}. Give a folder with images/, masks/ and classes.txt, '
        "or with COCO's instances.json."
      )
    names = (BACKGROUND, *names)
    model = self.model.clone(num_classes=len(names))
    return dataclasses.replace(self, model=model, class_names=names)

  def train_transform(self) -> MaskTransform:
    return MaskTransform(
      self.images.train_transform(),
      self.images.eval_transform(),
    )

  # Evaluation calls the transform without a generator.
  eval_transform = train_transform

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    classes = jax.ShapeDtypeStruct((size, *self.images.size), np.uint8)
    return {'image': self.images.batch_shape(size), 'classes': classes}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Normalises images; with `data.flip`, flips images and masks at random.

    Returns:
      `image`: float32 BHWC; `classes`: uint8 BHW; `weights`: float32 BHW, see
      the function `weights`. The mean weight of the whole batch is 1, so that
      the loss does not depend on the number of microbatches.
    """
    images_BHWC = self.images.normalize(batch['image'])
    # The same key flips the same images.
    classes_BHW1 = self.images.flipped(batch['classes'][..., None], key)
    classes_BHW = classes_BHW1[..., 0]
    return {
      'image': self.images.flipped(images_BHWC, key),
      'classes': classes_BHW,
      'weights': weights(classes_BHW, axis=(0, 1, 2)),
    }

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of the pixels that are not ignored, and metrics.

    `pixel_accuracy` is the share of these pixels that are predicted correctly.
    """
    logits_BHWC = self._logits(params, batch['image'], key)
    loss = jnp.mean(batch['weights'] * nats(logits_BHWC, batch['classes']))
    right_BHW = jnp.argmax(logits_BHWC, axis=-1) == batch['classes']
    accuracy = jnp.mean(batch['weights'] * right_BHW)
    return loss, {'loss': loss, 'pixel_accuracy': accuracy}

  def evaluate(self, params: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The loss of an image is the mean over its pixels that are not ignored.
    """
    logits_BHWC = self._logits(params, self.images.normalize(batch['image']))
    weights_BHW = weights(batch['classes'], axis=(1, 2))
    nats_BHW = nats(logits_BHWC, batch['classes'])
    loss_B = jnp.mean(weights_BHW * nats_BHW, axis=(1, 2))
    return sums(batch['mask'], {'loss': loss_B})

  def confusion(self, params: Params, batch: Batch) -> jax.Array:
    """Returns the confusion matrix of pixels, int32 CC; rows are true classes.

    Counts the pixels that are not ignored, in images whose `mask` is 1.
    """
    logits_BHWC = self._logits(params, self.images.normalize(batch['image']))
    C = self.model.num_classes
    class_BHW = batch['classes'].astype(jnp.int32)
    is_counted_BHW = (class_BHW != IGNORED) & (batch['mask'] > 0)[:, None, None]
    cell_BHW = C * class_BHW + jnp.argmax(logits_BHWC, axis=-1)
    cell_BHW = jnp.where(is_counted_BHW, cell_BHW, C * C)
    # With vmap, each device counts the pixels of its own images.
    cells_BX = jax.vmap(lambda x: jnp.bincount(x.reshape(-1), length=C * C + 1))
    return jnp.sum(cells_BX(cell_BHW), axis=0)[:-1].reshape(C, C)

  def _logits(
    self, params: Params, images_BHWC: jax.Array, key: jax.Array | None = None
  ) -> jax.Array:
    """Returns logits BHWC of the pixels, in training mode if there is a key."""
    logits_BhwC, _ = run(self.model, params, images_BHWC, key)
    shape = (*images_BHWC.shape[:3], logits_BhwC.shape[-1])
    return jax.image.resize(logits_BhwC, shape, 'bilinear')


def weights(classes_BHW: jax.Array, axis: tuple[int, ...]) -> jax.Array:
  """Returns a weight for each pixel, float32 BHW.

  Ignored pixels get 0. The other pixels get equal weights, so that the mean
  weight of all pixels along `axis` is 1. If all pixels are ignored, all weights
  are 0.
  """
  counts_BHW = (classes_BHW != IGNORED).astype(jnp.float32)
  mean = jnp.mean(counts_BHW, axis=axis, keepdims=True)
  return counts_BHW / jnp.where(mean > 0, mean, 1.0)


def nats(logits_BHWC: jax.Array, classes_BHW: jax.Array) -> jax.Array:
  """Returns the cross-entropy of each pixel in nats, BHW; 0 if ignored."""
  is_ignored_BHW = classes_BHW == IGNORED
  nats_BHW = optax.softmax_cross_entropy_with_integer_labels(
    logits_BHWC, jnp.where(is_ignored_BHW, 0, classes_BHW)
  )
  return jnp.where(is_ignored_BHW, 0.0, nats_BHW)
