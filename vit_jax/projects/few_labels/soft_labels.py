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
  images: str,
  class_names: tuple[str, ...],
  split_seed: int,
  workers: int,
) -> np.ndarray:
  """Returns the probabilities float32 NC of a file, which is made if need be.

  All processes call it together, with a path that all of them see. The teacher
  labels each image as it would be measured, without noise.

  Args:
    path: of the file; it appears whole or not at all.
    teacher: of the classes; may be None where there is the file.
    source: the images.
    images: what they are called.
    class_names: C names.
    split_seed: which images their split has depends on it.
    workers: processes that read and decode.

  Raises:
    ValueError: if the file is none of these images and classes, or of another
      teacher than the one given, or there is neither file nor teacher.
  """
  place = absolute(path)
  found = multihost_utils.broadcast_one_to_all(np.int32(place.exists()))
  teachers = np.array([], np.uint32)
  if teacher:
    teachers = np.asarray(saving.checksums(teacher.params))
  if not found:
    if teacher is None:
      raise ValueError(
        f'objective.labels: there is no {path}, and no teacher to make it: '
        'name one, --config.teacher=PATH.'
      )
    probabilities_NC = _labelled(teacher, source, workers)
    if jax.process_index() == 0:
      file = io.BytesIO()
      np.savez(
        file,
        probabilities=probabilities_NC,
        class_names=np.array(class_names),
        images=np.array(images),
        split_seed=np.array(split_seed),
        teacher=teachers,
      )
      place.parent.mkdir(parents=True, exist_ok=True)
      atomic_files.replace(place, file.getvalue())
    multihost_utils.sync_global_devices('soft labels are kept')
  try:
    with place.open('rb') as file, np.load(file) as archive:
      probabilities_NC = archive['probabilities']
      said = str(archive['images']), tuple(map(str, archive['class_names']))
      # Older files do not have these two.
      seed, sums = (archive.get(key) for key in ('split_seed', 'teacher'))
  except (
    *(KeyError, OSError, ValueError, zipfile.BadZipFile),
    *(EOFError, TypeError),  # an empty file; an array, which numpy opens too
  ) as e:
    raise ValueError(f'{path} holds no soft labels: {e}') from e
  if probabilities_NC.shape != (len(source), len(class_names)) or said != (
    images,
    class_names,
  ):
    N, C = (*probabilities_NC.shape, 0, 0)[:2]
    raise ValueError(
      f'{path} has soft labels of {N:,} images of {said[0]} and {C:,} classes, '
      f'and not of the {len(source):,} of {images} and {len(class_names):,} '
      'classes: remove it, or name another file, '
      '--config.objective.labels=PATH.'
    )
  other = ''
  if seed is not None and seed != split_seed:
    other = f'data.split_seed={seed} and not {split_seed}'
  elif teacher and sums is not None and not np.array_equal(sums, teachers):
    other = f'another teacher than {teacher.path}'
  if other:
    raise ValueError(
      f'{path} has soft labels of {other}: remove it, or name another file, '
      '--config.objective.labels=PATH.'
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
