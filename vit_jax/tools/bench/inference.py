"""Inference from uint8 images in host memory to logits, on the first device.

--vs names other implementations, which run in turns with ours:

  onnx        our model as ONNX in onnxruntime, on the CPU in float32
  timm        timm's model of the same architecture with torch.compile
  timm-eager  timm's model without torch.compile
"""

import functools
import os
import tempfile

import jax
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.data import cores
from vit_jax.experiment import Experiment
from vit_jax.tools.bench import race, speed, step, torch_peer
from vit_jax.tools.bench.race import Contender


def _onnx(experiment: Experiment) -> Contender:
  """Returns a contender that runs our weights in onnxruntime on the CPU."""
  from vit_jax.convert import onnx

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
  images_BHWC = step.random_batch(experiment)['image']
  return Contender(
    peer.framework,
    race.paced(lambda: peer.run(images_BHWC), lambda: None, len(images_BHWC)),
  )


PEERS = {'onnx': _onnx, **torch_peer.peers(training=False)}
bench = functools.partial(speed.bench, 'inference', ('jax', 'flax'), PEERS)
