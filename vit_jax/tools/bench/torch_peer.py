"""Benchmarks timm's models in PyTorch."""

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import timm_config
from vit_jax.data import cores
from vit_jax.experiment import Experiment
from vit_jax.models import flops
from vit_jax.tools.bench import race, step
from vit_jax.tools.bench.race import Contender


def arguments(experiment: Experiment) -> dict[str, Any]:
  """Returns the arguments of `timm.create_model` for an experiment's model.

  Raises ValueError if timm lacks the model.
  """
  model, size = experiment.objective.model, experiment.image_size
  # Only names and shapes matter. Broadcast arrays take no memory.
  params = jax.tree.map(
    lambda x: np.broadcast_to(np.float32(0), x.shape),
    flops.param_shapes(model, size),
  )
  weights = opening.Checkpoint('', model, params, size).weights()
  found = timm_config.config(weights, {})
  return {
    'model_name': found['architecture'],
    'num_classes': step.NUM_CLASSES,
    **found.get('model_args', {}),
  }


def peers(training: bool) -> dict[str, Callable[[Experiment], Contender]]:
  """Returns the functions that make timm's contenders, by name in `--vs`."""
  return {
    name: functools.partial(contender, training=training, compiled=compiled)
    for name, compiled in (('timm', True), ('timm-eager', False))
  }


def contender(
  experiment: Experiment, training: bool, compiled: bool
) -> Contender:
  """Returns timm's training step or inference as a contender.

  Training uses AdamW and cross-entropy on a batch that is already on the
  device. Inference copies images from host memory. bfloat16 uses autocast.

  Raises:
    ImportError: if timm, torch or torchvision is not installed.
    ValueError: if timm lacks the model.
    RuntimeError: if the model or batch does not fit into memory.

  Also raises the errors of `torch.compile`; --vs=timm-eager works without it.
  """
  torch = libraries()
  import timm

  config = experiment.config
  on_gpu = torch.cuda.is_available()
  device = 'cuda' if on_gpu else 'cpu'
  model: Any = timm.create_model(**arguments(experiment)).train(training)
  # The images are channels-last, in which GPU convolutions are fastest.
  model = model.to(device, memory_format=torch.channels_last)
  batch = step.random_batch(experiment)
  images = torch.from_numpy(batch['image'])
  mean, std = (
    torch.tensor([255 * x for x in values], device=device)[:, None, None]
    for values in (config.data.mean, config.data.std)
  )
  autocast = functools.partial(
    torch.autocast,
    device,
    torch.bfloat16,
    enabled=config.model.dtype == 'bfloat16',
  )

  def normalized(images: Any) -> Any:
    return (images.permute(0, 3, 1, 2).float() - mean) / std

  def infer(model: Any) -> None:
    with torch.inference_mode(), autocast():
      model(normalized(images.to(device)))

  if training:
    optimizer = torch.optim.AdamW(
      model.parameters(),
      lr=1e-3,
      weight_decay=config.optimizer.weight_decay,
      fused=True,
    )
    images = images.to(device)
    labels = torch.from_numpy(batch['label']).long().to(device)

  def learn(model: Any) -> None:
    with autocast():
      logits = model(normalized(images))
      loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

  compile_s = memory_gib = None
  if compiled:
    model = torch.compile(model)
  start = functools.partial(learn if training else infer, model)
  if compiled:
    started_s = time.monotonic()
    start()
    compile_s = time.monotonic() - started_s
  if on_gpu:
    start()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start()
    torch.cuda.synchronize()
    memory_gib = torch.cuda.max_memory_allocated() / 2**30
  wait = torch.cuda.synchronize if on_gpu else lambda: None
  return Contender(
    f'timm {timm.__version__}, torch {torch.__version__}, '
    + ('torch.compile' if compiled else 'eager'),
    race.paced(start, wait, config.batch_size),
    compile_s,
    memory_gib,
  )


def libraries() -> Any:
  """Returns torch with a thread per usable core and JAX's matmul precision.

  Raises ImportError if timm, torch or torchvision is not installed.
  """
  try:
    import torch

    try:
      importlib.import_module('torchvision')
    except RuntimeError:
      # With a CPU build of torch, torchvision from PyPI cannot load its
      # operators and fails on these two names. timm does not use them.
      for name in ('nms', 'qnms'):
        torch.library.define(
          f'torchvision::{name}', '(Tensor a, Tensor b, float c) -> Tensor'
        )
    import timm  # noqa: F401
  except (ImportError, RuntimeError) as e:
    raise ImportError(
      '--vs=timm and --vs=timm-eager need timm, torch and torchvision. Run pip '
      f'install timm torch torchvision. ({e})'
    ) from e
  torch.set_num_threads(cores.usable_cores())
  # GPUs multiply float32 in TF32, as in JAX.
  torch.set_float32_matmul_precision('high')
  return torch
