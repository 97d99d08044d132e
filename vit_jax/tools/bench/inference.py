"""Inference: uint8 images in host memory to logits, on the first device.

--vs names peers that alternate with ours:

  onnx        our ONNX file in onnxruntime, on the CPU
  timm        timm's model of the same architecture with torch.compile
  timm-eager  the same without torch.compile
"""

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.checkpoints import opening
from vit_jax.data import cores
from vit_jax.tools.bench import race, speed, step, torch_peer
from vit_jax.tools.bench.race import Contender
from vit_jax.tools.plan import aot


def _ours(config: ConfigDict, devices: Sequence[jax.Device]) -> Contender:
  """Returns the program of `predict`, with images from host memory."""
  (device,) = devices
  experiment = step.experiment_of(config, devices)
  program = aot.inference(experiment, device)
  compiled, facts = speed.timed(lambda: program.lower().compile())
  params = jax.device_put(experiment.new_params(), device)
  images_BHWC = step.random_batch(config)['image']
  logits: Any = None

  def start() -> None:
    nonlocal logits
    logits = compiled(params, jax.device_put(images_BHWC, device))

  turn = race.paced(
    start, lambda: jax.block_until_ready(logits), config.batch_size
  )
  mfu = speed.mfu_per_image_s(experiment.forward_flops, devices, passes=1)
  return Contender('ours', turn, **facts, mfu_per_image_s=mfu)


def _onnx(config: ConfigDict) -> Contender:
  """Returns our weights in onnxruntime, on the CPU."""
  from vit_jax.convert import onnx

  experiment = step.experiment_of(config, jax.devices()[:1])
  checkpoint = opening.Checkpoint(
    'bench',
    experiment.objective.model,
    jax.tree.map(np.asarray, experiment.new_params()),
    experiment.image_size,
  )
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'model.onnx')
    onnx.write(checkpoint, path, 'float32')
    peer = onnx.open_peer(path, cores.usable_cores())
  images_BHWC = step.random_batch(config)['image']
  return Contender(
    peer.framework,
    race.paced(lambda: peer.run(images_BHWC), lambda: None, config.batch_size),
  )


_timm = functools.partial(torch_peer.contender, training=False)
PEERS: dict[str, Callable[[ConfigDict], Contender]] = {
  'onnx': _onnx,
  'timm': functools.partial(_timm, compiled=True),
  'timm-eager': functools.partial(_timm, compiled=False),
}
bench = functools.partial(
  speed.bench, 'inference', ('jax', 'flax'), _ours, PEERS
)
