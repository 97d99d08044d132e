"""From uint8 images to logits, ours and others', on one device."""

import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.bench import race, speed, step
from vit_jax.bench.race import Contender
from vit_jax.checkpoints import opening
from vit_jax.plan import aot


def _ours(config: ConfigDict, devices: Sequence[jax.Device]) -> Contender:
  """Returns the way of `predict`, images coming from host memory."""
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

  mfu = speed.mfu_per_image_s(config, devices, passes=1)
  return Contender(
    'ours',
    race.paced(start, lambda: jax.block_until_ready(logits), config.batch_size),
    {**facts, 'mfu_per_image_s': mfu},
  )


def _onnx(config: ConfigDict) -> Contender:
  """Returns our weights in onnxruntime, on the CPU."""
  from vit_jax.convert import onnx

  experiment = step.experiment_of(config, jax.devices()[:1])
  checkpoint = opening.Checkpoint(
    'bench',
    experiment.objective.model,
    jax.tree.map(np.asarray, experiment.new_params()),
    experiment.facts.image_size,
  )
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'model.onnx')
    onnx.write(checkpoint, path, 'float32')
    peer = onnx.open_peer(path, race.threads())
  images_BHWC = step.random_batch(config)['image']
  return Contender(
    peer.framework,
    race.paced(lambda: peer.run(images_BHWC), lambda: None, config.batch_size),
  )


def _timm(config: ConfigDict, compiled: bool) -> Contender:
  from vit_jax.bench import torch_peer

  return torch_peer.inference(config, compiled)


def _check(peer: str, config: ConfigDict) -> None:
  if peer != 'onnx':
    from vit_jax.bench import torch_peer

    torch_peer.check(config)


TASK = speed.SpeedTask(
  'inference',
  ('jax', 'flax'),
  _ours,
  {
    'onnx': _onnx,
    'timm': functools.partial(_timm, compiled=True),
    'timm-eager': functools.partial(_timm, compiled=False),
  },
  _check,
)
