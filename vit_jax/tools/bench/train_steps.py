"""Training steps.

Ours is the step of the training loop: it flips and normalises uint8 images on
the device, and computes cross-entropy, Adam with decoupled weight decay, and
the logged norms. The batch is already on the device. The table has images/s,
compile time, memory as planned by the compiler (for torch: as measured, on
GPUs) and, if the device's peak is known, MFU: 3 x forward FLOPs x images/s
divided by the peak in bfloat16.

Steps run on the first device, or on --devices devices that share the batch.
images/s is the total, memory is per device. On a CPU, XLA is fastest with one
device per core, unless steps take only a few milliseconds.

--vs names peers that alternate with ours, on the same images:

  timm        timm's model of the same architecture with torch.compile, fused
              AdamW, autocast if --dtype=bfloat16
  timm-eager  the same without torch.compile

If a batch does not fit into memory, this is printed and the grid continues.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.tools.bench import race, speed, step, torch_peer
from vit_jax.tools.bench.race import Contender
from vit_jax.tools.plan import aot
from vit_jax.training import sharding


def _ours(config: ConfigDict, devices: Sequence[jax.Device]) -> Contender:
  """Returns the training step of `train`, with its batch on the device."""
  experiment = step.experiment_of(config, devices)
  program = aot.training(experiment)
  compiled, facts = speed.timed(lambda: program.lower().compile())
  params = experiment.new_params()
  fixed = experiment.with_body(
    experiment.place(experiment.objective.fixed()), params
  )
  state = experiment.start(params)
  batch = sharding.global_batch(step.random_batch(config), experiment.mesh)
  metrics: Any = None
  numbers = itertools.count()

  def start() -> None:
    nonlocal state, metrics
    state, metrics = compiled(state, fixed, batch, np.int32(next(numbers)))

  turn = race.paced(
    start, lambda: jax.block_until_ready((state, metrics)), config.batch_size
  )
  mfu = speed.mfu_per_image_s(experiment.forward_flops, devices, passes=3)
  return Contender('ours', turn, **facts, mfu_per_image_s=mfu)


_timm = functools.partial(torch_peer.contender, training=True)
PEERS: dict[str, Callable[[ConfigDict], Contender]] = {
  'timm': functools.partial(_timm, compiled=True),
  'timm-eager': functools.partial(_timm, compiled=False),
}
bench = functools.partial(
  speed.bench, 'training', ('jax', 'flax', 'optax'), _ours, PEERS
)
