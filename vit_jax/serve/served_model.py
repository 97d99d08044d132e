"""A model as ONNX with its attention, and what its attention says."""

import json
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from vit_jax.serve.uploads import View

FUSIONS = ('mean', 'min', 'max')


class Answer(NamedTuple):
  """What a model says of an image.

  Attributes:
    logits_C: float32.
    fused: by fusion of the heads, the layers' weights XLL; empty where the
      model has no attention that a map is made of.
    read_L: how much the output reads of each token.
    seconds: that it took, an equal share of its batch.
  """

  logits_C: np.ndarray
  fused: dict[str, np.ndarray]
  read_L: np.ndarray | None
  seconds: float

  @property
  def nbytes(self) -> int:
    """What it takes in memory."""
    return sum(x.nbytes for x in (self.logits_C, *self.fused.values()))


class ServedModel:
  """A file of `convert/onnx.py`, ready to run.

  Attributes:
    name: what it is called.
    dtype: 'float32' or 'int8', as the name of its file says.
    file_bytes: its size.
    view: how it sees images.
    grid: (h, w) of the patches of a map; None where there is none.
    layers: how many it has.
    class_names: C of them, their numbers where nobody has named them.
    about: what is said of it, for JSON.
  """

  def __init__(self, path: pathlib.Path, threads: int = 0):
    """Opens it.

    Args:
      path: NAME.DTYPE.onnx.
      threads: that it runs in; 0 leaves that to onnxruntime.

    Raises:
      ValueError: if it is no file of this package with what is needed.
    """
    self.name, _, self.dtype = path.stem.rpartition('.')
    self.file_bytes = path.stat().st_size
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # What a run took is given back: memory is short where a page is served.
    options.enable_cpu_mem_arena = False
    try:
      self._session = onnxruntime.InferenceSession(
        path, options, providers=['CPUExecutionProvider']
      )
      (images,) = self._session.get_inputs()
      shapes = {x.name: x.shape for x in self._session.get_outputs()}
      saved: Any = self._session.get_modelmeta().custom_metadata_map
      self._mean, self._std = (
        np.float32(json.loads(saved[key])) for key in ('mean', 'std')
      )
      self.view = View(
        tuple(images.shape[1:3]),
        json.loads(saved['resize_small']),
        saved['interpolation'],
      )
      names = json.loads(saved['class_names'])
      self.class_names = names or [str(c) for c in range(shapes['logits'][1])]
      self.grid = tuple(json.loads(saved['grid'])) or None
      self._description = saved['description']
    except Exception as e:
      raise ValueError(
        f'{path} is no model that is served here, see python -m '
        f'vit_jax.convert --to=board: {type(e).__name__}: {e}'
      ) from e
    has_map = 'attention_mean' in shapes
    self.grid = self.grid if has_map else None
    self.layers = shapes['attention_mean'][1] if has_map else 0

  @property
  def about(self) -> dict[str, Any]:
    return {
      'name': self.name,
      'description': self._description,
      'dtype': self.dtype,
      'megabytes': round(self.file_bytes / 1e6, 2),
      'image_size': self.view.size,
      'classes': len(self.class_names),
      'layers': self.layers,
      'grid': self.grid,
    }

  @property
  def batches(self) -> bool:
    """Whether an image's answer is the same in any batch.

    In int8, activations are quantised by the range they have in their batch:
    what a stranger sends along would change it.
    """
    return self.dtype != 'int8'

  def run(self, images_BHWC: np.ndarray) -> list[Answer]:
    """Answers uint8 images of the model's size."""
    start = time.perf_counter()
    x = (images_BHWC / np.float32(255) - self._mean) / self._std
    names = [x.name for x in self._session.get_outputs()]
    found = dict(
      zip(names, self._session.run(names, {'images': x}), strict=True)
    )
    B = len(images_BHWC)
    seconds = (time.perf_counter() - start) / B
    fusions = FUSIONS if self.grid else ()
    # Copies, so that no image keeps its batch in memory.
    return [
      Answer(
        found['logits'][i].copy(),
        {name: found[f'attention_{name}'][i].copy() for name in fusions},
        found['read'][i].copy() if self.grid else None,
        seconds,
      )
      for i in range(B)
    ]


def seconds_an_image(path: pathlib.Path, threads: int) -> float:
  """Returns how long a model takes, the shortest of a few times."""
  model = ServedModel(path, threads)
  image_BHWC = np.zeros((1, *model.view.size, 3), np.uint8)
  return min(model.run(image_BHWC)[0].seconds for _ in range(4))


def rollout(
  fused_XLL: np.ndarray,
  read_L: np.ndarray,
  grid: tuple[int, int],
  discard: float = 0.0,
  layer: int | None = None,
) -> np.ndarray:
  """Returns a map hw, the largest value of which is 1 (or 0).

  As `visualize/rollout.py`, which says what it is.

  Args:
    fused_XLL: weights of all layers with the heads fused.
    read_L: how much the output reads of each token.
    grid: (h, w) of the patches.
    discard: share of a layer's weights, the lowest ones, that are set to 0.
    layer: the only one to look at, from 0; None for all.
  """
  row_L = read_L
  for a_LL in fused_XLL[::-1] if layer is None else fused_XLL[[layer]]:
    if count := int(discard * a_LL.size):
      a_LL = a_LL.copy()
      a_LL.reshape(-1)[np.argpartition(a_LL, count - 1, axis=None)[:count]] = 0
    share_L = row_L / (a_LL.sum(1) + 1)
    row_L = share_L @ a_LL + share_L
  patches = row_L[len(row_L) - grid[0] * grid[1] :]
  return (patches / max(float(patches.max()), 1e-30)).reshape(grid)
