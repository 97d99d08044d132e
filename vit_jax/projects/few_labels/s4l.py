"""S4L (1905.03670): semi-supervised learning with a self-supervised loss.

A batch has two streams of equal size: labelled examples of `config.data`, and
images drawn from the split `objective.unlabelled`, without their labels.
w is `objective.weight`.

`Rotation` rotates all images by 0, 90, 180 and 270 degrees. The loss is

  mean CE(classes of labelled images, all four rotations)
    + w mean CE(rotation of all images, all four rotations).

`Exemplar` makes K independently augmented copies of each image. Let z be the
input of the head, scaled to length 1, d the squared distance and m the margin.
The loss is

  mean CE(classes of labelled images, all K copies)
    + w mean max(0, m + max d(z, copies of the same image)
                      - min d(z, copies of other images)).

The last mean is over all copies of both streams. Images are compared within
`objective.group` rows of the batch. The maximum and the minimum select
batch-hard triplets (1703.07737), with the distances of FaceNet (1503.03832).
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.data import bad_images, transforms
from vit_jax.data.sources import Record
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Example
from vit_jax.projects.few_labels.second_heads import TURNS, RotationViT


@dataclasses.dataclass(frozen=True)
class TwoStreams(Classification):
  """Learns from the labelled images of `config.data` and unlabelled images.

  Attributes:
    data: `config.data`, but with the name and split of the unlabelled images.
  """

  one_class = True

  unlabelled: str = field('train', 'Split of the unlabelled images.')
  unlabelled_data: str = field(
    '', 'Dataset of the unlabelled images; empty: `data.name`.'
  )
  data: ConfigDict = None

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    made = super().from_config(config, image_size)
    o, data = config.objective, config.data.copy_and_resolve_references()
    data.update(name=o.unlabelled_data or data.name, split=o.unlabelled)
    return dataclasses.replace(made, data=data)

  def augmented(self, images: jax.Array, key: jax.Array) -> jax.Array:
    """Normalises and augments images, uint8 [..., H, W, C], to float32."""
    images_NHWC = images.reshape(-1, *images.shape[-3:])
    return self.images.augmented(
      self.images.normalize(images_NHWC), key
    ).reshape(images.shape)


@dataclasses.dataclass(frozen=True)
class Rotation(TwoStreams):
  """Learns `batch['label']`, and the rotation of all images."""

  trained = RotationViT

  weight: float = field(1.0, 'w, weight of rotation.', valid='[0, inf)')

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    height, width = image_size
    if height != width:
      raise ValueError(
        f'data.image_size is {height}x{width}, and rotating by 90 degrees '
        'swaps height and width. Use a square size.'
      )
    return super().from_config(config, image_size)

  def train_transform(self) -> Any:
    """Returns the function from a record to an example.

    Examples also have a random 'unlabelled' image.
    """
    transform = super().train_transform()
    unlabelled = bad_images.open_checked(self.data, self.data.split)

    def pair(record: Record, rng: np.random.Generator) -> Example:
      example = transform(record, rng)
      other = unlabelled[int(rng.integers(len(unlabelled)))]
      return {**example, 'unlabelled': transform(other, rng)['image']}

    return pair

  @property
  def images_seen(self) -> int:
    """Images per example: four rotations in each stream."""
    return 2 * TURNS

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().batch_shapes(size)
    return shapes | {'unlabelled': shapes['image']}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Augments both streams as `Classification` does, to float32 BHWC.

    Mixup and CutMix change only the labelled images.
    """
    key, key_unlabelled = jax.random.split(key)
    unlabelled_BHWC = self.augmented(batch['unlabelled'], key_unlabelled)
    return super().augment(batch, key) | {'unlabelled': unlabelled_BHWC}

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics.

    `accuracy` is for labelled images rotated by 0 degrees, `rotation_accuracy`
    for all rotations of all images.
    """
    B = len(batch['image'])
    images_NHWC = jnp.concatenate([batch['image'], batch['unlabelled']])
    # A new axis keeps the rotations on the device of their image.
    turned_N4HWC = jnp.stack(
      [jnp.rot90(images_NHWC, k, axes=(1, 2)) for k in range(TURNS)], axis=1
    )
    logits, aux = self._outputs(params, turned_N4HWC, key)
    logits_B4C = logits.reshape(2 * B, TURNS, -1)[:B]
    turns_N4T = aux['logits_rotation'].reshape(2 * B, TURNS, TURNS)
    labelled = jnp.mean(self._losses(logits_B4C, batch['label'][:, None]))
    rotation = jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(
        turns_N4T, jnp.broadcast_to(jnp.arange(TURNS)[None], (2 * B, TURNS))
      )
    )
    loss = labelled + self.weight * rotation
    hit_B = self._hits(logits_B4C[:, 0], batch['label'])
    told_N4 = jnp.argmax(turns_N4T, -1) == jnp.arange(TURNS)[None]
    return loss, {
      'loss': loss,
      'rotation_loss': rotation,
      'accuracy': jnp.mean(hit_B),
      'rotation_accuracy': jnp.mean(told_N4),
    }


@dataclasses.dataclass(frozen=True)
class Exemplar(TwoStreams):
  """Learns labels, and representations that tell different images apart."""

  # A mixture of two images is not a copy of either.
  unused = {'loss.mixup': 0.0, 'loss.cutmix': 0.0}

  copies: int = field(8, 'K, copies of an image.', valid='[2, inf)')
  group: int = field(
    16, 'G, rows searched for hard triplets.', valid='[1, inf)'
  )
  margin: float = field(0.5, 'm, margin of the triplet loss.', valid='[0, inf)')
  weight: float = field(
    1.0, 'w, weight of the self-supervised loss.', valid='[0, inf)'
  )

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    group = config.objective.group
    if config.batch_size % (group * config.accum_steps):
      raise ValueError(
        f'objective.group is {group}, and batch_size {config.batch_size} with '
        f'accum_steps {config.accum_steps} does not divide into such groups. '
        'Use a divisor of batch_size / accum_steps.'
      )
    return super().from_config(config, image_size)

  def train_transform(self) -> Any:
    """Returns the function from a record to copies of two images.

    Examples have the 'label' of the record, 'image' (K copies of its image) and
    'unlabelled' (K copies of a random image), both uint8 [K, H, W, 3]. 'owner',
    int32 [2], has for each image a hash of the last two parts of its name.
    """
    transform = super().train_transform()
    unlabelled = bad_images.open_checked(self.data, self.data.split)
    copies = self.copies

    def pair(record: Record, rng: np.random.Generator) -> Example:
      both = record, unlabelled[int(rng.integers(len(unlabelled)))]
      ours, others = (
        [transform(each, rng) for _ in range(copies)] for each in both
      )
      owners = [transforms.seed_of(each['name']) for each in both]
      return {
        'image': np.stack([x['image'] for x in ours]),
        'label': ours[0]['label'],
        'unlabelled': np.stack([x['image'] for x in others]),
        'owner': np.array(owners, np.uint32).view(np.int32),
      }

    return pair

  @property
  def images_seen(self) -> int:
    """Images per example: the copies of both streams."""
    return 2 * self.copies

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = super().batch_shapes(size)
    B, *rest = shapes['image'].shape
    copies = jax.ShapeDtypeStruct((B, self.copies, *rest), np.uint8)
    owners = jax.ShapeDtypeStruct((B, 2), np.int32)
    return shapes | {'image': copies, 'unlabelled': copies, 'owner': owners}

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Augments images, and arranges the rows of the batch in groups.

    Gradient accumulation splits the first axis, so it does not split groups.

    Returns:
      `image`: float32 [B / G, 2 G, K, H, W, 3], the labelled images of a group
      first; `label`: float32 [B / G, G, C]; `owner`: int32 [B / G, 2 G].
    """
    labels = optax.smooth_labels(self._labels(batch), self.label_smoothing)
    B, G = len(labels), self.group
    streams = batch['image'], batch['unlabelled']
    groups = [x.reshape(B // G, G, *x.shape[1:]) for x in streams]
    images = jnp.concatenate(groups, axis=1)
    owner_GN = batch['owner'].reshape(B // G, G, 2).swapaxes(1, 2)
    return {
      'image': self.augmented(images, key),
      'label': labels.reshape(B // G, G, -1),
      'owner': owner_GN.reshape(B // G, 2 * G),
    }

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss of an augmented batch, and its metrics.

    `told_apart` is the share of copies that are nearer to all copies of their
    image than to any copy of another image in their group.
    """
    images, labels = batch['image'], batch['label']
    logits_NC, aux = self._outputs(params, images, key)
    logits = logits_NC.reshape(*images.shape[:3], -1)[:, : self.group]
    labelled = jnp.mean(self._losses(logits, labels[:, :, None]))
    points = aux['pre_logits'].reshape(*images.shape[:3], -1)
    gaps = triplet_gaps(points, batch['owner'])
    triplets = jnp.mean(jax.nn.relu(self.margin + gaps))
    loss = labelled + self.weight * triplets
    hit = jnp.argmax(logits, -1) == jnp.argmax(labels, -1)[:, :, None]
    return loss, {
      'loss': loss,
      'triplet_loss': triplets,
      'accuracy': jnp.mean(hit),
      'told_apart': jnp.mean(gaps < 0),
    }


def unit_vectors(x_XD: jax.Array) -> jax.Array:
  """Returns vectors scaled to length 1, in float32."""
  x_XD = x_XD.astype(jnp.float32)
  # Without the constant, the gradient at the zero vector would be NaN.
  return x_XD / jnp.sqrt(jnp.sum(jnp.square(x_XD), -1, keepdims=True) + 1e-12)


def triplet_gaps(x_GNKD: jax.Array, owner_GN: jax.Array) -> jax.Array:
  """Returns the farthest positive minus the nearest negative distance, GNK.

  `x_GNKD` has the representations of K copies of N images in each of G groups.
  Distances are squared distances of unit vectors, from 0 to 4. The positives of
  a copy are the copies of its image. Its negatives are the copies of images in
  its group that have a different owner. A copy without negatives gets -inf.
  """
  G, N, K, D = x_GNKD.shape
  z_GMD = unit_vectors(x_GNKD).reshape(G, N * K, D)
  far_GMM = 2 - 2 * jnp.einsum('gmd,gnd->gmn', z_GMD, z_GMD)
  image_M = jnp.arange(N * K) // K
  same_MM = image_M[:, None] == image_M[None]
  owner_GM = jnp.repeat(owner_GN, K, axis=1)
  near_GMM = owner_GM[:, :, None] == owner_GM[:, None]
  farthest_GM = jnp.max(jnp.where(same_MM[None], far_GMM, -jnp.inf), -1)
  nearest_GM = jnp.min(jnp.where(near_GMM, jnp.inf, far_GMM), -1)
  return (farthest_GM - nearest_GM).reshape(G, N, K)
