"""Image classification with softmax or sigmoid cross-entropy."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.checkpoints import transfer
from vit_jax.data import device_augmentation, transforms
from vit_jax.models.model import Batch, Metrics, Params, run
from vit_jax.objectives import several_labels
from vit_jax.objectives.objective import Facts, Objective, sums

# Config fields that need `Classification.loss`, with their "off" values.
_OF_LOSS = {'data.train_size': '', 'loss.class_weights': ''}


@dataclasses.dataclass(frozen=True)
class Classification(Objective):
  """Learns `batch['label']` from `batch['image']`.

  Attributes:
    loss_name: 'softmax' (cross-entropy) or 'sigmoid' (binary cross-entropies
      summed over the classes, the loss of the ImageNet-21k checkpoints). Both
      are averaged over examples.
    label_smoothing: share of each label that is spread evenly over all classes.
    mixup, cutmix: alphas of the Beta distributions; 0 disables. If both are on,
      each batch uses one of them.
    several_labels: whether `label` is uint8 BC, with 1 for each class of an
      image, instead of int32 B. The metrics are then mean average precision and
      F1 instead of accuracy.
    wrong_labels: share of the training images that get a wrong label.
    class_weights: weight of each class in the training loss, C; empty for
      equal weights.
  """

  # Whether an image must have exactly one class.
  one_class: ClassVar[bool] = False
  classes = 2
  metrics = {'accuracy': 'highest', 'loss': 'lowest'}

  loss_name: str = 'softmax'
  label_smoothing: float = 0.0
  mixup: float = 0.0
  cutmix: float = 0.0
  several_labels: bool = False
  wrong_labels: float = 0.0
  class_weights: tuple[float, ...] = ()

  def __init_subclass__(cls) -> None:
    """Adds `_OF_LOSS` to `unused` of objectives with another loss."""
    super().__init_subclass__()
    losses = cls.loss, cls.loss_and_seen
    if losses != (Classification.loss, Classification.loss_and_seen):
      cls.unused = {**_OF_LOSS, **cls.unused}

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    made = super().from_config(config, image_size)
    if (task := made.model.task) != 'classes':
      raise ValueError(
        f'model.name is {config.model.name!r}, which predicts {task} and does '
        'not classify images. Choose another variant, or a config for '
        'this model, such as configs/detr.py.'
      )
    if train_size := made.images.train_size:
      made.model.check(train_size)
    return dataclasses.replace(
      made,
      loss_name=config.loss.name,
      label_smoothing=config.loss.label_smoothing,
      mixup=config.loss.mixup,
      cutmix=config.loss.cutmix,
      wrong_labels=config.data.wrong_labels,
    )

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with the classes of the data.

    Raises:
      ValueError: if the data have fewer than two classes, classes of objects or
        pixels, or several classes per image although the objective or a field
        needs one.
    """
    names, several = facts.class_names, facts.several_labels
    learned = config.objective.name
    if len(names) < 2:
      found = f'one class, {names[0]!r}' if names else 'no labels'
      raise ValueError(
        f'{config.data.name} {config.data.split} has {found}, but '
        f'objective.name={learned} needs at least two classes. Put the images '
        'of each class into a separate folder, or write the classes, such as '
        'yes and no, in the column label of a CSV file.'
      )
    if not facts.of_images:
      raise ValueError(
        f'{config.data.name} has classes of objects or pixels, but '
        f'objective.name={learned} learns classes of images. Use '
        'configs/detr.py or configs/segment.py, or sort the images into class '
        'folders.'
      )
    if several and self.one_class:
      raise ValueError(
        f'{config.data.name} has several classes per image, but '
        f'objective.name={learned} learns one class per image. Use the '
        'objective classification.'
      )
    for field, value, needed in (
      ('loss.name', self.loss_name, 'sigmoid'),
      ('loss.class_weights', config.loss.class_weights, ''),
      ('data.wrong_labels', self.wrong_labels, 0.0),
    ):
      if several and value != needed:
        raise ValueError(
          f'{config.data.name} has several classes per image, but {field} is '
          f'{value!r}, which needs one class per image: use '
          f'--config.{field}={needed!r}.'
        )
    weights: tuple[float, ...] = ()
    if config.loss.class_weights:
      # A class of n examples is drawn in proportion to n^(1 - balance).
      drawn = [n and n ** (1 - config.data.balance) for n in facts.class_counts]
      weights = tuple(
        sum(drawn) / (len(names) * x) if x else 0.0 for x in drawn
      )
    return dataclasses.replace(
      self,
      model=self.model.clone(num_classes=len(names)),
      class_names=names,
      several_labels=several,
      class_weights=weights,
    )

  def train_transform(self) -> Any:
    """Returns the function from a record to a training 'image' and 'label'."""
    transform = self.images.train_transform()
    if not self.wrong_labels:
      return transform
    return transforms.WrongLabels(
      transform, self.wrong_labels, len(self.class_names)
    )

  def eval_transform(self) -> transforms.EvalTransform:
    """Returns the function from a record to its 'image' and 'label'."""
    return self.images.eval_transform()

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes of images uint8 BHWC and labels int32 B or uint8 BC."""
    label = jax.ShapeDtypeStruct((size,), np.int32)
    if self.several_labels:
      shape = (size, self.model.num_classes)
      label = jax.ShapeDtypeStruct(shape, np.uint8)
    return {'image': self.images.batch_shape(size), 'label': label}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Returns normalised, mixed images float32 BHWC and labels float32 BC."""
    key_flip, key_mixup = jax.random.split(key)
    images = self.images.augmented(
      self.images.normalize(batch['image']), key_flip
    )
    labels = optax.smooth_labels(self._labels(batch), self.label_smoothing)
    images, labels = device_augmentation.mixup_or_cutmix(
      key_mixup, images, labels, self.mixup, self.cutmix
    )
    return {'image': images, 'label': labels}

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics.

    For images of `data.train_size`, position embeddings are interpolated.
    """
    images = self.images
    if images.train_size:
      params = transfer.at_size(
        self.model, params, images.size, images.train_size
      )
    logits_BC, _ = self._outputs(params, batch['image'], key)
    losses_B = self._losses(logits_BC, batch['label'])
    if self.class_weights:
      losses_B *= batch['label'] @ jnp.asarray(self.class_weights)
    loss = jnp.mean(losses_B)
    if self.several_labels:
      return loss, {'loss': loss}
    hit_B = self._hits(logits_BC, batch['label'])
    return loss, {'loss': loss, 'accuracy': jnp.mean(hit_B)}

  def evaluate(self, params: Params, batch: Batch) -> Metrics:
    """Returns sums over examples, and `rows` if images have several labels.

    Labels are neither smoothed nor mixed, so losses of runs are comparable.
    """
    logits_BC, _ = self.model.apply(
      {'params': params}, self.images.normalize(batch['image'])
    )
    labels_BC = self._labels(batch)
    losses_B = self._losses(logits_BC, labels_BC)
    if self.several_labels:
      rows = {'scores': logits_BC, 'labels': labels_BC, 'mask': batch['mask']}
      found: dict[str, Any] = sums(batch['mask'], {'loss': losses_B})
      return found | {'rows': rows}
    hit_B = self._hits(logits_BC, labels_BC)
    return sums(batch['mask'], {'accuracy': hit_B, 'loss': losses_B})

  def measure_rows(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns mean average precision `map` and mean `f1` at probability 0.5."""
    found = several_labels.measures(rows['labels'], rows['scores'], 0.0)
    return {'map': found.mean_ap, 'f1': found.mean_f1}

  def _outputs(
    self, params: Params, images: jax.Array, key: jax.Array
  ) -> tuple[jax.Array, Batch]:
    """Returns logits NC and other outputs; flattens axes before HWC to N."""
    images_NHWC = images.reshape(-1, *images.shape[-3:])
    return run(self.model, params, images_NHWC, key)

  def _labels(self, batch: Batch) -> jax.Array:
    """Returns the labels of a batch as float32 BC."""
    if self.several_labels:
      return batch['label'].astype(jnp.float32)
    return jax.nn.one_hot(batch['label'], self.model.num_classes)

  def _hits(self, logits_BC: jax.Array, labels_BC: jax.Array) -> jax.Array:
    """Returns whether the top-1 class of each image is correct."""
    return jnp.argmax(logits_BC, -1) == jnp.argmax(labels_BC, -1)

  def _losses(self, logits_BC: jax.Array, labels_BC: jax.Array) -> jax.Array:
    if self.loss_name == 'sigmoid':
      return jnp.sum(
        optax.sigmoid_binary_cross_entropy(logits_BC, labels_BC), -1
      )
    return optax.softmax_cross_entropy(logits_BC, labels_BC)
