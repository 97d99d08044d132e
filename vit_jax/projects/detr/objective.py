"""DETR's set-prediction objective (2005.12872).

Bipartite matching assigns each object to one query (equation 1), separately in
each decoder layer. Matched queries learn the class, box and mask of their
object; the other queries learn "no object" (equation 2).
"""

import dataclasses
import importlib
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import OF_CLASSES, Facts, Objective, sums
from vit_jax.projects.detr import set_losses
from vit_jax.projects.detr.box_transforms import BoxTransform
from vit_jax.projects.detr.model import DETR, predicted

_SIDE, _ANY = '[1, inf)', '[0, inf)'  # valid sides; valid weights


@dataclasses.dataclass(frozen=True)
class Detection(Objective):
  """Learns the classes, boxes and masks of an image's objects."""

  unused = {
    **OF_CLASSES,
    'data.augment': '',
    'data.balance': 0.0,
    'data.crop_resize': 0.0,
    'data.interpolation': 'bilinear',
    'data.resize_like': 'vit_jax',
    'data.resize_small': 0,
    'data.squash': False,
  }
  trained = DETR
  classes = 1

  model: DETR
  short_sides: tuple[int, ...] = field((), 'See `BoxTransform`.', valid=_SIDE)
  crop_sides: tuple[int, ...] = field((), 'See `BoxTransform`.', valid=_SIDE)
  crop: tuple[int, int] = field((384, 600), 'See `BoxTransform`.', valid=_SIDE)
  buckets: int = field(1, 'See `BoxTransform`; each shape compiles a step.')
  max_objects: int = field(100, 'See `BoxTransform`.', valid=_SIDE)
  l1: float = field(5.0, 'Weight of box L1, in matching too.', valid=_ANY)
  giou: float = field(2.0, 'Weight of box GIoU, in matching too.', valid=_ANY)
  no_object: float = field(0.1, 'Weight of "no object".', valid='(0, inf)')
  mask: float = field(1.0, "Weight of the masks' focal loss.", valid=_ANY)
  dice: float = field(1.0, "Weight of the masks' dice loss.", valid=_ANY)
  # With 1, as in the original, masks take max_objects x H x W bytes per image.
  mask_stride: int = field(1, 'See `BoxTransform`.', valid=_SIDE)
  # An auxiliary loss that helps if the backbone learns from few images; see
  # `_dense`.
  dense: float = field(0.0, 'Weight of per-cell classification.', valid=_ANY)

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    o = config.objective
    made = super().from_config(config, image_size)
    if config.model.masks:  # raises ImportError here, and not in a worker
      importlib.import_module('hotcoco')
    if o.max_objects > config.model.num_queries:
      raise ValueError(
        f'objective.max_objects is {o.max_objects} and model.num_queries is '
        f'{config.model.num_queries}. Each object needs its own query: raise '
        'num_queries or lower max_objects.'
      )
    if len(o.crop) != 2 or o.crop[1] < o.crop[0]:
      raise ValueError(
        f'objective.crop is {o.crop}. Give the smallest and the largest side, '
        'as in (384, 600).'
      )
    if o.buckets != 1 and not 1 <= o.buckets <= len(o.short_sides):
      raise ValueError(
        f'objective.buckets is {o.buckets} and objective.short_sides has '
        f'{len(o.short_sides)} values. Use 1 bucket, or at most one per value.'
      )
    return made

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Sets the classes; raises ValueError if the data have none."""
    names = facts.class_names
    if not names:
      raise ValueError(
        f'{config.data.name} {config.data.split} has no classes, and detection '
        'needs them. Set data.name to a folder with COCO or VOC annotations.'
      )
    model = self.model.clone(num_classes=len(names))
    return dataclasses.replace(self, model=model, class_names=names)

  def train_transform(self) -> BoxTransform:
    return BoxTransform(
      self.images.size,
      self.max_objects,
      self.short_sides,
      self.mask_stride * self.model.masks,
      self.crop_sides,
      self.crop,
      self.images.flip,
      self.buckets,
    )

  # Evaluation calls the transform without a generator.
  eval_transform = train_transform

  def batch_sizes(self) -> list[tuple[int, int]]:
    return self.train_transform().sizes()

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of the largest bucket."""
    M = self.max_objects
    shapes = {
      'image': self.images.batch_shape(size),
      'size': jax.ShapeDtypeStruct((size, 2), np.int32),
      'boxes': jax.ShapeDtypeStruct((size, M, 4), np.float32),
      'labels': jax.ShapeDtypeStruct((size, M), np.int32),
    }
    if self.model.masks:
      h, w = (-(-side // self.mask_stride) for side in self.images.size)
      shapes['masks'] = jax.ShapeDtypeStruct((size, M, h, w), np.bool_)
    return shapes

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Adds `objects` float32 B, the mean number of objects per image.

    The mean over the whole batch keeps the loss independent of microbatches.
    """
    counts_B = jnp.sum(batch['labels'] >= 0, axis=1)
    mean = jnp.mean(counts_B.astype(jnp.float32))
    return batch | {'objects': jnp.full(counts_B.shape, mean)}

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the loss of the batch, and its unweighted terms.

    Sums over queries are divided by the sum of their weights in the batch, and
    sums over objects by the number of objects. The loss has the class and box
    terms of all decoder layers, the mask terms of the last layer, and 'dense'
    from `_dense`. The returned class and box terms are from the last layer.
    'class_accuracy' is for matched queries.
    """
    losses_B, parts = self._losses(params, batch, key)
    means = {name: jnp.mean(x_B) for name, x_B in parts.items()}
    return jnp.mean(losses_B), {'loss': jnp.mean(losses_B)} | means

  def evaluate(self, params: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The loss of an image equals the loss of a batch that holds only this image.
    """
    counts_B = jnp.sum(batch['labels'] >= 0, axis=1).astype(jnp.float32)
    losses_B, _ = self._losses(params, batch | {'objects': counts_B}, None)
    return sums(batch['mask'], {'loss': losses_B})

  def predict(
    self, params: Params, batch: Batch, key: jax.Array | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the outputs of `DETR`; with a key, dropout is applied."""
    return predicted(
      self.model,
      params,
      self.images.normalize,
      batch['image'],
      batch['size'],
      train=key is not None,
      rngs=None if key is None else {'dropout': key},
    )

  def _losses(
    self, params: Params, batch: Batch, key: jax.Array | None
  ) -> tuple[jax.Array, Metrics]:
    """Returns losses B, whose mean is the batch's loss, and their terms B."""
    _, outputs = self.predict(params, batch, key)
    losses_B, parts = self.set_losses(outputs, batch)
    if self.dense:
      parts['dense'] = self._dense(params, batch, outputs['tokens'])
      losses_B += self.dense * parts['dense']
    return losses_B, parts

  def set_losses(
    self, outputs: Batch, batch: Batch
  ) -> tuple[jax.Array, Metrics]:
    """Returns losses B, and the unweighted terms B of the last decoder layer.

    Args:
      outputs: the second output of `DETR`.
      batch: `labels` BM, `boxes` BM4, `objects` B and, with masks, `masks`
        BMhw; see `augment` and `BoxTransform`.
    """
    objects_B = batch['objects']
    # Without objects the sums are 0: divide by 1 instead of 0.
    count_B = jnp.where(objects_B > 0, objects_B, 1.0)
    weights_B = (
      self.no_object * self.model.num_queries + (1 - self.no_object) * objects_B
    )

    query_XBM = self._matches(outputs, batch)
    sums_XB = jax.vmap(set_losses.box_losses, (0, 0, 0, None, None))(
      outputs['logits'], outputs['boxes'], query_XBM, batch, self.no_object
    )
    parts_XB = {
      name: x_XB / (weights_B if name == 'cross_entropy' else count_B)[None]
      for name, x_XB in sums_XB.items()
    }
    losses_B = jnp.sum(
      parts_XB['cross_entropy']
      + self.l1 * parts_XB['l1']
      + self.giou * parts_XB['giou'],
      axis=0,
    )
    parts = {name: x_XB[-1] for name, x_XB in parts_XB.items()}
    if 'mask_logits' in outputs:
      logits_BQhw = outputs['mask_logits']
      sums_B = set_losses.mask_losses(logits_BQhw, query_XBM[-1], batch)
      parts |= {name: x_B / count_B for name, x_B in sums_B.items()}
      losses_B += self.mask * parts['mask'] + self.dice * parts['dice']
    return losses_B, parts

  def _matches(self, outputs: Batch, objects: Batch) -> jax.Array:
    """Returns the query of each object in each layer, int32 XBM."""
    costs_XBQM = jax.vmap(set_losses.costs, (0, 0, None, None, None, None))(
      *jax.lax.stop_gradient((outputs['logits'], outputs['boxes'])),
      objects['labels'],
      objects['boxes'],
      self.l1,
      self.giou,
    )
    X, B, Q, M = costs_XBQM.shape
    # Images stay the outermost axis, because only that axis is sharded.
    costs_NQM = costs_XBQM.swapaxes(0, 1).reshape(B * X, Q, M)
    is_object_NM = jnp.repeat(objects['labels'] >= 0, X, axis=0)
    query_NM = set_losses.match(costs_NQM, is_object_NM)
    return query_NM.reshape(B, X, M).swapaxes(0, 1)

  def _dense(
    self, params: Params, batch: Batch, tokens_BLD: jax.Array
  ) -> jax.Array:
    """Returns the weighted mean cross-entropy of the cells' classes, B.

    The class head is applied to the encoder's output. The target of a cell is
    the class of the smallest box around its centre, or "no object". Cells have
    the weight 1 inside boxes, `no_object` outside, and 0 in the padding.
    """
    H, W = batch['image'].shape[1:3]
    h, w = self.model.grid((H, W))
    head = params['class_embed']
    logits_BLC = tokens_BLD.astype(jnp.float32) @ head['kernel']
    logits_BLC += head['bias'][None, None]
    y_L, x_L = (
      (grid_hw.reshape(-1) + 0.5) * self.model.stride
      for grid_hw in jnp.mgrid[:h, :w]
    )
    size_B12 = batch['size'][:, None].astype(jnp.float32)
    middle_BL2 = jnp.stack([x_L, y_L], axis=-1)[None] / size_B12[..., ::-1]
    none = logits_BLC.shape[-1] - 1
    wanted_BL = jax.vmap(dense_classes, (0, 0, 0, None))(
      middle_BL2, batch['boxes'], batch['labels'], none
    )
    weights_BL = jnp.where(wanted_BL == none, self.no_object, 1.0)
    weights_BL *= jnp.all(middle_BL2 < 1, axis=-1)
    nats_BL = optax.softmax_cross_entropy_with_integer_labels(
      logits_BLC, wanted_BL
    )
    total_B = jnp.sum(weights_BL, axis=1)
    total_B = jnp.where(total_B > 0, total_B, 1.0)
    return jnp.sum(weights_BL * nats_BL, axis=1) / total_B


def dense_classes(
  middle_L2: jax.Array, boxes_M4: jax.Array, labels_M: jax.Array, none: int
) -> jax.Array:
  """Returns the class of the smallest box around each point, int32 L.

  Points (x, y) and boxes (cx, cy, w, h) are shares of the image. Labels are -1
  in empty rows. Points outside all boxes get the class `none`.
  """
  distance_LM2 = jnp.abs(middle_L2[:, None] - boxes_M4[None, :, :2])
  is_in_LM = jnp.all(distance_LM2 < boxes_M4[None, :, 2:] / 2, axis=-1)
  is_in_LM &= (labels_M >= 0)[None]
  area_M = jnp.prod(boxes_M4[:, 2:], axis=-1)
  area_LM = jnp.where(is_in_LM, area_M[None], jnp.inf)
  found_L = labels_M[jnp.argmin(area_LM, axis=1)]
  return jnp.where(jnp.any(is_in_LM, axis=1), found_L, none)
