"""Masked patch prediction (section 4.6 and appendix B.1.2 of the paper).

Some patches of an image are hidden from the model, which is to say what colours
they have. 'mean_colour' is what the paper reports; 'downsized' did as well,
'pixels' a little worse.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.data.images import Images
from vit_jax.models import variants
from vit_jax.models.fields import Valid
from vit_jax.models.masked_vit import (
  KEPT,
  MASKED,
  OTHER,
  SAME,
  SMALL,
  TARGETS,
  MaskedViT,
)
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import OF_CLASSES, Best, Objective, sums


@dataclasses.dataclass(frozen=True)
class MaskedPatches(Objective):
  """Learns the colours of corrupted patches from the others.

  Attributes:
    model: predicts every patch.
    images: how images are brought to the model.
    rate: share of the patches that are corrupted, and predicted.
    mask: share of these that are replaced by the mask.
    other: share that are replaced by another patch of the image; the rest stay
      as they are.
    class_names: none.
  """

  defaults: ClassVar[Mapping[str, Any]] = {
    'target': 'mean_colour',
    'rate': 0.5,
    'mask': 0.8,
    'other': 0.1,
  }
  valid: ClassVar[Mapping[str, Valid]] = {
    'target': TARGETS,
    'rate': '(0, 1]',
    'mask': '[0, 1]',
    'other': '[0, 1]',
  }
  unused: ClassVar[Mapping[str, Any]] = OF_CLASSES
  metrics: ClassVar[Mapping[str, Best]] = {'loss': 'lowest'}

  model: MaskedViT
  images: Images
  rate: float = 0.5
  mask: float = 0.8
  other: float = 0.1
  class_names: tuple[str, ...] = ()

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    """Returns the objective of `config.objective`.

    Raises:
      ValueError: for fields that cannot work.
    """
    o, name = config.objective, config.model.name
    if name != 'vit':
      raise ValueError(
        f'model.name is {name!r}: patches are masked in a ViT. Choose a '
        'variant such as b16.'
      )
    if o.mask + o.other > 1:
      raise ValueError(
        f'objective.mask is {o.mask} and objective.other {o.other}: these are '
        'shares of the corrupted patches, at most 1 together.'
      )
    fields = {**config.model, 'name': MaskedViT.kind, 'target': o.target}
    model: Any = variants.build(num_classes=0, image_size=image_size, **fields)
    images = Images.from_config(config.data, image_size)
    return cls(model, images, o.rate, o.mask, o.other)

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Returns images, what of them is corrupted, and what they show.

    Returns:
      `image`: float32 BHWC, normalised; `kind` and `other`: as `corruption`
      gives them, BL; `target`: as `target` gives it.
    """
    key_flip, key_corruption = jax.random.split(key)
    images_BHWC = self.images.flipped(batch['image'], key_flip)
    keys_B = jax.random.split(key_corruption, len(images_BHWC))
    return self._prepared(images_BHWC, keys_B)

  def loss(
    self,
    params: Params,
    fixed: Params,
    batch: Batch,
    key: jax.Array,
    *,
    train: bool,
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean over images and their corrupted patches.

    Of colours the cross-entropy in nats, of pixels the squared difference, both
    means over what is predicted of a patch.
    """
    del fixed
    loss = jnp.mean(self._losses(params, batch, key, train))
    return loss, {'loss': loss}

  def evaluate(self, params: Params, fixed: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    What is corrupted of an image follows from its `index` in the data, so that
    every evaluation asks the same.
    """
    del fixed
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), batch['index']
    )
    prepared = self._prepared(batch['image'], keys_B)
    losses_B = self._losses(params, prepared, None, train=False)
    return sums(batch['mask'], {'loss': losses_B})

  def _prepared(self, images_BHWC: jax.Array, keys_B: jax.Array) -> Batch:
    h, w = self.model.grid(self.images.size)
    kind_BL, other_BL = jax.vmap(lambda key: self.corruption(key, h * w))(
      keys_B
    )
    normalized_BHWC = self.images.normalize(images_BHWC)
    return {
      'image': normalized_BHWC,
      'kind': kind_BL,
      'other': other_BL,
      'target': target(self.model, images_BHWC, normalized_BHWC),
    }

  def corruption(
    self, key: jax.Array, patches: int
  ) -> tuple[jax.Array, jax.Array]:
    """Returns what becomes of each of at least two patches of one image.

    Returns:
      Of each patch `KEPT`, or `MASKED`, `OTHER` or `SAME` for the share `rate`
      of them that is predicted (at least one), and the index of another patch;
      both int32 L.
    """
    key_rank, key_kind, key_other = jax.random.split(key, 3)
    count = max(1, round(self.rate * patches))
    order_L = jnp.argsort(jax.random.uniform(key_rank, (patches,)))
    is_corrupted_L = jnp.zeros(patches, bool).at[order_L[:count]].set(True)
    u_L = jax.random.uniform(key_kind, (patches,))
    kind_L = jnp.where(
      u_L < self.mask,
      MASKED,
      jnp.where(u_L < self.mask + self.other, OTHER, SAME),
    )
    # Any but itself.
    step_L = jax.random.randint(key_other, (patches,), 1, patches)
    other_L = (jnp.arange(patches) + step_L) % patches
    return jnp.where(is_corrupted_L, kind_L, KEPT), other_L

  def _losses(
    self, params: Params, batch: Batch, key: jax.Array | None, train: bool
  ) -> jax.Array:
    """Returns the mean over the corrupted patches of each image, B."""
    predicted, _ = self.model.apply(
      {'params': params},
      batch['image'],
      train=train,
      corruption=(batch['kind'], batch['other']),
      rngs=None if key is None else {'dropout': key},
    )
    if self.model.target == 'pixels':
      losses = jnp.square(predicted - batch['target'])
    else:
      losses = optax.softmax_cross_entropy_with_integer_labels(
        predicted, batch['target']
      )
    losses_BL = losses.reshape(*batch['kind'].shape, -1).mean(-1)
    return jnp.mean(losses_BL, axis=1, where=batch['kind'] != KEPT)


def target(
  model: MaskedViT, images_BHWC: jax.Array, normalized_BHWC: jax.Array
) -> jax.Array:
  """Returns what is to be predicted of every patch.

  A colour is 64 r + 8 g + b of the mean's upper three bits: the sum is exact,
  so that every machine agrees on it. Images are given as uint8 and as the model
  sees them.

  Returns:
    'mean_colour': int32 BL; 'downsized': int32 BLS, of S = 16 parts in raster
    order; 'pixels': float32, BL by the pixels in raster order, RGB.
  """
  _, H, W, _ = images_BHWC.shape
  h, w = model.grid((H, W))
  if model.target == 'pixels':
    return cells(normalized_BHWC, h, w)
  if model.target == 'mean_colour':
    return colours(cells(images_BHWC, h, w))
  parts_BlC = colours(cells(images_BHWC, SMALL * h, SMALL * w))
  return cells(parts_BlC.reshape(-1, SMALL * h, SMALL * w, 1), h, w)


def cells(x_BHWC: jax.Array, h: int, w: int) -> jax.Array:
  """Returns the h x w equal parts of images in raster order, flat: BL."""
  B, H, W, C = x_BHWC.shape
  x_BhPwQC = x_BHWC.reshape(B, h, H // h, w, W // w, C)
  return x_BhPwQC.swapaxes(2, 3).reshape(B, h * w, -1)


def colours(pixels_BLX: jax.Array) -> jax.Array:
  """Returns the colour of the mean of uint8 pixels, in [0, `COLOURS`)."""
  B, L, X = pixels_BLX.shape
  pixels_BLXC = pixels_BLX.reshape(B, L, X // 3, 3).astype(jnp.int32)
  red_BL, green_BL, blue_BL = jnp.moveaxis(
    jnp.sum(pixels_BLXC, axis=2) // (32 * X // 3), 2, 0
  )
  return 64 * red_BL + 8 * green_BL + blue_BL
