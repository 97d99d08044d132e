"""Saving training with orbax and resuming it exactly.

A workdir holds `checkpoints/STEP/` with the items `params`, `opt_state`,
`average` (where there is a Polyak average), `checksums`, and `meta`: the full
config, class names, preprocessing and time spent.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

_log = logging.getLogger(__name__)

FOLDER = 'checkpoints'
META = 'meta'
CHECKSUMS = 'checksums'


class Checkpoints:
  """Asynchronous checkpoints of one run: the last n and the best."""

  def __init__(
    self, workdir: str, keep_last: int, best_metric: str, best: str = 'highest'
  ):
    """Opens or creates the checkpoints of a workdir.

    Args:
      workdir: any path that `etils.epath` understands, gs:// included.
      keep_last: how many of the latest to keep.
      best_metric: name of the metric whose best value is kept besides.
      best: 'highest' or 'lowest', which values are good.
    """
    self.directory = absolute(workdir) / FOLDER
    self._keep_last = keep_last
    self._best_metric = best_metric
    self._sign = 1 if best == 'highest' else -1
    for step in self._steps_with_damaged_metrics():
      self._rename(step, 'its metrics cannot be read')
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    def metric(metrics: Any) -> float:
      value = metrics.get(self._best_metric)
      return -np.inf if value is None else self._sign * value

    return ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        best_fn=metric,
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(
          [
            checkpoint_managers.LatestN(self._keep_last),
            checkpoint_managers.BestN(
              get_metric_fn=metric, n=1, keep_checkpoints_without_metrics=False
            ),
          ]
        ),
      ),
    )

  def path(self, step: int) -> str:
    """Returns the folder of the checkpoint of a step."""
    return os.fspath(self.directory / str(step))

  def latest_step(self) -> int | None:
    """Returns the newest step, saved or being saved, if there is any."""
    return self._manager.latest_step()

  def best_step(self) -> int | None:
    """Returns the kept step with the best `best_metric`, if any has one."""
    return self._manager.best_step()

  def prepare(self, state: dict[str, Any]) -> None:
    """Compiles what saving computes, so that training need not stop for it.

    Args:
      state: trees of arrays by item name, as `save` will be given them.
    """
    for tree in filter(None, state.values()):
      checksums(tree)

  def save(
    self,
    step: int,
    state: dict[str, Any],
    meta: dict[str, Any],
    metrics: dict[str, float],
  ) -> None:
    """Starts saving; returns once the arrays have left the devices.

    Args:
      step: steps taken so far.
      state: trees of arrays by item name; empty trees are left out.
      meta: what JSON can hold.
      metrics: of the evaluators at this step, if they ran.
    """
    if step in self._manager.all_steps():
      return
    state = {name: tree for name, tree in state.items() if tree}
    sums = {name: checksums(tree) for name, tree in state.items()}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{name: ocp.args.StandardSave(tree) for name, tree in state.items()},
        **{CHECKSUMS: ocp.args.StandardSave(sums)},
        **{META: _meta_args(meta)},
      ),
      metrics=metrics,
    )

  def latest_meta(self) -> dict[str, Any] | None:
    """Returns the `meta` of the newest checkpoint, None where there is none."""
    args = ocp.args.Composite(**{META: ocp.args.JsonRestore()})
    return self._newest(
      lambda step: verified(self._manager.restore(step, args=args)[META])
    )

  def restore(self, like: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Restores the newest checkpoint that is whole.

    One that cannot be read, or whose arrays do not have the checksums they were
    saved with, is renamed to STEP.damaged with a warning, and the one before is
    tried.

    Args:
      like: trees of `jax.ShapeDtypeStruct` with shardings, by item name. The
        shardings may be of other devices than those that saved.

    Returns:
      The step and the trees, or None where nothing was ever saved.
    """
    like = {name: tree for name, tree in like.items() if tree}
    whole = jax.sharding.NamedSharding(
      jax.tree.leaves(like)[0].sharding.mesh, jax.sharding.PartitionSpec()
    )
    sums_like = {
      name: jax.ShapeDtypeStruct(
        (len(jax.tree.leaves(tree)),), jnp.uint32, sharding=whole
      )
      for name, tree in like.items()
    }

    def restore(step: int) -> tuple[int, dict[str, Any]]:
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          **{k: ocp.args.StandardRestore(tree) for k, tree in like.items()},
          **{CHECKSUMS: ocp.args.StandardRestore(sums_like)},
        ),
      )
      state = {name: restored[name] for name in like}
      for name, tree in state.items():
        if not np.array_equal(checksums(tree), restored[CHECKSUMS][name]):
          raise ValueError(f'the arrays of {name} are not those saved')
      return step, state

    return self._newest(restore)

  def _newest(self, read: Callable[[int], Any]) -> Any:
    """Returns `read(step)` of the newest step for which it succeeds."""
    for step in sorted(self._manager.all_steps(), reverse=True):
      result, error = None, ''
      try:
        result = read(step)
      except Exception as e:  # damage shows in as many ways as there are files
        error = f'{type(e).__name__}: {e}'.splitlines()[0][:200]
        # The reads that failed beside the first one would otherwise each be
        # printed with a traceback when they are collected.
        logging.getLogger('asyncio').setLevel(logging.CRITICAL)
      if all(multihost_utils.process_allgather(np.array(not error)).ravel()):
        return result
      self._manager.close()
      self._rename(step, error or 'another process could not read it')
      self._manager = self._open()
    return None

  def _steps_with_damaged_metrics(self) -> list[int]:
    """Returns the steps that the manager could not even list."""
    damaged = []
    for file in self.directory.glob('*/metrics/metrics'):
      try:
        json.loads(file.read_text())
      except ValueError:
        damaged.append(int(file.parent.parent.name))
    return damaged

  def _rename(self, step: int, error: str) -> None:
    _log.warning(
      'Checkpoint %s is damaged and stepped over (%s); renamed to %d.damaged.',
      self.path(step),
      error,
      step,
    )
    multihost_utils.sync_global_devices('damaged checkpoint found')
    if jax.process_index() == 0:
      aside = self.directory / f'{step}.damaged'
      if aside.exists():
        aside.rmtree()
      (self.directory / str(step)).rename(aside)
    multihost_utils.sync_global_devices('damaged checkpoint set aside')

  def wait(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits until everything is written, and ends."""
    self._manager.close()


def save_parameters(workdir: str, params: Any, meta: dict[str, Any]) -> None:
  """Writes a new workdir that holds parameters alone, as those of step 0.

  Unlike saving while training, which hands all arrays over at once, this takes
  little memory beside the parameters themselves.

  Args:
    workdir: receives `checkpoints/0`.
    params: tree of NumPy arrays.
    meta: what JSON can hold.
  """
  # Nothing changes the arrays meanwhile, so that they need not be copied first.
  numpy_handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
  handler = ocp.CompositeCheckpointHandler(
    params=ocp.PyTreeCheckpointHandler(
      save_concurrent_gb=1,
      type_handler_registry=ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, numpy_handler),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
      ),
    ),
    **{CHECKSUMS: ocp.StandardCheckpointHandler()},
    **{META: ocp.JsonCheckpointHandler()},
  )
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(
      absolute(workdir) / FOLDER / '0',
      ocp.args.Composite(
        params=ocp.args.PyTreeSave(params),
        **{CHECKSUMS: ocp.args.StandardSave({'params': checksums(params)})},
        **{META: _meta_args(meta)},
      ),
    )


def _meta_args(meta: dict[str, Any]) -> ocp.args.JsonSave:
  return ocp.args.JsonSave({'meta': meta, 'sha256': _digest(meta)})


def verified(saved: dict[str, Any]) -> dict[str, Any]:
  """Returns the `meta` of a checkpoint as it was read from its file.

  Raises:
    ValueError: if it is not what was saved.
  """
  if _digest(saved['meta']) != saved['sha256']:
    raise ValueError('its meta data are not those saved')
  return saved['meta']


def _digest(meta: dict[str, Any]) -> str:
  text = json.dumps(meta, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def checksums(tree: Any) -> jax.Array | np.ndarray:
  """Returns the sum modulo 2^32 of the bits of every array, in tree order.

  The order of summation does not matter, so that any sharding gives the same.
  NumPy arrays are summed where they are: a device would take a copy of all.
  """
  if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)):
    sums = [
      np.sum(
        np.ascontiguousarray(x).view(f'uint{8 * x.dtype.itemsize}'),
        dtype=np.uint32,
      )
      for x in jax.tree.leaves(tree)
    ]
    return np.array(sums, np.uint32)
  return _device_checksums(tree)


@jax.jit
def _device_checksums(tree: Any) -> jax.Array:
  sums = []
  for x in jax.tree.leaves(tree):
    bits = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
    sums.append(
      jnp.sum(jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32))
    )
  return jnp.stack(sums)


def absolute(path: str) -> epath.Path:
  """Returns a path that orbax takes: absolute, or with a scheme as in gs://."""
  return epath.Path(path if '://' in path else os.path.abspath(path))
