"""Compares the outputs of two checkpoints or programs."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats.table import Peer, compared
from vit_jax.convert import onnx, stablehlo
from vit_jax.models.model import Params

IMAGES = 8  # few, to save memory


def agree(source: str, target: str, tolerance: float) -> bool:
  """Compares two models on the same random images and prints the result.

  A model is a checkpoint, an .onnx file or a StableHLO directory. A source
  checkpoint is converted to the target's image size. Returns whether the
  largest difference is within `tolerance` times the source's largest output.

  Raises:
    ValueError: if the source is a program for another image size, the outputs
      have different shapes, or the source gives the same output for all images.

  Also raises the errors of `open_peer`.
  """
  theirs = open_peer(target)
  height, width = size = theirs.image_size
  ours = open_peer(source, size)
  if ours.image_size != size:
    h, w = ours.image_size
    raise ValueError(
      f'{source} takes images of {h}x{w} pixels, but {target} takes '
      f'{height}x{width}. A program keeps its image size: export it again with '
      f'--image_size={height}x{width}.'
    )
  images = np.random.default_rng(0).integers(
    0, 256, (IMAGES, *size, 3), np.uint8
  )
  want, got = ours.run(images), theirs.run(images)
  if want.shape != got.shape:
    raise ValueError(
      f'{source} has outputs of shape {want.shape[1:]} and {target} of '
      f'{got.shape[1:]}. Compare checkpoints with the same head.'
    )
  if not np.ptp(want, axis=0).any():
    raise ValueError(
      f'{source} gives the same output for all images. Its head may be all '
      'zeros. Convert it with --head=drop to compare features.'
    )
  largest = float(np.abs(want).max())
  difference = float(np.abs(got - want).max()) / largest
  agree = difference <= tolerance
  C = want.shape[-1] - theirs.boxes
  same = got[..., :C].argmax(-1) == want[..., :C].argmax(-1)
  print(
    f'source      {source}: {ours.framework}\n'
    f'target      {target}: {theirs.framework}\n'
    f'images      {IMAGES} random images of {height}x{width} pixels\n'
    f'difference  {difference:.1e} of the largest output ({largest:.3g}); '
    f'{"within" if agree else "ABOVE"} the tolerance of {tolerance:g}\n'
    f'top-1       the same for {same.sum()} of {same.size}'
  )
  return agree


def open_peer(path: str, image_size: tuple[int, int] | None = None) -> Peer:
  """Opens a program in its own runtime, or a checkpoint in vit_jax.

  If `image_size` is given, a checkpoint is converted to this (H, W).

  Raises:
    OSError: if the path does not exist, or cannot be read or fetched.
    ImportError: if a needed library is not installed.
    ValueError: if the path is not a checkpoint or program, is damaged, or
      cannot be converted to the image size.
  """
  if path.endswith('.onnx') and os.path.exists(path):
    return onnx.open_peer(path)
  if os.path.exists(os.path.join(path, stablehlo.MODEL)):
    return stablehlo.open_peer(path)
  checkpoint = opening.open_checkpoint(path)
  if image_size and image_size != checkpoint.image_size:
    checkpoint = transfer.resized(checkpoint, image_size)
  # Computes in float32, whatever the model's dtype.
  exact = dataclasses.replace(
    checkpoint, model=checkpoint.model.clone(dtype=jnp.float32)
  )

  @jax.jit
  def apply(params: Params, images_BHWC: jax.Array) -> dict[str, jax.Array]:
    y, aux = exact.model.apply({'params': params}, exact.normalize(images_BHWC))
    return exact.model.outputs(y, aux)

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    # By default, TPUs and newer GPUs round the inputs of float32 products.
    with jax.default_matmul_precision('float32'):
      return compared(apply(exact.params, images_BHWC))

  framework = f'vit_jax on JAX {jax.__version__}'
  images_1HWC = jnp.zeros((1, *exact.image_size, 3))
  has_boxes = 'boxes' in jax.eval_shape(apply, exact.params, images_1HWC)
  return Peer(framework, exact.image_size, run, boxes=4 * has_boxes)
