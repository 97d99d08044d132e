"""A model as ONNX with its attention, and what its attention says."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from vit_jax.data.preprocessing import Preprocessing
from vit_jax.tools.serve.uploads import Seen, View

FUSIONS = ('mean', 'min', 'max')


class Answer(NamedTuple):
  """What a model says of an image.

  Attributes:
    probability_C: float64; for DETR QC, the classes of what each query finds.
    boxes_Q4: for DETR, corners (x0, y0, x1, y1) as shares of the image.
    fused: by fusion of the heads, the layers' weights XLL; empty where the
      model has no attention that a map is made of.
    read_L: how much the output reads of each token.
    seconds: that it took, an equal share of its batch.
  """

  probability_C: np.ndarray
  boxes_Q4: np.ndarray | None
  fused: dict[str, np.ndarray]
  read_L: np.ndarray | None
  seconds: float

  @property
  def nbytes(self) -> int:
    """What it takes in memory."""
    arrays = [self.probability_C, *self.fused.values()]
    return sum(x.nbytes for x in (*arrays, self.boxes_Q4) if x is not None)


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
    finds_objects: whether it is DETR.
    about: what is said of it, for JSON.
  """

  def __init__(self, path: pathlib.Path, threads: int):
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
      images, *sizes = self._session.get_inputs()
      shapes = {x.name: x.shape for x in self._session.get_outputs()}
      saved: Any = self._session.get_modelmeta().custom_metadata_map
      given = Preprocessing.of(
        {
          # Numbers are stored as JSON, names as they are.
          x.name: value if isinstance(x.default, str) else json.loads(value)
          for x in dataclasses.fields(Preprocessing)
          if (value := saved.get(x.name)) is not None
        }
      )
      self._mean = np.array(given.mean, np.float32)
      self._std = np.array(given.std, np.float32)
      self.finds_objects = bool(sizes)
      self.view = View(tuple(images.shape[1:3]), given, self.finds_objects)
      # The last of DETR's is no object.
      C = shapes['logits'][-1] - self.finds_objects
      self.class_names = json.loads(saved['class_names']) or [
        str(c) for c in range(C)
      ]
      self._loss = saved['loss']
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
      'finds_objects': self.finds_objects,
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

  def run(self, seen: Sequence[Seen]) -> list[Answer]:
    """Answers images as the model sees them."""
    start = time.perf_counter()
    images_BHWC = np.stack([x.pixels_HWC for x in seen])
    given = {'images': (images_BHWC / np.float32(255) - self._mean) / self._std}
    if self.finds_objects:
      given['sizes'] = np.array([x.size for x in seen], np.int32)
    names = [x.name for x in self._session.get_outputs()]
    found = dict(zip(names, self._session.run(names, given), strict=True))
    probability_BC = _probabilities(found['logits'], self._loss)
    boxes_BQ4 = None
    if self.finds_objects:
      probability_BC = probability_BC[..., :-1]
      centre, size = np.split(found['boxes'], 2, axis=-1)
      boxes_BQ4 = np.concatenate([centre - size / 2, centre + size / 2], -1)
      boxes_BQ4 = boxes_BQ4.clip(0, 1)
    B = len(seen)
    seconds = (time.perf_counter() - start) / B
    fusions = FUSIONS if self.grid else ()
    # Copies, so that no image keeps its batch in memory.
    return [
      Answer(
        probability_BC[i].copy(),
        None if boxes_BQ4 is None else boxes_BQ4[i].copy(),
        {name: found[f'attention_{name}'][i].copy() for name in fusions},
        found['read'][i].copy() if self.grid else None,
        seconds,
      )
      for i in range(B)
    ]


def seconds_an_image(path: pathlib.Path, threads: int) -> float:
  """Returns how long a model takes, the shortest of a few times."""
  model = ServedModel(path, threads)
  size = model.view.size
  black = Seen(np.zeros((*size, 3), np.uint8), (0, 0, 1, 1), size)
  return min(model.run([black])[0].seconds for _ in range(4))


def _probabilities(logits_BC: np.ndarray, loss: str) -> np.ndarray:
  """Returns those of the classes: 1 in all, or each apart by a sigmoid."""
  x_BC = logits_BC.astype(np.float64)
  if loss == 'sigmoid':
    return 0.5 + 0.5 * np.tanh(0.5 * x_BC)  # which overflows nowhere
  exp_BC = np.exp(x_BC - x_BC.max(-1, keepdims=True))
  return exp_BC / exp_BC.sum(-1, keepdims=True)


def rollout(
  fused_XLL: np.ndarray,
  read_L: np.ndarray,
  grid: tuple[int, int],
  discard: float,
  layer: int | None,
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
