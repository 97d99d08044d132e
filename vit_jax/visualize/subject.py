"""A checkpoint, and the images that it is to look at."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from tqdm import tqdm

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.models.variants import nearest
from vit_jax.visualize import photos
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.photos import Photograph


@dataclasses.dataclass(frozen=True)
class Subject:
  """A checkpoint and the images that it is to look at.

  Attributes:
    checkpoint: the model.
    photographs: as it sees them.
    label: what it is called in a picture.
  """

  checkpoint: Checkpoint
  photographs: Sequence[Photograph]
  label: str = ''

  @property
  def params(self) -> Any:
    """On the device."""
    return self.checkpoint.on_device

  def at_work(
    self, description: str
  ) -> Iterator[tuple[Layers, Sequence[Photograph]]]:
    """Yields as `images.at_work` does, with a progress bar."""
    with tqdm(
      total=len(self.photographs),
      desc=description,
      unit=' images',
      delay=2,
      disable=None,  # without a terminal
    ) as shown:
      for layers, batch in photos.at_work(
        self.checkpoint, self.params, self.photographs
      ):
        yield layers, batch
        shown.update(len(batch))

  def class_name(self, index: int) -> str:
    """Returns the name of a class, its number where it has none."""
    names = self.checkpoint.class_names
    return names[index] if names else str(index)

  def class_index(self, text: str) -> int:
    """Returns the index of a class by its name or number.

    Raises:
      ValueError: if there is no such class.
    """
    names = self.checkpoint.class_names
    C = self.checkpoint.model.num_classes
    if not C:
      raise ValueError(f'{self.checkpoint.path} has no head, hence no classes.')
    if text in names:
      return names.index(text)
    if text.isdecimal() and int(text) < C:
      return int(text)
    hint = nearest(text, names) if names else 'It has no names for them.'
    if len(hint) > 300:
      hint = f'Some of its names: {", ".join(names[:10])}.'
    raise ValueError(
      f'{self.checkpoint.path} has no class {text!r}: give one of its names or '
      f'an index from 0 to {C - 1}. {hint}'
    )

  def top_classes(self, count: int) -> list[list[tuple[int, float]]]:
    """Returns the likeliest classes of each image and their probabilities."""
    found = []
    for layers, batch in self.at_work('labels'):
      probabilities_BC = jax.nn.softmax(layers.logits_BC)[: len(batch)]
      values, indices = jax.lax.top_k(
        probabilities_BC, min(count, probabilities_BC.shape[1])
      )
      found += [
        [(int(c), float(p)) for c, p in zip(*row, strict=True)]
        for row in zip(indices, values, strict=True)
      ]
    return found
