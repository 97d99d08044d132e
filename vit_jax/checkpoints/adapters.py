"""Low-rank adapters for kernels (LoRA, arXiv 2106.09685).

A kernel W with D inputs and E outputs becomes W + A B, with A [D, r] and B
[r, E]. Only A, B and the task's parameters, such as the head, are trained and
saved. The checkpoint `config.init` has the other parameters.
"""

from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.checkpoints import opening, saving, transfer
from vit_jax.models import flops
from vit_jax.models.model import Model, Params

A, B = 'lora_a', 'lora_b'


def body_of(model: Model, params: Params) -> Params:
  """Returns the parameters that training with adapters does not change."""
  return {k: x for k, x in params.items() if k not in model.task_params}


def merged(body: Params, trained: Params) -> Params:
  """Returns all parameters of the model, with adapters added to their kernels.

  `body` is the result of `body_of`. `trained` has `lora_a` and `lora_b` for
  each adapted kernel, and the task's parameters.
  """
  found, trained = flatten_dict(body), flatten_dict(trained)
  for path, x in trained.items():
    *kernel, name = path
    if name == A:
      w = found[*kernel,]
      found[*kernel,] = w + (x @ trained[*kernel, B]).reshape(w.shape)
    elif name != B:
      found[path] = x
  return unflatten_dict(found)


def read(step_dir: Any, meta: dict[str, Any], model: Model) -> Params:
  """Returns all parameters of a checkpoint that stores adapters.

  `meta` is the result of `saving.read_meta`. Raises ValueError if the adapters
  are damaged or the checkpoint `config.init` has changed, and the errors of
  `opening.open_checkpoint`.
  """
  config, size = meta['config'], tuple(meta['image_size'])
  item = 'average' if config['optimizer']['polyak'] else 'params'
  trained = saving.read_arrays(step_dir / item)
  saving.check_sums(trained, saving.read_checksums(step_dir, item), item)
  # Runs of older versions have only the path in their config.
  start = opening.open_checkpoint(meta.get('init', config['init']))
  task = {name: trained[name] for name in model.task_params if name in trained}
  fresh = flops.param_shapes(model, size) | task
  body = body_of(model, transfer.to_new_task(start, model, size, fresh))
  found = saving.checksums(body).tolist()
  if found != meta['fixed'][: len(found)]:
    raise ValueError(
      f'{start.path} has changed since the adapters were trained on it. '
      'Restore the original checkpoint.'
    )
  return merged(body, trained)
