"""What a teacher says of images without labels, kept in a file.

The file is a NumPy archive: `probabilities` float32 NC of all images in their
order, `class_names` of C, `images`, the name and split of the data,
`split_seed` of the split, and `teacher`, the checksums of its parameters.
"""

import io
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.checkpoints import opening, saving
from vit_jax.checkpoints.saving import absolute
from vit_jax.data import atomic_files
from vit_jax.data.sources import Source
from vit_jax.training import features, sharding

BATCH_SIZE = 256


def kept(
  path: str,
  teacher: opening.Checkpoint | None,
  source: Source,
  data: ConfigDict,
  class_names: tuple[str, ...],
) -> np.ndarray:
  """Returns the probabilities float32 NC of a file, after making it if needed.

  All processes call it together, with a path that all of them see. The teacher
  labels each image as it would be measured, without noise.

  Args:
    path: of the file; it appears whole or not at all.
    teacher: of the classes; may be None if the file exists.
    source: the images.
    data: as `config.data`, with their name and split.
    class_names: C names.

  Raises:
    ValueError: if the file holds other images, classes or another teacher's
      labels, or neither file nor teacher exists.
  """
  place = absolute(path)
  found = multihost_utils.broadcast_one_to_all(np.int32(place.exists()))
  wanted: dict[str, Any] = {
    'images': f'{data.name} {data.split}',
    'class_names': class_names,
    'split_seed': data.split_seed,
  }
  if teacher:
    wanted['teacher'] = saving.checksums(teacher.params)
  if not found:
    if teacher is None:
      raise ValueError(
        f'objective.labels: there is no {path}, and no teacher to make it: '
        'name one, --config.teacher=PATH.'
      )
    probabilities_NC = _labelled(teacher, source, data.workers)
    if jax.process_index() == 0:
      file = io.BytesIO()
      np.savez(file, probabilities=probabilities_NC, **wanted)
      place.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace(place, file.getvalue())
    multihost_utils.sync_global_devices('soft labels are kept')
  try:
    with place.open('rb') as file, np.load(file) as archive:
      probabilities_NC = archive['probabilities']
      # Older files lack the other two.
      held = {name: archive[name] for name in ('images', 'class_names')}
      held |= {x: archive[x] for x in wanted if x in archive}
  except (
    *(KeyError, OSError, ValueError, zipfile.BadZipFile),
    *(EOFError, TypeError),  # an empty file; an array, which numpy opens too
  ) as e:
    raise ValueError(f'{path} holds no soft labels: {e}') from e
  other = [
    name for name, x in held.items() if not np.array_equal(x, wanted[name])
  ]
  if other or probabilities_NC.shape != (len(source), len(class_names)):
    raise ValueError(
      f'{path} has soft labels of shape {probabilities_NC.shape} of '
      f'{held["images"]}, and {len(source):,} images of {wanted["images"]} and '
      f'{len(class_names):,} classes are wanted'
      + (f' (other {" and ".join(other)})' if other else '')
      + ': remove it, or name another file, --config.objective.labels=PATH.'
    )
  return probabilities_NC


def _labelled(
  teacher: opening.Checkpoint, source: Source, workers: int
) -> np.ndarray:
  """Returns the teacher's probabilities NC, in every process."""
  mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
  batch_size = -(-BATCH_SIZE // mesh.size) * mesh.size
  params = sharding.place(teacher.params, sharding.replicated(mesh))

  def probabilities(params: Any, images_BHWC: jax.Array) -> jax.Array:
    logits_BC, _ = teacher.model.apply({'params': params}, images_BHWC)
    return jax.nn.softmax(logits_BC.astype(jnp.float32))

  label = features.Extractor(
    probabilities,
    teacher.images,
    batch_size=batch_size,
    mesh=mesh,
    workers=workers,
  )
  return label(params, source, 'Labelling images')


def balanced(
  probabilities_NC: np.ndarray, threshold: float, images_a_class: int
) -> np.ndarray:
  """Returns which images are learned from, as often as they are, int64.

  Those whose likeliest class has at least the probability `threshold`; of each
  class as many, the likeliest first, and again from the first where a class
  lacks some.

  Args:
    probabilities_NC: of all images.
    threshold: from 0 to 1.
    images_a_class: how many; 0 for as many as the largest class has. A class
      without any stays without.

  Raises:
    ValueError: if no image reaches the threshold.
  """
  top_N, classes_N = probabilities_NC.max(1), probabilities_NC.argmax(1)
  rows = np.argsort(-top_N, kind='stable')
  rows = rows[top_N[rows] >= threshold]
  if not rows.size:
    raise ValueError(
      f'objective.threshold is {threshold}, and the teacher is not so sure of '
      f'any image; of the surest {top_N.max():.3f}. Lower it.'
    )
  members = [rows[classes_N[rows] == c] for c in np.unique(classes_N[rows])]
  n = images_a_class or max(map(len, members))
  return np.concatenate([np.resize(each, n) for each in members])
