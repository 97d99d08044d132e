"""Prediction of pixels: "Generative Pretraining from Pixels" (ICML 2020).

A causal iGPT learns the probability of an image, pixel after pixel; one that is
not learns the pixels that are hidden from it (BERT). Fine-tuning learns classes
besides.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.data import device_augmentation, transforms
from vit_jax.data.images import Images
from vit_jax.models import variants
from vit_jax.models.fields import Valid
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import (
  OF_CLASSES,
  Best,
  Facts,
  Objective,
  check_classes,
  sums,
)
from vit_jax.projects.igpt.model import IGPT


@dataclasses.dataclass(frozen=True)
class Pixels(Objective):
  """Learns the colours of pixels.

  Attributes:
    model: predicts every pixel.
    images: how images are brought to the model.
    rate: share of the pixels that are hidden, and predicted, where the model is
      not causal.
    class_names: none.
  """

  defaults: ClassVar[Mapping[str, Any]] = {'rate': 0.15}
  valid: ClassVar[Mapping[str, Valid]] = {'rate': '(0, 1]'}
  unused: ClassVar[Mapping[str, Any]] = OF_CLASSES
  metrics: ClassVar[Mapping[str, Best]] = {'loss': 'lowest'}

  model: IGPT
  images: Images
  rate: float = 0.15
  class_names: tuple[str, ...] = ()

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of `config.objective`, without labels.

    Raises:
      ValueError: for fields that cannot work.
    """
    o = config.objective
    if config.model.name != IGPT.kind:
      raise ValueError(
        f'model.name is {config.model.name!r}: pixels are predicted by iGPT. '
        'Choose a variant such as igpt_s.'
      )
    images = Images.from_config(config.data, image_size)
    mean, std = images.preprocessing.mean, images.preprocessing.std
    if (mean, std) != (device_augmentation.MEAN, device_augmentation.STD):
      raise ValueError(
        f'data.mean is {mean} and data.std {std}: a palette has '
        f'values in [-1, 1], for which both are {device_augmentation.MEAN}.'
      )
    model: Any = variants.build(
      num_classes=0, image_size=image_size, **config.model
    )
    return cls(model, images, o.rate)

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Returns images and, where pixels are hidden, which.

    Returns:
      `image`: float32 BHWC, normalised; `hidden`: bool BL; and the rest of the
      batch as it is.
    """
    key_flip, key_hidden = jax.random.split(key)
    images_BHWC = self.images.flipped(batch['image'], key_flip)
    keys_B = jax.random.split(key_hidden, len(images_BHWC))
    return self._prepared(batch | {'image': images_BHWC}, keys_B)

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean over images of the nats a predicted pixel."""
    del fixed, key, train
    loss = jnp.mean(self._predict(params, batch)[1])
    return loss, {'loss': loss}

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    What is hidden of an image follows from its `index` in the data, so that
    every evaluation asks the same.
    """
    del fixed
    _, nats_B = self._predict(params, self._asked(batch))
    return sums(batch['mask'], {'loss': nats_B})

  def _asked(self, batch: Batch) -> Batch:
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), batch['index']
    )
    return self._prepared(batch, keys_B)

  def _prepared(self, batch: Batch, keys_B: jax.Array) -> Batch:
    found = batch | {'image': self.images.normalize(batch['image'])}
    if not self.model.causal:
      H, W = self.images.size
      found['hidden'] = jax.vmap(
        lambda key: jax.random.bernoulli(key, self.rate, (H * W,))
      )(keys_B)
    return found

  def _predict(
    self, params: Params, batch: Batch
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the model's outputs, and the nats a predicted pixel, B.

    -log p(pixel i | those before) on average, p(image) to the power -1 / L; or
    -log p(pixel i | those not hidden) over those hidden, 0 where none is.
    """
    outputs, aux = self.model.apply(
      {'params': params},
      batch['image'],
      capture=('pixels',),
      hidden_BL=batch.get('hidden'),
    )
    nats_BL = optax.softmax_cross_entropy_with_integer_labels(
      aux['pixels'], aux['colours']
    )
    if self.model.causal:
      return outputs, jnp.mean(nats_BL, axis=1)
    hidden_BL = batch['hidden']
    count_B = jnp.maximum(jnp.sum(hidden_BL, axis=1), 1)
    return outputs, jnp.sum(nats_BL * hidden_BL, axis=1) / count_B


@dataclasses.dataclass(frozen=True)
class PixelsAndClasses(Pixels):
  """Learns classes, and the colours of pixels besides: L_gen + L_clf.

  Attributes:
    class_names: C names.
  """

  metrics: ClassVar[Mapping[str, Best]] = {
    'accuracy': 'highest',
    'loss': 'lowest',
    'pixel_loss': 'lowest',
  }

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with the classes of the data.

    Raises:
      ValueError: for data whose classes cannot be learned.
    """
    check_classes(config, facts, one_class=True)
    model = self.model.clone(num_classes=len(facts.class_names))
    return dataclasses.replace(self, model=model, class_names=facts.class_names)

  def train_transform(self) -> transforms.TrainTransform:
    """Returns what makes 'image' and 'label' of a record."""
    return self.images.train_transform()

  def eval_transform(self) -> transforms.EvalTransform:
    """Returns the same for evaluation."""
    return self.images.eval_transform()

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns images uint8 BHWC and labels int32 B."""
    return super().batch_shapes(size) | {
      'label': jax.ShapeDtypeStruct((size,), np.int32)
    }

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean over images of both losses, added up."""
    del fixed, key, train
    logits_BC, nats_B = self._predict(params, batch)
    hit_B, loss_B = _classified(logits_BC, batch['label'])
    loss, pixel_loss = jnp.mean(loss_B + nats_B), jnp.mean(nats_B)
    return loss, {
      'loss': loss,
      'accuracy': jnp.mean(hit_B),
      'pixel_loss': pixel_loss,
    }

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    Pixels are asked for as `Pixels` does it; the class is told of the image
    with nothing hidden.
    """
    del fixed
    asked = self._asked(batch)
    logits_BC, nats_B = self._predict(params, asked)
    if not self.model.causal:
      logits_BC, _ = self.model.apply({'params': params}, asked['image'])
    hit_B, loss_B = _classified(logits_BC, batch['label'])
    return sums(
      batch['mask'],
      {'accuracy': hit_B, 'loss': loss_B + nats_B, 'pixel_loss': nats_B},
    )


def _classified(
  logits_BC: jax.Array, label_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns whether the likeliest class is right, and the cross-entropy."""
  return (
    jnp.argmax(logits_BC, -1) == label_B,
    optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_B),
  )
