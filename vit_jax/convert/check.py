"""Whether two checkpoints compute the same, each in its own framework."""

import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening, transfer
from vit_jax.checkpoints.formats import archive, hf, recognise, tensors, timm
from vit_jax.checkpoints.formats.table import Peer
from vit_jax.convert import onnx, stablehlo

# As many as fit anywhere; noise shows differences as well as photographs.
IMAGES = 8


@dataclasses.dataclass(frozen=True)
class Comparison:
  """How two checkpoints differ on the same images.

  Attributes:
    source: what ran the first.
    target: what ran the second.
    image_size: (H, W) in pixels.
    largest: the largest absolute value that the source puts out.
    difference: the largest difference, as a share of `largest`.
    agreement: images whose highest output is the same.
  """

  source: str
  target: str
  image_size: tuple[int, int]
  largest: float
  difference: float
  agreement: int


def compare(source: str, target: str) -> Comparison:
  """Runs two checkpoints on the same random images.

  Where the target is for another image size, the source is resized to it by
  this package.

  Args:
    source: any checkpoint, an .onnx file or a StableHLO directory.
    target: the same.

  Raises:
    FileNotFoundError: if one is not there.
    ValueError: if one cannot be read, or their outputs have different shapes.
  """
  theirs = open_peer(target)
  ours = open_peer(source)
  if ours.image_size != theirs.image_size:
    ours = _ours(source, theirs.image_size)
  images = np.random.default_rng(0).integers(
    0, 256, (IMAGES, *theirs.image_size, 3), np.uint8
  )
  want, got = ours.run(images), theirs.run(images)
  if want.shape != got.shape:
    raise ValueError(
      f'{source} gives {want.shape[-1]:,} outputs and {target} '
      f'{got.shape[-1]:,}: one has a head that the other has not, and nothing '
      'can be compared.'
    )
  largest = float(np.abs(want).max())
  return Comparison(
    source=ours.framework,
    target=theirs.framework,
    image_size=theirs.image_size,
    largest=largest,
    # A zeroed head puts out zeros.
    difference=float(np.abs(got - want).max()) / (largest or 1.0),
    agreement=int(np.sum(got.argmax(-1) == want.argmax(-1))),
  )


def open_peer(path: str) -> Peer:
  """Opens a checkpoint with the framework that its format belongs to.

  For .npz files that is timm, the one library with loaders for all of them.
  Where it is not installed, or has no such model, this package opens the file,
  and the peer's name says why.

  Raises:
    FileNotFoundError: if nothing is there.
    ImportError: if it takes onnxruntime, which is not installed.
    ValueError: if it cannot be read.
  """
  if path.endswith('.onnx'):
    return onnx.open_peer(path)
  if os.path.exists(os.path.join(path, stablehlo.MODEL)):
    return stablehlo.open_peer(path)
  opener, fallible = _opener(path)
  try:
    return opener(path)
  except fallible as e:
    peer = _ours(path)
    return dataclasses.replace(peer, framework=f'{peer.framework} ({e})')


def _opener(
  path: str,
) -> tuple[Callable[[str], Peer], tuple[type[Exception], ...]]:
  """Returns what opens a checkpoint, and the errors that let us stand in."""
  if os.path.exists(place := os.path.join(path, 'config.json')):
    config = tensors.read_json(place)
    module = hf if 'model_type' in config else timm
    return module.open_peer, (ImportError,)
  if os.path.isfile(path) and archive.is_archive(path):
    module = recognise.archive_format(archive.load(path))
    return module.open_peer, (ImportError, ValueError)
  return _ours, ()


def _ours(path: str, image_size: tuple[int, int] | None = None) -> Peer:
  checkpoint = opening.open_checkpoint(path)
  if image_size:
    checkpoint = transfer.resized(checkpoint, image_size)
  # At the precision of the targets, whatever it was trained in.
  exact = dataclasses.replace(
    checkpoint, model=checkpoint.model.clone(dtype=jnp.float32)
  )

  def run(images_BHWC: np.ndarray) -> np.ndarray:
    # On a TPU and newer GPUs, float32 products would be rounded to less.
    with jax.default_matmul_precision('float32'):
      return np.asarray(exact.logits(images_BHWC))

  return Peer(f'vit_jax on JAX {jax.__version__}', checkpoint.image_size, run)
