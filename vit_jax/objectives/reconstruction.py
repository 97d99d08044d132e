"""Base of objectives that predict hidden parts of an image."""

import jax
import jax.numpy as jnp

from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives.objective import OF_CLASSES, Objective, sums


class Reconstruction(Objective):
  """Learns to predict hidden parts of an image. Subclasses choose the parts."""

  unused = OF_CLASSES

  def hide(self, images_BHWC: jax.Array, keys_B: jax.Array) -> Batch:
    """Normalises uint8 images; adds arrays that describe the hidden parts."""
    raise NotImplementedError

  def losses(
    self, params: Params, batch: Batch, key: jax.Array | None
  ) -> jax.Array:
    """Returns the mean loss over the predicted parts of each image, B.

    `batch` is from `hide`. Without a key, dropout and stochastic depth are off.
    """
    raise NotImplementedError

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Flips images at random if `flip` is set; hides random parts of them."""
    key_flip, key_hidden = jax.random.split(key)
    images_BHWC = self.images.flipped(batch['image'], key_flip)
    return self.hide(
      images_BHWC, jax.random.split(key_hidden, len(images_BHWC))
    )

  def loss(
    self, params: Params, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean of `losses` over the images."""
    loss = jnp.mean(self.losses(params, batch, key))
    return loss, {'loss': loss}

  def evaluate(self, params: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The hidden parts of an image depend only on its `index` in the data, so
    every evaluation hides the same parts.
    """
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
      jax.random.key(0), batch['index']
    )
    losses_B = self.losses(params, self.hide(batch['image'], keys_B), None)
    return sums(batch['mask'], {'loss': losses_B})
