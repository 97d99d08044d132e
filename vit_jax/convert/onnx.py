"""Exports a model as an ONNX file for onnxruntime and most other runtimes.

The input `images` is float32 [batch, H, W, 3], normalised as described in the
metadata. All outputs are float32:

  logits            [batch, C]: logits of a classifier; [batch, h, w, C] of
                    segmentation, for h x w patches.
  pre_logits        [batch, D]: representation of a model without a head.
  predictions       [batch, patches, ...]: predicted patches.
  rollout           [batch, h, w]: the attention rollout, with `rollout` but not
                    with `served`.
  attention_mean, attention_min, attention_max
                    [batch, layers, L, L]: attention weights reduced over heads.
  read              [batch, L]: weight of each token in the pooled output.

The attention weights and `read` exist only with `served`, for models in which
every token attends to all tokens.

DETR outputs the last layer's `boxes` [batch, Q, 4] and `logits` [batch, Q,
C + 1]. Without a head, `pre_logits` [batch, Q, D] replaces `logits`. `served`
adds the input `sizes`, int32 [batch, 2]: height and width of each image without
padding. Without `served`, images have no padding, and `model.masks` adds
`mask_logits`.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import vit_jax
from vit_jax.checkpoints.formats.table import COMPARED, Peer
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.convert.convert import dtype_notes
from vit_jax.data import atomic_files
from vit_jax.models import attention
from vit_jax.models.model import padding
from vit_jax.visualize import attention_maps
from vit_jax.visualize import rollout as rollout_lib

DTYPES = ('float32', 'float16', 'int8')


def write(
  checkpoint: Checkpoint,
  target: str,
  dtype: str,
  rollout: bool = False,
  served: bool = False,
  opset: int | None = None,
) -> list[str]:
  """Writes a file that takes any batch size.

  With 'float16', inputs, outputs, softmax, the statistics of norms and the head
  stay float32, as in JAX. With 'int8', products with weight matrices are
  quantised; other operations, such as convolutions, stay float32. `served`
  makes the file for `vit_jax.tools.serve`. Without an opset, the file gets the
  lowest that suffices. Returns notes: if a 16-bit model computes in another
  dtype, and if a ResNet's convolutions stay float32 with 'int8'.

  Raises:
    OSError: if the target exists or cannot be written.
    ImportError: if a library is not installed.
    ValueError: if the model does not support `rollout`, 'int8' or ONNX, the
      file would be too large, or the opset lacks an operator or is unknown.
  """
  if dtype == 'int8' and not checkpoint.model.attention:
    raise ValueError(
      f'A {type(checkpoint.model).__name__} consists of convolutions, which '
      'are slow and inaccurate in int8. Use --dtype=float32.'
    )
  if dtype == 'int8':
    importlib.import_module('onnxruntime')  # may be missing; exports take long
  with atomic_files.new_file(target) as path:
    computes = 'float32' if dtype == 'int8' else dtype
    model = _to_model(checkpoint, rollout, served, computes, opset)
    if dtype == 'int8':
      _quantize(model, path)
    else:
      path.write_bytes(model.SerializeToString())
  lost = dtype_notes(checkpoint, computes)
  paths = flatten_dict(checkpoint.params)
  if dtype == 'int8' and any('conv_root' in path for path in paths):
    lost.append(
      'The convolutions of the ResNet stay float32, because they are slow and '
      'inaccurate in int8.'
    )
  return lost


def open_peer(path: str, threads: int = 0) -> Peer:
  """Opens a file that `write` wrote, with onnxruntime on the CPU.

  With 0 threads, onnxruntime chooses their number.

  Raises:
    ImportError: if onnxruntime is not installed.
    ValueError: if the file cannot be read.
  """
  import onnxruntime as runtime

  options = runtime.SessionOptions()
  options.intra_op_num_threads = threads
  try:
    session = runtime.InferenceSession(
      path, options, providers=['CPUExecutionProvider']
    )
    images, *sizes = session.get_inputs()
    _, H, W, _ = images.shape
    saved = session.get_modelmeta().custom_metadata_map
    mean, std = (np.float32(json.loads(saved[key])) for key in ('mean', 'std'))
  except Exception as e:
    raise ValueError(
      f'{path} is not an ONNX file of this package. Write one with --to=onnx. '
      f'{type(e).__name__}: {e}'
    ) from e
  names = [output.name for output in session.get_outputs()]
  wanted = [x for x in COMPARED if x in names]

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    x = (images_BHWC / np.float32(255) - mean) / std
    # With `served`, DETR also takes the size of each image without padding. The
    # images given here have no padding.
    full_sizes = {
      size.name: np.full((len(x), 2), (H, W), np.int32) for size in sizes
    }
    return np.concatenate(
      session.run(wanted, {images.name: x} | full_sizes), -1
    )

  framework = f'onnxruntime {runtime.__version__}'
  return Peer(framework, (H, W), run, boxes=4 * ('boxes' in wanted))


def _to_model(
  checkpoint: Checkpoint,
  rollout: bool,
  served: bool,
  dtype: str,
  opset: int | None,
) -> Any:
  """Returns an `onnx.ModelProto`."""
  # Imported here, because they import `onnx`, which may be missing.
  from vit_jax.convert import onnx_patterns, onnx_trace

  model = checkpoint.model.clone(
    scan=False, remat='none', dtype=jnp.dtype(dtype)
  )
  if rollout and model.attention != 'all':
    raise ValueError(
      '--rollout needs attention between all tokens, which this '
      f'{type(model).__name__} lacks. Leave --rollout out.'
    )

  inputs: dict[str, Any] = {'images': ((*checkpoint.image_size, 3), np.float32)}
  if served and model.any_size:
    inputs['sizes'] = ((2,), np.int32)

  def function(
    params: Any, images_BHWC: jax.Array, size_B2: jax.Array | None = None
  ) -> dict[str, jax.Array]:
    if served and model.attention == 'all':
      return _with_attention(model, params, images_BHWC)
    padded: dict[str, Any] = {}
    if size_B2 is not None:
      is_padding_BHW = padding(size_B2, checkpoint.image_size)
      images_BHWC = jnp.where(is_padding_BHW[..., None], 0.0, images_BHWC)
      padded['padding_BHW'] = is_padding_BHW
    if rollout:
      y_BC, layers, read_BL = attention_maps.run(model, params, images_BHWC)
      fused = [rollout_lib.fuse(x_BNLL) for x_BNLL in layers]
      grid = model.grid(checkpoint.image_size)
      maps_Bhw = rollout_lib.maps(fused, read_BL, grid)
      return model.outputs(y_BC, {}) | {'rollout': maps_Bhw}
    y_BC, aux = model.apply({'params': params}, images_BHWC, **padded)
    outputs = model.outputs(y_BC, aux)
    if served:  # the server does not show masks
      outputs.pop('mask_logits', None)
    return outputs

  try:
    with attention.portable():
      graph, outputs = onnx_trace.trace(
        function,
        checkpoint.model.unstack_layers(checkpoint.params),
        inputs,
        onnx_patterns.of(model),
      )
  except NotImplementedError as e:
    raise ValueError(
      f'{checkpoint.path} cannot be written as ONNX: {e} is not supported. Use '
      '--to=stablehlo or orbax.'
    ) from e
  class_names = checkpoint.class_names
  if served:  # unique names, as `predict` prints them
    class_names = checkpoint.unique_names
  metadata = {
    'source': f'vit_jax {vit_jax.__version__} on JAX {jax.__version__}',
    'input': (
      'images: float32, batch x height x width x 3 (RGB), '
      '(x / 255 - mean) / std with x from 0 to 255'
    ),
    'class_names': json.dumps(class_names),
    'description': checkpoint.describe(),
    'grid': json.dumps(checkpoint.model.grid(checkpoint.image_size)),
    'loss': checkpoint.loss,
  } | {
    key: value if isinstance(value, str) else json.dumps(value)
    for key, value in dataclasses.asdict(checkpoint.preprocessing).items()
  }
  outputs = {name: graph.cast(x, np.float32) for name, x in outputs.items()}
  return graph.to_model(outputs, metadata, opset)


def _with_attention(
  model: Any, params: Any, images_BHWC: jax.Array
) -> dict[str, jax.Array]:
  logits_BC, layers, read_BL = attention_maps.run(model, params, images_BHWC)
  fused: dict[str, list[jax.Array]] = {'mean': [], 'min': [], 'max': []}
  for x_BHLL in layers:
    # In onnxruntime, this is five times as fast as a reduction over axis 1.
    heads = [x_BHLL[:, h] for h in range(x_BHLL.shape[1])]
    fused['mean'].append(functools.reduce(jnp.add, heads) / len(heads))
    fused['min'].append(functools.reduce(jnp.minimum, heads))
    fused['max'].append(functools.reduce(jnp.maximum, heads))
  outputs = {f'attention_{name}': jnp.stack(x, 1) for name, x in fused.items()}
  return {'logits': logits_BC, **outputs, 'read': read_BL}


def _quantize(model: Any, path: pathlib.Path) -> None:
  """Quantises a model's products with weight matrices to int8, and writes it.

  Activations are quantised when the file runs, by their range at that time.
  """
  from onnxruntime import quantization

  # Marks the model as preprocessed, so that onnxruntime does not warn.
  model.metadata_props.add(
    key='onnx.quant.pre_process', value='onnxruntime.quant'
  )
  flat = {x.name for x in model.graph.initializer if len(x.dims) == 2}
  quantization.quantize_dynamic(
    model,
    path,
    # Excludes products with one matrix per head (relative positions), which
    # onnxruntime fails to run in int8.
    nodes_to_quantize=[
      node.name
      for node in model.graph.node
      if node.op_type == 'MatMul' and node.input[1] in flat
    ],
    per_channel=True,
    # Uses 7 bits. With 8 bits, older x86 CPUs could overflow, because they add
    # two products in 16 bits. With 7 bits, all CPUs compute the same numbers.
    reduce_range=True,
    weight_type=quantization.QuantType.QInt8,
  )
