"""Batches of two streams: labelled examples, and images without labels."""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.sources import Record, Source
from vit_jax.data.transforms import TrainTransform
from vit_jax.models import variants
from vit_jax.models.model import Model
from vit_jax.objectives.objective import Example, Facts

# Fields of `config.objective` that say where the second stream comes from.
DEFAULTS = {'unlabelled': 'train', 'unlabelled_data': ''}


def unlabelled_data(config: ConfigDict) -> ConfigDict:
  """Returns `config.data` with the name and split of the second stream.

  They are `objective.unlabelled_data`, or that of the labelled if it is empty,
  and `objective.unlabelled`.
  """
  o, data = config.objective, config.data.copy_and_resolve_references()
  data.update(name=o.unlabelled_data or data.name, split=o.unlabelled)
  return data


def with_head(config: ConfigDict, facts: Facts, kind: str) -> Model:
  """Returns the ViT of a config with a head for what images without labels say.

  Raises:
    ValueError: if the config's is no ViT, or cannot work.
  """
  if config.model.name != 'vit':
    raise ValueError(
      f'model.name is {config.model.name!r}: objective.name='
      f'{config.objective.name} is learned by a ViT with a second head. Choose '
      'a variant such as b16.'
    )
  return variants.build(
    num_classes=len(facts.class_names),
    image_size=facts.image_size,
    **{**config.model, 'name': kind},
  )


@dataclasses.dataclass(frozen=True)
class TwoStreams:
  """An example of a record, and of another image drawn at random.

  Attributes:
    transform: of both.
    unlabelled: where the other is drawn from.
  """

  transform: TrainTransform
  unlabelled: Source

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    """Returns 'image' and 'label' of the record, and 'unlabelled'."""
    example = self.transform(record, rng)
    other = self.unlabelled[int(rng.integers(len(self.unlabelled)))]
    return {**example, 'unlabelled': self.transform(other, rng)['image']}
