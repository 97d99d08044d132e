"""Runs a model as ONNX, and computes rollout maps from its attention."""

import dataclasses
import json
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from vit_jax.data.preprocessing import Preprocessing
from vit_jax.tools.serve.decoder import Seen, View

FUSIONS = ('mean', 'min', 'max')


class Answer(NamedTuple):
  """The output of a model for an image."""

  probability_C: np.ndarray  # float64; for DETR, [Q, C] for Q queries
  boxes_Q4: np.ndarray | None  # for DETR, (x0, y0, x1, y1), 0 to 1
  # For each fusion of heads, the attention weights of all X layers, [X, L, L];
  # empty if the model does not support maps.
  fused: dict[str, np.ndarray]
  # Weight of each token in the output, see `attention_maps.Layers`, or None.
  read_L: np.ndarray | None
  seconds: float  # run time of the model

  @property
  def nbytes(self) -> int:
    arrays = [self.probability_C, *self.fused.values()]
    return sum(x.nbytes for x in (*arrays, self.boxes_Q4) if x is not None)


class ServedModel:
  """A model from a file that `convert/onnx.py` wrote."""

  def __init__(self, path: pathlib.Path, threads: int):
    """Opens NAME.DTYPE.onnx; 0 threads means onnxruntime's default.

    Raises ValueError if the file is not a model of `convert/onnx.py`.
    """
    self.name, _, dtype = _text(path.stem).rpartition('.')
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Frees memory after each run, because boards have little.
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
          # Text is stored unchanged, all other values as JSON.
          x.name: value if isinstance(x.default, str) else json.loads(value)
          for x in dataclasses.fields(Preprocessing)
          if (value := saved.get(x.name)) is not None
        }
      )
      self._mean = np.array(given.mean, np.float32)
      self._std = np.array(given.std, np.float32)
      self.finds_objects = bool(sizes)
      self.view = View(tuple(images.shape[1:3]), given, self.finds_objects)
      # DETR's last class is "no object".
      C = shapes['logits'][-1] - self.finds_objects
      names = json.loads(saved['class_names']) or range(C)
      self.class_names = [_text(str(name)) for name in names]
      self._loss = saved['loss']
      has_map = 'attention_mean' in shapes
      grid = tuple(json.loads(saved['grid'])) or None
      # (h, w) of a map, in patches; None without maps.
      self.grid = grid if has_map else None
      self.layers = shapes['attention_mean'][1] if has_map else 0
      self.about = {  # for /api/models
        'name': self.name,
        'description': _text(saved['description']),
        'dtype': dtype,
        'megabytes': round(path.stat().st_size / 1e6, 2),
        'image_size': self.view.size,
        'classes': C,
        'finds_objects': self.finds_objects,
        'layers': self.layers,
        'grid': self.grid,
      }
    except Exception as e:
      raise ValueError(
        f'{path} is not a model for serving ({type(e).__name__}: {e}). Write '
        'one with python -m vit_jax.convert CHECKPOINT FOLDER --to=board.'
      ) from e

  def run(self, seen: Seen) -> Answer:
    """Runs the model on a preprocessed image.

    Images run one by one. In a batch, onnxruntime would take more CPU time per
    image, and quantise int8 activations by the range of the whole batch.
    """
    start = time.perf_counter()
    image_HWC = (seen.pixels_HWC / np.float32(255) - self._mean) / self._std
    given = {'images': image_HWC[None]}
    if self.finds_objects:
      given['sizes'] = np.array([seen.size], np.int32)
    names = [x.name for x in self._session.get_outputs()]
    outputs = self._session.run(names, given)
    found = {name: x[0] for name, x in zip(names, outputs, strict=True)}
    probability_C = _probabilities(found['logits'], self._loss)
    boxes_Q4 = None
    if self.finds_objects:
      probability_C = probability_C[:, :-1]
      centre, size = np.split(found['boxes'], 2, axis=-1)
      boxes_Q4 = np.concatenate([centre - size / 2, centre + size / 2], -1)
      boxes_Q4 = boxes_Q4.clip(0, 1)
    return Answer(
      probability_C,
      boxes_Q4,
      {x: found[f'attention_{x}'] for x in FUSIONS} if self.grid else {},
      found['read'] if self.grid else None,
      time.perf_counter() - start,
    )


def seconds_per_image(path: pathlib.Path, threads: int) -> float:
  """Returns the shortest of four run times of a model."""
  model = ServedModel(path, threads)
  size = model.view.size
  black = Seen(np.zeros((*size, 3), np.uint8), (0, 0, 1, 1), size)
  return min(model.run(black).seconds for _ in range(4))


def _probabilities(logits_C: np.ndarray, loss: str) -> np.ndarray:
  """Returns probabilities: the softmax, or the sigmoid of each logit."""
  x_C = logits_C.astype(np.float64)
  if loss == 'sigmoid':
    return 0.5 + 0.5 * np.tanh(0.5 * x_C)  # never overflows
  exp_C = np.exp(x_C - x_C.max(-1, keepdims=True))
  return exp_C / exp_C.sum(-1, keepdims=True)


def _text(text: str) -> str:
  """Replaces characters that UTF-8 cannot encode; file names may have them."""
  return text.encode(errors='replace').decode()


def rollout(
  fused_XLL: np.ndarray,
  read_L: np.ndarray,
  grid: tuple[int, int],
  discard: float,
  layer: int | None,
) -> np.ndarray:
  """Returns a rollout map [h, w] with maximum 1, or 0 if patches get no weight.

  Computes the same as `visualize/rollout.py`, without JAX.

  Args:
    fused_XLL: attention weights of all X layers, with the heads combined.
    read_L: weight of each token in the output.
    grid: (h, w) of the patches.
    discard: share of a layer's weights to drop, lowest first.
    layer: index of the only layer to use; None for all layers.
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
