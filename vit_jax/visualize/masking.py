"""Whether a map means something: hiding what it says matters must hurt.

A share of an image's pixels is replaced by the mean of the model's images:
those with the highest values of the map, those with the lowest, or as many
drawn at random. What is left of the accuracy tells whether the map knows where
the model looks (the deletion check of Petsiuk et al., 1806.07421).

There are two draws, because holes hurt by their shape as well as by their
place: regions as large as those of a map are a like for like comparison, while
single pixels leave no patch of the image without noise.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints.classes import same_classes
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data.sources import LabelledSource
from vit_jax.visualize import draw
from vit_jax.visualize.photos import Photograph
from vit_jax.visualize.rollout import rollout
from vit_jax.visualize.sections import Section
from vit_jax.visualize.subject import Subject

SHARE = 0.3

# What is hidden: nothing; the highest or lowest values of the rollout, or the
# highest of that for the class that the model sees; as many at random, by a map
# with a value for each patch, enlarged as the others are, or by single pixels.
_NAMES = {
  'none': 'none hidden',
  'highest': 'highest rollout',
  'lowest': 'lowest rollout',
  'class': 'highest rollout for the class it sees',
  'patches': 'at random, by patches',
  'pixels': 'at random, single pixels',
}


def hide(
  image_HWC: np.ndarray,
  map_HW: np.ndarray,
  share: float,
  gray_C: Sequence[float],
) -> np.ndarray:
  """Returns an image without the pixels of the highest values of a map.

  Args:
    image_HWC: uint8.
    map_HW: at the size of the image.
    share: of the pixels, rounded to whole ones.
    gray_C: what stands there instead, in [0, 1].
  """
  hidden_HW1 = draw.highest(map_HW, share)[..., None]
  gray = np.round(255 * np.asarray(gray_C)).astype(np.uint8)
  return np.where(hidden_HW1, gray, image_HWC)


def rights(
  subject: Subject, labels_N: np.ndarray, share: float = SHARE, **how: Any
) -> dict[str, np.ndarray]:
  """Returns whether each image is labelled right, as booleans N by `_NAMES`.

  Args:
    subject: a checkpoint and N images.
    labels_N: indices of their classes.
    share: of the pixels that are hidden.
    **how: `fusion` and `discard` of `rollout`.
  """
  checkpoint = subject.checkpoint
  size = checkpoint.image_size
  rng = np.random.default_rng(0)

  found = collections.defaultdict(list)
  for layers, batch in subject.at_work('masking'):
    whole_Bhw = np.asarray(rollout(layers, **how))
    seen_B = jnp.argmax(layers.logits_BC, axis=-1)
    class_Bhw = np.asarray(rollout(layers, **how, class_B=seen_B))
    maps = {
      'highest': whole_Bhw,
      'lowest': -whole_Bhw,
      'class': class_Bhw,
      'patches': rng.random(whole_Bhw.shape),
      'pixels': rng.random((len(whole_Bhw), *size)),
    }
    found['none'].append(np.asarray(seen_B)[: len(batch)])
    for kind, maps_Bhw in maps.items():
      images_BHWC = np.zeros((len(whole_Bhw), *size, 3), np.uint8)
      for i, photograph in enumerate(batch):
        map_HW = draw.enlarge(maps_Bhw[i], size)
        images_BHWC[i] = hide(
          photograph.seen_HWC, map_HW, share, checkpoint.preprocessing.mean
        )
      labelled_B = np.asarray(checkpoint.logits(images_BHWC)).argmax(-1)
      found[kind].append(labelled_B[: len(batch)])
  return {kind: np.concatenate(x) == labels_N for kind, x in found.items()}


def of_source(
  checkpoint: Checkpoint, source: LabelledSource, class_order: str
) -> tuple[Subject, np.ndarray]:
  """Returns the images of labelled data as the model sees them, and labels.

  Raises:
    ValueError: if the classes are not those of the checkpoint.
  """
  class_C = same_classes(checkpoint, source.class_names, class_order)
  images = checkpoint.images
  transform = images.eval_transform()
  photographs, labels = [], []
  for i in range(len(source)):
    record = source[i]
    example, path = transform(record), record['name']
    seen_HWC = np.asarray(example['image'])
    photographs.append(Photograph(path, path, seen_HWC, images))
    labels.append(example['label'])
  return Subject(checkpoint, photographs), class_C[labels]


def section(
  checkpoint: Checkpoint,
  source: LabelledSource,
  class_order: str = '',
  **how: Any,
) -> Section:
  """Returns the accuracies, and which images were right, as a section."""
  subject, labels_N = of_source(checkpoint, source, class_order)
  found = rights(subject, labels_N, **how)
  lines = [
    f'  {_NAMES[kind]:<40} {right_N.mean():7.2%}'
    for kind, right_N in found.items()
  ]
  return Section(
    title='Masking',
    text=f'Accuracy on {len(labels_N)} images with {SHARE:.0%} of the pixels '
    'hidden:\n' + '\n'.join(lines),
    arrays=found | {'labels': labels_N},
    figures=(),
  )
