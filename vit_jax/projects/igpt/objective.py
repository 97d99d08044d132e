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
from vit_jax.models.fields import field
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
    class_names: C names if classes are learned besides.
  """

  unused: ClassVar[Mapping[str, Any]] = OF_CLASSES
  metrics: ClassVar[Mapping[str, Best]] = {'loss': 'lowest'}

  model: IGPT
  images: Images
  rate: float = field(0.15, 'Share of hidden pixels (BERT).', valid='(0, 1]')
  class_names: tuple[str, ...] = ()

  @classmethod
  def _arguments(
    cls, config: ConfigDict, image_size: tuple[int, int]
  ) -> dict[str, Any]:
    if config.model.name != IGPT.kind:
      raise ValueError(
        f'model.name is {config.model.name!r}: pixels are predicted by iGPT. '
        'Choose a variant such as igpt_s.'
      )
    found = super()._arguments(config, image_size)
    images = found['images'].preprocessing
    if (images.mean, images.std) != (
      device_augmentation.MEAN,
      device_augmentation.STD,
    ):
      raise ValueError(
        f'data.mean is {images.mean} and data.std {images.std}: a palette has '
        f'values in [-1, 1], for which both are {device_augmentation.MEAN}.'
      )
    return found

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
    """Returns the mean loss over images, and the means of what is measured."""
    del fixed, key, train
    found = self._measured(batch, *self._predict(params, batch))
    means = {name: jnp.mean(x_B) for name, x_B in found.items()}
    return means['loss'], means

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The hidden pixels of an image follow from its `index` in the data, so that
    every evaluation asks the same. Its class is told with no pixel hidden.
    """
    del fixed
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), batch['index']
    )
    asked = self._prepared(batch, keys_B)
    outputs, nats_B = self._predict(params, asked)
    if self.class_names and not self.model.causal:
      outputs, _ = self.model.apply({'params': params}, asked['image'])
    return sums(batch['mask'], self._measured(batch, outputs, nats_B))

  def _measured(
    self, batch: Batch, logits_BC: jax.Array, nats_B: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns metrics of each image, B: the nats a predicted pixel."""
    del batch, logits_BC
    return {'loss': nats_B}

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
  """Learns classes, and the colours of pixels besides: L_gen + L_clf."""

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
    """Returns the function from a record to 'image' and 'label'."""
    return self.images.train_transform()

  def eval_transform(self) -> transforms.EvalTransform:
    """Returns the function for evaluation."""
    return self.images.eval_transform()

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns images uint8 BHWC and labels int32 B."""
    label = jax.ShapeDtypeStruct((size,), np.int32)
    return super().batch_shapes(size) | {'label': label}

  def _measured(
    self, batch: Batch, logits_BC: jax.Array, nats_B: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns metrics of each image, B: both losses added up, and parts."""
    loss_B = optax.softmax_cross_entropy_with_integer_labels(
      logits_BC, batch['label']
    )
    return {
      'loss': loss_B + nats_B,
      'accuracy': jnp.argmax(logits_BC, -1) == batch['label'],
      'pixel_loss': nats_B,
    }
