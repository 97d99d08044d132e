"""A checkpoint and its input images."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.photos import Photograph

# Maximum number of attention weights per layer in a batch of several images.
_MAX_ENTRIES = 2**26
# Maximum number of images per batch.
_MAX_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Subject:
  """A checkpoint and images that are preprocessed for it."""

  checkpoint: Checkpoint
  photographs: Sequence[Photograph]

  @property
  def files(self) -> np.ndarray:
    """Paths of the images."""
    return np.array([photograph.path for photograph in self.photographs])

  def at_work(
    self, description: str
  ) -> Iterator[tuple[Layers, Sequence[Photograph]]]:
    """Yields the attention of each batch of images, with its photographs.

    Batches are as large as `_MAX_ENTRIES` and `_MAX_BATCH` allow. The last
    batch is padded with black images, whose results callers drop. The progress
    bar shows the description.

    Raises:
      ValueError: if the model lacks attention between all tokens.
    """
    model, image_size = self.checkpoint.model, self.checkpoint.image_size
    size = min(_MAX_BATCH, len(self.photographs))
    if model.attention:
      L = model.num_tokens(image_size)
      size = min(size, max(1, _MAX_ENTRIES // (model.heads * L * L)))
    starts = range(0, len(self.photographs), size)
    for start in tqdm(
      starts, description, unit=' batches', delay=2, disable=None
    ):
      batch = self.photographs[start : start + size]
      images_BHWC = np.zeros((size, *image_size, 3), np.uint8)
      images_BHWC[: len(batch)] = [p.seen_HWC for p in batch]
      x_BHWC = self.checkpoint.normalize(jax.numpy.asarray(images_BHWC))
      yield Layers(model, self.checkpoint.on_device, x_BHWC), batch
