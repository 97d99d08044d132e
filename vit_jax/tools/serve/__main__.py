"""Serve checkpoints on this machine, as a web page and an HTTP API.

  python -m vit_jax.serve CHECKPOINT [MORE ...] --port=8000

The page can compare two checkpoints side by side. Models run as ONNX in
float32; JAX computes only the attention rollout for a class. To serve on a
machine without JAX, write a folder for it with `python -m vit_jax.convert
CHECKPOINT board --to=board`.
"""

import argparse
import pathlib
import signal
import sys
import tempfile
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.cli import flags
from vit_jax.tools.serve import board
from vit_jax.tools.serve import flags as serve_flags
from vit_jax.visualize import photos
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import rollout


def explained(
  checkpoint: opening.Checkpoint,
  pixels_HWC: np.ndarray,
  number: int,
  fusion: str,
  discard: float,
) -> np.ndarray:
  """Returns the attention rollout for a class, [h, w]; see `engine.Explain`."""
  layers = Layers(
    checkpoint.model,
    checkpoint.on_device,
    checkpoint.normalize(jnp.asarray(pixels_HWC[None])),
  )
  return np.asarray(rollout(layers, fusion, discard, np.array([number])))[0]


def open_all(paths: Sequence[str]) -> dict[str, opening.Checkpoint]:
  """Opens checkpoints. Keys of the result are their names on the page."""
  checkpoints = [opening.open_checkpoint(path) for path in paths]
  names = photos.unique_names([board.name_of(x.path) for x in checkpoints])
  return dict(zip(names, checkpoints, strict=True))


def _run(args: argparse.Namespace) -> None:
  from vit_jax.tools.serve import listening  # needs the extra `serve`

  checkpoints = open_all(args.checkpoints)

  # Without a handler, SIGTERM would leave the temporary folder behind.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  with tempfile.TemporaryDirectory() as folder:
    for name, checkpoint in checkpoints.items():
      print(f'converting {checkpoint.path} as {name}', flush=True)
      lost = board.write_model(
        checkpoint, pathlib.Path(folder), name, 'float32'
      )
      for sentence in lost:
        print(f'note      {sentence}', flush=True)
    paths = [
      pathlib.Path(folder) / f'{name}.float32.onnx' for name in checkpoints
    ]
    listening.serve(
      args, paths, lambda name, *asked: explained(checkpoints[name], *asked)
    )


def main() -> int:
  parser = flags.parser('serve', __doc__)
  parser.add_argument('checkpoints', nargs='+', help=WHAT_OPENS)
  serve_flags.add_flags(parser)
  return flags.command(_run, parser.parse_args())


if __name__ == '__main__':
  sys.exit(main())
