"""Measures images/s over a grid of models, image sizes and batch sizes."""

import argparse
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.data import cores
from vit_jax.experiment import Experiment
from vit_jax.tools.bench import race, step, torch_peer
from vit_jax.tools.bench.race import Contender
from vit_jax.tools.plan import aot
from vit_jax.training import hardware, sharding


def train(args: argparse.Namespace) -> None:
  """Training steps.

  Our code runs the step of the training loop. The step flips and normalises
  uint8 images on the device, and computes cross-entropy, Adam with decoupled
  weight decay, and the logged norms. The batch is already on the device.

  The table lists images/s, compile time and peak memory. For JAX, the compiler
  predicts the peak. For PyTorch it is measured, on GPUs only. If the peak
  FLOP/s of the device is known, our row lists MFU: 3 x forward FLOPs x
  images/s, divided by the bfloat16 peak of all devices in use.

  Steps run on the first device, or on --devices devices that share the batch.
  images/s is the total over devices; memory is per device.

  --vs names other implementations, which run in turns with ours on the same
  images:

    timm        timm's model of the same architecture with torch.compile, fused
                AdamW, and autocast if --dtype=bfloat16
    timm-eager  the same without torch.compile

  If a batch does not fit into memory, the command prints a message and leaves
  the implementation out.
  """
  _bench(args, training=True)


def inference(args: argparse.Namespace) -> None:
  """Inference from uint8 images in host memory to logits, on the first device.

  --vs names other implementations, which run in turns with ours:

    onnx        our model as ONNX in onnxruntime, on the CPU in float32
    timm        timm's model of the same architecture with torch.compile
    timm-eager  timm's model without torch.compile
  """
  _bench(args, training=False)


def peers_of(training: bool) -> dict[str, Callable[[Experiment], Contender]]:
  """Returns the functions that make other contenders, by name in `--vs`."""
  timm = torch_peer.peers(training)
  return timm if training else {'onnx': _onnx, **timm}


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


def _bench(args: argparse.Namespace, training: bool) -> None:
  """Measures every combination of the grid.

  Raises:
    ImportError: if a peer is not installed.
    ValueError: if a flag or a combination is invalid, which is checked before
      any measurement; or if a peer cannot run a combination.
  """
  count, peers = args.devices, peers_of(training)
  for peer in args.vs:
    if peer not in peers:
      raise ValueError(f'--vs={peer} is unknown. Use {", ".join(peers)}.')
  torch = ['timm', 'torch'] if {'timm', 'timm-eager'} & {*args.vs} else []
  if torch:
    # Leaves 53 % of GPU memory to PyTorch. By default, JAX takes 3/4.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '.47')
  if count > 1 and 'JAX_NUM_CPU_DEVICES' not in os.environ:
    jax.config.update('jax_num_cpu_devices', count)
    # XLA uses one thread per core. A simulated device that waits for the others
    # blocks a thread, so too few threads would cause a deadlock.
    threads = max(os.cpu_count() or 1, 2 * count)
    os.environ.setdefault('PJRT_NPROC', str(threads))
  names = list(
    itertools.product(args.variants, args.image_sizes, args.batch_sizes)
  )
  configs = [step.config_of(*name, args.dtype, args.set) for name in names]
  devices = _devices(count, args.vs)
  kind = devices[0].device_kind
  experiments = [step.experiment_of(config, devices) for config in configs]
  if torch:
    torch_peer.libraries()
    for experiment in experiments:
      torch_peer.arguments(experiment)  # raises if timm lacks the model
  print(race.machine(['jax', 'flax', 'optax', *torch]))
  what = 'training' if training else 'inference'
  print(f'{count} x {kind}, {what}, {args.dtype}')
  for i, (name, experiment) in enumerate(
    zip(names, experiments, strict=True), 1
  ):
    print(f'[{i} of {len(names)}]', '{} at {}, batch {}'.format(*name))
    makers = [functools.partial(ours, experiment, devices, training)]
    makers += [functools.partial(peers[peer], experiment) for peer in args.vs]
    print(*race.race(makers), sep='\n', flush=True)


def _devices(count: int, versus: Sequence[str]) -> list[jax.Device]:
  """Returns the first `count` devices, which share the batch."""
  devices = jax.devices()
  kind = devices[0].device_kind
  if not 1 <= count <= len(devices):
    raise ValueError(
      f'--devices is {count}; it must be from 1 to {len(devices)}, the number '
      f'of {kind} devices.'
    )
  if count > 1 and versus and devices[0].platform != 'cpu':
    raise ValueError(
      f'--devices is {count}, but --vs={",".join(versus)} runs on one {kind}. '
      'Use --devices=1.'
    )
  return devices[:count]


def ours(
  experiment: Experiment, devices: Sequence[jax.Device], training: bool
) -> Contender:
  """Returns our training step or our inference as a contender.

  The batch of a training step is already on the devices. Inference copies its
  images from host memory.
  """
  batch = step.random_batch(experiment)
  if training:
    program = aot.training(experiment)
  else:
    program = aot.inference(experiment, devices[0])
  started_s = time.monotonic()
  compiled = program.lower().compile()
  compile_s = time.monotonic() - started_s
  params = experiment.new_params()
  latest: Any = None
  if training:
    fixed = experiment.all_fixed(
      experiment.place(experiment.objective.fixed()), params
    )
    state = experiment.start(params)
    placed = sharding.global_batch(batch, experiment.mesh)
    numbers = itertools.count()
  else:
    params = jax.device_put(params, devices[0])

  def learn() -> None:
    nonlocal state, latest
    latest = compiled(state, fixed, placed, np.int32(next(numbers)))
    state = latest[0]

  def infer() -> None:
    nonlocal latest
    latest = compiled(params, jax.device_put(batch['image'], devices[0]))

  peak = hardware.peak_flops(devices[0])
  passes = 3 if training else 1  # the backward pass costs two forward passes
  return Contender(
    'ours',
    race.paced(
      learn if training else infer,
      lambda: jax.block_until_ready(latest),
      len(batch['image']),
    ),
    compile_s,
    aot.peak_bytes(compiled) / 2**30,
    passes * experiment.forward_flops / (peak * len(devices)) if peak else None,
  )
