"""Exports a model as a portable program that runs without this package.

The directory contains the program, its parameters, and model.json, which
describes the input and the model. The program is StableHLO, serialised by
`jax.export`. It runs on CPU, CUDA and TPU, with any batch size:

  program = jax.export.deserialize(open('DIR/model.stablehlo', 'rb').read())
  params = dict(np.load('DIR/params.npz'))
  logits = program.call(params, images)

JAX guarantees that its versions of the next six months run the program.

Parameters are arguments of the program, not constants. JAX limits constants to
2 GB, and H/14 needs more. Exporting L/16 (1.2 GB) with constants took seven
times the memory of its parameters.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax.checkpoints.formats import archive
from vit_jax.checkpoints.formats.table import Peer, compared
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.convert.convert import dtype_notes
from vit_jax.data import atomic_files
from vit_jax.models import attention

DTYPES = ('float32', 'bfloat16')
PLATFORMS = ('cpu', 'cuda', 'tpu')

MODEL = 'model.stablehlo'
PARAMS = 'params.npz'
META = 'model.json'


def write(checkpoint: Checkpoint, target: str, dtype: str) -> list[str]:
  """Writes the program, a function of (params, images), and its parameters.

  The input is images, float32 [batch, H, W, 3], normalised as described in
  model.json. The output is float32: logits [batch, C] ([batch, h, w, C] for
  segmentation), predicted patches [batch, patches, ...], or the representation
  [batch, D] of a model without a head. DETR takes images without padding. Its
  output is a dictionary: the last layer's `boxes` [batch, Q, 4]; `logits`
  [batch, Q, C + 1], or `pre_logits` [batch, Q, D] without a head; and, if the
  model predicts masks, `mask_logits`.

  The program computes in `dtype`; parameters are float32. Returns the notes of
  `dtype_notes`.
  """
  params = traverse_util.flatten_dict(checkpoint.params, sep='/')
  model = checkpoint.model.clone(dtype=jnp.dtype(dtype))

  def apply(params: dict[str, jax.Array], images_BHWC: jax.Array) -> Any:
    tree = traverse_util.unflatten_dict(params, sep='/')
    y_BC, aux = model.apply({'params': tree}, images_BHWC)
    y_BC = y_BC.astype(jnp.float32)
    found = model.outputs(y_BC, aux)
    return found if len(found) > 1 else y_BC

  (batch,) = jax.export.symbolic_shape('batch')
  shapes = (
    {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in params.items()},
    jax.ShapeDtypeStruct((batch, *checkpoint.image_size, 3), jnp.float32),
  )
  # The program stores the precision, because TPUs multiply in bfloat16 by
  # default.
  precision = 'float32' if dtype == 'float32' else None
  with jax.default_matmul_precision(precision), attention.portable():
    exported = jax.export.export(jax.jit(apply), platforms=PLATFORMS)(*shapes)
  H, W = checkpoint.image_size
  meta = {
    'input': f'float32 (batch, {H}, {W}, 3), RGB, (x / 255 - mean) / std',
    'image_size': [H, W],
    **dataclasses.asdict(checkpoint.preprocessing),
    'dtype': dtype,
    'loss': checkpoint.loss,
    'class_names': list(checkpoint.class_names),
  }
  with atomic_files.new_folder(target) as folder:
    (folder / MODEL).write_bytes(exported.serialize())
    archive.save(os.fspath(folder / PARAMS), params, 'float32')
    (folder / META).write_text(f'{json.dumps(meta, indent=2)}\n')
  return dtype_notes(checkpoint, dtype)


def open_peer(path: str) -> Peer:
  """Opens a directory that `write` wrote, without building the model.

  Raises:
    ValueError: if a file is missing or damaged, or the files do not match.
  """
  folder = pathlib.Path(path)
  params = jax.device_put(archive.load(os.fspath(folder / PARAMS)))
  part = META
  try:
    meta = json.loads((folder / META).read_bytes())
    H, W = meta['image_size']
    mean_C, std_C = np.float32(meta['mean']), np.float32(meta['std'])
    part = MODEL
    program = jax.export.deserialize(bytearray((folder / MODEL).read_bytes()))
    part = f'{MODEL} with the arrays of {PARAMS}'
    call = jax.jit(program.call)
    found = jax.eval_shape(call, params, jnp.zeros((1, H, W, 3)))
  except Exception as e:
    raise archive.unreadable(path, part, e) from e
  has_boxes = isinstance(found, dict)

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    scaled = (images_BHWC / np.float32(255) - mean_C) / std_C
    outputs = call(params, scaled)
    return compared(outputs if has_boxes else {'logits': outputs})

  framework = f'jax.export of JAX {jax.__version__}'
  return Peer(framework, (H, W), run, boxes=4 * has_boxes)
