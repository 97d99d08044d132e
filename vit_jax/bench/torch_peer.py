"""timm's models in PyTorch, trained and applied as timm does it."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.bench import race, step
from vit_jax.bench.race import Contender
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import timm_config
from vit_jax.data import images
from vit_jax.models import variants


def arguments(config: ConfigDict) -> dict[str, Any]:
  """Returns what `timm.create_model` takes for the model of a config.

  Raises:
    ValueError: if timm has no such model.
  """
  model = step.model_of(config)
  image_size = images.size_of(config.data.image_size)
  shapes = jax.eval_shape(
    lambda: variants.init(model, jax.random.key(0), image_size)
  )
  # Arrays without memory: only the names and shapes count here.
  params = jax.tree.map(
    lambda x: np.broadcast_to(np.float32(0), x.shape), shapes
  )
  weights = opening.Checkpoint('', model, params, image_size).weights()
  found = timm_config.config(weights, {})
  return {
    'model_name': found['architecture'],
    'num_classes': step.NUM_CLASSES,
    **found.get('model_args', {}),
  }


def check(config: ConfigDict) -> None:
  """Checks that the libraries are here, and that timm has the model.

  Raises:
    ImportError: if timm or torch is not installed.
    ValueError: if timm has no such model.
  """
  libraries()
  arguments(config)


def training(config: ConfigDict, compiled: bool) -> Contender:
  """Returns a step of AdamW with cross-entropy, in autocast if in bfloat16.

  Args:
    config: of the model, batch size and dtype.
    compiled: whether to try `torch.compile`; what came of it is in the name.

  Raises:
    ImportError: if timm is not installed.
  """
  torch = libraries()
  device = _device(torch)
  model = _model(config).train()
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-3,
    weight_decay=config.optimizer.weight_decay,
    fused=True,
  )
  batch = step.random_batch(config)
  images = torch.from_numpy(batch['image']).to(device)
  labels = torch.from_numpy(batch['label']).long().to(device)
  normalized = _normalizer(torch, config, device)

  def start_with(model: Any) -> Callable[[], None]:
    def start() -> None:
      with _autocast(torch, config, device):
        logits = model(normalized(images))
        loss = torch.nn.functional.cross_entropy(logits, labels)
      loss.backward()
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)

    return start

  start, how, compile_s = _best(torch, model, start_with, compiled)
  return Contender(
    _name(torch, how),
    race.paced(start, _waiter(torch, device), config.batch_size),
    {'compile_s': compile_s, 'memory_gib': _memory_gib(torch, device, start)},
  )


def inference(config: ConfigDict, compiled: bool) -> Contender:
  """Returns the way from uint8 images in host memory to logits.

  Args:
    config: of the model, batch size and dtype.
    compiled: whether to try `torch.compile`.

  Raises:
    ImportError: if timm is not installed.
  """
  torch = libraries()
  device = _device(torch)
  model = _model(config).eval()
  images = torch.from_numpy(step.random_batch(config)['image'])
  normalized = _normalizer(torch, config, device)

  def start_with(model: Any) -> Callable[[], None]:
    def start() -> None:
      with torch.inference_mode(), _autocast(torch, config, device):
        model(normalized(images.to(device)))

    return start

  start, how, compile_s = _best(torch, model, start_with, compiled)
  return Contender(
    _name(torch, how),
    race.paced(start, _waiter(torch, device), config.batch_size),
    {'compile_s': compile_s, 'memory_gib': _memory_gib(torch, device, start)},
  )


def libraries() -> Any:
  """Returns torch, set up as JAX is.

  Raises:
    ImportError: if timm or torch is not installed.
  """
  try:
    import torch

    _import_torchvision(torch)
    import timm  # noqa: F401
  except (ImportError, RuntimeError) as e:
    raise ImportError(
      f'--vs=timm needs timm, torch and torchvision: pip install them. ({e})'
    ) from e
  torch.set_num_threads(race.threads())
  # JAX, too, lets GPUs multiply float32 in TF32.
  torch.set_float32_matmul_precision('high')
  return torch


def _import_torchvision(torch: Any) -> None:
  try:
    importlib.import_module('torchvision')
  except RuntimeError:
    # Beside a CPU build of torch, PyPI's torchvision cannot load its operators,
    # and then stumbles over the names of these two. timm uses none of them.
    for name in ('nms', 'qnms'):
      torch.library.define(
        f'torchvision::{name}', '(Tensor a, Tensor b, float c) -> Tensor'
      )


def _model(config: ConfigDict) -> Any:
  import timm
  import torch

  model: Any = timm.create_model(**arguments(config))
  # What convolutions on GPUs are fastest with; images come as BHWC anyway.
  return model.to(_device(torch), memory_format=torch.channels_last)


def _device(torch: Any) -> str:
  return 'cuda' if torch.cuda.is_available() else 'cpu'


def _normalizer(
  torch: Any, config: ConfigDict, device: str
) -> Callable[[Any], Any]:
  mean, std = (
    torch.tensor([255 * x for x in values], device=device)[:, None, None]
    for values in (config.data.mean, config.data.std)
  )
  return lambda images: (images.permute(0, 3, 1, 2).float() - mean) / std


def _autocast(torch: Any, config: ConfigDict, device: str) -> Any:
  return torch.autocast(
    device, torch.bfloat16, enabled=config.model.dtype == 'bfloat16'
  )


def _best(
  torch: Any,
  model: Any,
  start_with: Callable[[Any], Callable[[], None]],
  compiled: bool,
) -> tuple[Callable[[], None], str, float | None]:
  """Returns a step, how it runs, and the seconds that compiling took."""
  if not compiled:
    return start_with(model), 'eager', None
  start = start_with(torch.compile(model))
  started_s = time.monotonic()
  try:
    start()
  except Exception as e:  # a compiler may fail in any way it likes
    if isinstance(e, RuntimeError) and race.is_out_of_memory(e):
      raise
    reason = str(e).strip().splitlines()[0][:100]
    print(f'torch.compile failed, eager instead: {reason}')
    return start_with(model), 'eager, for torch.compile failed', None
  return start, 'torch.compile', time.monotonic() - started_s


def _waiter(torch: Any, device: str) -> Callable[[], None]:
  return torch.cuda.synchronize if device == 'cuda' else lambda: None


def _memory_gib(
  torch: Any, device: str, start: Callable[[], None]
) -> float | None:
  """Returns the most that a step has in use, where the device tells it."""
  if device != 'cuda':
    return None
  start()
  torch.cuda.synchronize()
  torch.cuda.reset_peak_memory_stats()
  start()
  torch.cuda.synchronize()
  return torch.cuda.max_memory_allocated() / 2**30


def _name(torch: Any, how: str) -> str:
  import timm

  return f'timm {timm.__version__}, torch {torch.__version__}, {how}'
