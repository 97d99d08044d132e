"""From uint8 images to logits, ours and others', on one device."""

import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import hardware, reader
from vit_jax.bench import race, step, train
from vit_jax.bench.output import Output, grid
from vit_jax.bench.race import Contender
from vit_jax.models import flops, variants
from vit_jax.report import bench as report

PEERS = ('onnx', 'timm', 'timm-eager')


def bench_inference(
  variants: Sequence[str],
  image_sizes: Sequence[int],
  batch_sizes: Sequence[int],
  dtype: str,
  versus: Sequence[str],
  overrides: Mapping[str, str],
  output: Output,
) -> None:
  """Measures every combination.

  Args:
    variants: of models, as in `b16`.
    image_sizes: sides in pixels.
    batch_sizes: images at once.
    dtype: of the computation; onnxruntime works in float32 in any case.
    versus: of `PEERS`.
    overrides: fields of the config of ours.
    output: takes the rows.

  Raises:
    ImportError: for a peer that is not installed.
    ValueError: for what cannot work, before anything is measured.
  """
  train.refuse_unknown(versus, PEERS)
  names = list(itertools.product(variants, image_sizes, batch_sizes))
  points = [step.config_of(*name, dtype, overrides) for name in names]
  device = jax.devices()[0]
  packages = ['jax', 'flax', *train.packages_of(versus)]
  print(race.machine(packages))
  print(f'{device.device_kind}, inference, {dtype}')
  with tempfile.TemporaryDirectory() as folder:
    for name, config in grid(
      list(zip(names, points, strict=True)),
      lambda point: train.title(*point[0]),
    ):
      makers = [functools.partial(ours, config, device)] + [
        functools.partial(_MAKERS[peer], config, folder) for peer in versus
      ]
      train.run_point(name, config, device, makers, output)
  output.finish(functools.partial(report.rates, title=f'inference, {dtype}'))


def ours(config: ConfigDict, device: jax.Device) -> Contender:
  """Returns the way of `predict`, images coming from host memory."""
  program = step.inference(config, device)
  started_s = time.monotonic()
  compiled = program.compile()
  compile_s = time.monotonic() - started_s
  params = jax.device_put(_params(config), device)
  images_BHWC = step.random_batch(config)['image']
  logits: Any = None

  def start() -> None:
    nonlocal logits
    logits = compiled(params, jax.device_put(images_BHWC, device))

  image_size = config_lib.image_size(config.data.image_size)
  peak = hardware.peak_flops(device)
  work = flops.forward_flops(step.model_of(config), image_size)
  return Contender(
    'ours',
    race.paced(start, lambda: jax.block_until_ready(logits), config.batch_size),
    {
      'compile_s': compile_s,
      'memory_gib': step.peak_bytes(compiled) / 2**30,
      'mfu_per_image_s': work / peak if peak else None,
    },
  )


def _params(config: ConfigDict) -> Any:
  image_size = config_lib.image_size(config.data.image_size)
  return variants.init(step.model_of(config), jax.random.key(0), image_size)


def _onnx(config: ConfigDict, folder: str) -> Contender:
  """Returns our weights in onnxruntime, on the CPU."""
  from vit_jax.convert import onnx

  model, params = step.model_of(config), _params(config)
  image_size = config_lib.image_size(config.data.image_size)
  checkpoint = reader.Checkpoint(
    'bench', model, jax.tree.map(np.asarray, params), image_size
  )
  path = os.path.join(folder, 'model.onnx')
  if os.path.exists(path):
    os.remove(path)  # of the point before
  onnx.write(checkpoint, path, 'float32')
  peer = onnx.open_peer(path, race.threads())
  images_BHWC = step.random_batch(config)['image']
  return Contender(
    peer.framework,
    race.paced(lambda: peer.run(images_BHWC), lambda: None, config.batch_size),
  )


def _timm(config: ConfigDict, folder: str, compiled: bool) -> Contender:
  del folder
  from vit_jax.bench import torch_peer

  return torch_peer.inference(config, compiled)


_MAKERS: dict[str, Callable[[ConfigDict, str], Contender]] = {
  'onnx': _onnx,
  'timm': functools.partial(_timm, compiled=True),
  'timm-eager': functools.partial(_timm, compiled=False),
}
