"""Image classification with softmax or sigmoid cross-entropy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.data import augment
from vit_jax.models.variants import Model

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Classification:
  """Learns `batch['label']` from `batch['image']`.

  Attributes:
    model: gives logits BC.
    loss_name: 'softmax' (mean over examples of the cross-entropy) or 'sigmoid'
      (binary cross-entropies summed over the classes, mean over examples; the
      loss of the ImageNet-21k checkpoints).
    label_smoothing: share of the label spread evenly over all classes.
    mixup: alpha of the Beta distribution; 0 does not mix.
    flip: whether to mirror training images at random.
    mean: of each channel of the images, for values in [0, 1].
    std: their standard deviations.
  """

  model: Model
  loss_name: str = 'softmax'
  label_smoothing: float = 0.0
  mixup: float = 0.0
  flip: bool = False
  mean: tuple[float, ...] = augment.MEAN
  std: tuple[float, ...] = augment.STD

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Turns a uint8 batch with integer labels into what `loss` takes.

    Works on the whole batch, before it is split for gradient accumulation, so
    that the mixing partner is the same with and without.

    Returns:
      `image`: float32 BHWC, normalised; `label`: float32 BC, smoothed, mixed.
    """
    key_flip, key_mixup = jax.random.split(key)
    images = augment.normalize(batch['image'], self.mean, self.std)
    labels = jax.nn.one_hot(batch['label'], self.model.num_classes)
    labels = optax.smooth_labels(labels, self.label_smoothing)
    if self.flip:
      images = augment.random_flip(key_flip, images)
    if self.mixup:
      images, labels = augment.mixup(key_mixup, images, labels, self.mixup)
    return {'image': images, 'label': labels}

  def loss(
    self, params: Any, batch: Batch, key: jax.Array, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean loss of an augmented batch, and its metrics.

    Args:
      params: of the model.
      batch: from `augment`.
      key: for dropout.
      train: whether to drop out.
    """
    logits_BC, _ = self.model.apply(
      {'params': params}, batch['image'], train=train, rngs={'dropout': key}
    )
    loss = jnp.mean(self._losses(logits_BC, batch['label']))
    hit_B = jnp.argmax(logits_BC, -1) == jnp.argmax(batch['label'], -1)
    return loss, {'loss': loss, 'accuracy': jnp.mean(hit_B)}

  def evaluate(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns sums over the examples of a raw batch whose `mask` is 1.

    Nothing is smoothed or mixed here, so that losses compare between recipes.
    """
    logits_BC, _ = self.model.apply(
      {'params': params}, augment.normalize(batch['image'], self.mean, self.std)
    )
    labels_BC = jax.nn.one_hot(batch['label'], self.model.num_classes)
    mask_B = batch['mask']
    hit_B = jnp.argmax(logits_BC, -1) == batch['label']
    losses_B = self._losses(logits_BC, labels_BC)
    return {
      'examples': jnp.sum(mask_B),
      'correct': jnp.sum(hit_B * mask_B),
      'loss': jnp.sum(jnp.where(mask_B > 0, losses_B, 0.0)),
    }

  def _losses(self, logits_BC: jax.Array, labels_BC: jax.Array) -> jax.Array:
    if self.loss_name == 'sigmoid':
      return jnp.sum(
        optax.sigmoid_binary_cross_entropy(logits_BC, labels_BC), -1
      )
    return optax.softmax_cross_entropy(logits_BC, labels_BC)
