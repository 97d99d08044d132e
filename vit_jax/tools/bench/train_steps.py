"""Training steps.

Ours is the step of the training loop: uint8 images in, flipped and normalised
on the device, cross-entropy, Adam with decoupled weight decay, the norms that
training watches. The batch is on the device already. Printed are images/s, the
seconds that compiling took, memory as the compiler has planned it (for torch:
as it was, on GPUs) and, where the device's peak is known, MFU: 3 x forward
FLOPs x images/s of the peak in bfloat16.

Steps run on the first device, or on as many as --devices says, which share the
batch; images/s are of all together, memory is of each. XLA uses the cores of a
CPU best with a device on each, unless steps take but a few milliseconds.

--vs names what runs in turns with it, on the same images:

  timm        timm's model of the same architecture with torch.compile, fused
              AdamW, autocast if --dtype=bfloat16
  timm-eager  the same without torch.compile

A device that cannot hold a batch says so, and the grid goes on.
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
  """Returns the training step of `train`, its batch on the device."""
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
