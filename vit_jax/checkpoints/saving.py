"""Saves the state of training with orbax, and restores it exactly.

A workdir has folders `checkpoints/STEP/` with the items `params`, `opt_state`,
`average`, `objective_state`, `checksums` and `meta`; empty items are left out.
`meta` stores the full config, the model's fields, class names, the time spent,
the step and its metrics.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from vit_jax.data import atomic_files

# A cached listing would hide files that other processes have just written.
fsspec.config.conf.setdefault('gcs', {}).setdefault('use_listings_cache', False)

_log = logging.getLogger(__name__)

FOLDER = 'checkpoints'
META = 'meta'
CHECKSUMS = 'checksums'
# Items that are trees of arrays.
_TREES = ('params', 'opt_state', 'average', 'objective_state', CHECKSUMS)
# Each device saves a slice of a replicated array if a slice has at least this
# many bytes. Smaller arrays are not sliced, because slicing compiles a program
# for every shape and device, which delays the first checkpoint.
_LEAST_SLICE = 2**20

# TensorStore's error codes for missing or wrong bytes. Other codes, such as
# UNAVAILABLE, mean that reading failed.
_DAMAGE = re.compile(
  '(DATA_LOSS|FAILED_PRECONDITION|INVALID_ARGUMENT|NOT_FOUND|OUT_OF_RANGE): '
)


class Checkpoints:
  """Saves checkpoints in the background; keeps the newest and the best."""

  def __init__(
    self,
    workdir: str,
    keep_last: int,
    best_metric: str,
    best: str = 'highest',
    start_over: bool = False,
  ):
    """Opens or creates the checkpoints of a workdir.

    Args:
      workdir: a folder on disk, or gs://BUCKET/FOLDER.
      keep_last: number of newest checkpoints to keep.
      best_metric: metric that decides which checkpoint is the best.
      best: which value of the metric is best, 'highest' or 'lowest'.
      start_over: start at step 0 if all checkpoints are damaged.

    Raises OSError if a checkpoint's metrics cannot be read at present.
    """
    self.directory = absolute(workdir) / FOLDER
    self._keep_last = keep_last
    self._best = best_metric, best
    self._start_over = start_over
    self.directory.mkdir(parents=True, exist_ok=True)
    self._metrics: dict[int, dict[str, float]] = {}
    for step in steps(self.directory):
      folder = self.directory / str(step)
      metrics, damage = self._attempt(step, read_metrics, folder)
      self._metrics[step] = metrics or {}
      if damage:
        _log.warning(
          'The metrics of checkpoint %s are damaged (%s), so it cannot be the '
          'best checkpoint.',
          folder,
          damage,
        )
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    return _Manager(
      self.directory,
      handler_registry=ocp.handlers.create_default_handler_registry(
        **{name: _trees() for name in _TREES}
      ),
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        # Saving to slow storage may exceed orbax's default of 20 minutes. If a
        # save hangs, `--timeout_s` ends the run.
        async_options=ocp.AsyncOptions(timeout_secs=24 * 3600),
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(
          [checkpoint_managers.LatestN(self._keep_last), self]
        ),
      ),
    )

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Keeps the best checkpoint.

    Orbax's own `BestN` reads metrics that orbax saves without a checksum.
    """
    return [x.step == self.best_step() for x in checkpoints]

  def best_step(self) -> int | None:
    """Returns the step with the best metric, or None without a metric."""
    return best_step(self._metrics, *self._best)

  def path(self, step: int) -> str:
    """Returns the folder of the checkpoint of a step."""
    return os.fspath(self.directory / str(step))

  def latest_step(self) -> int | None:
    """Returns the newest step that is saved or being saved, or None."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: dict[str, Any],
    meta: dict[str, Any],
    metrics: dict[str, float],
  ) -> None:
    """Starts saving, and returns once the arrays are copied from the devices.

    First waits for the previous save. Does nothing if a checkpoint of this step
    exists. `state` maps item names to trees of arrays. `meta` holds values that
    JSON can store. `metrics` is empty if no evaluator ran at this step.
    """
    if step in self._manager.all_steps():
      return
    trees = {name: tree for name, tree in state.items() if tree}
    trees[CHECKSUMS] = {name: checksums(tree) for name, tree in trees.items()}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()},
        # The metrics are a part of `meta`, because `meta` has a checksum.
        **{META: _meta_args(meta | {'step': step, 'metrics': metrics})},
      ),
      force=True,
    )
    self._metrics[step] = metrics

  def add_metrics(
    self, step: int, metrics: dict[str, float], more: dict[str, Any]
  ) -> None:
    """Adds metrics to a checkpoint whose evaluation was interrupted.

    `more` has values of `meta` that the evaluation changed.
    """
    self._metrics[step] = metrics
    if jax.process_index() == 0:
      folder = self.directory / str(step)
      new = more | {'metrics': metrics, 'evaluation_due': False}
      text = json.dumps(_meta_args(read_meta(folder) | new).item)
      atomic_files.replace(folder / META / 'metadata', text.encode())

  def latest_meta(self) -> dict[str, Any] | None:
    """Like `restore`, but reads and returns only `meta`, or None."""
    found = self._newest(read_meta)
    return found and found[1]

  def restore(self, like: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Restores the newest undamaged checkpoint.

    Renames newer, damaged checkpoints to STEP.damaged with a warning.

    `like` maps item names to trees of `jax.ShapeDtypeStruct`. Shardings may
    differ from the saved ones. Returns the step and the trees, or None if
    training starts at step 0.

    Raises OSError if a checkpoint cannot be read at present. If all checkpoints
    are damaged and `start_over` is not set, renames none and raises ValueError.
    """
    like = {name: tree for name, tree in like.items() if tree}
    leaves = {name: jax.tree.leaves(tree) for name, tree in like.items()}
    mesh = next(iter(leaves.values()))[0].sharding.mesh
    on_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sums_like = {
      name: jax.ShapeDtypeStruct((len(found),), jnp.uint32, sharding=on_all)
      for name, found in leaves.items()
    }

    def check(restored: Any) -> None:
      for name in like:
        check_sums(restored[name], restored[CHECKSUMS][name], name)

    trees = like | {CHECKSUMS: sums_like}
    args = ocp.args.Composite(
      **{name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
    )
    # The manager's own handler waits for all processes after reading. It would
    # wait for ever if one process finds damage and raises an error instead.
    handler = ocp.CompositeCheckpointHandler()
    found = self._newest(lambda folder: handler.restore(folder, args), check)
    return found and (found[0], {name: found[1][name] for name in like})

  def _newest(
    self,
    read: Callable[[epath.Path], Any],
    check: Callable[[Any], Any] | None = None,
  ) -> tuple[int, Any] | None:
    """Returns the newest step whose content passes `check`, and its content."""
    damaged: dict[int, str] = {}
    found = None
    for step in reversed(steps(self.directory)):
      restored, damage = self._attempt(step, read, self.directory / str(step))
      if check and not damage:
        # All processes compute checksums together, so all must have read their
        # arrays before. `_attempt` above waits for them.
        _, damage = self._attempt(step, check, restored)
      if not damage:
        found = step, restored
        break
      damaged[step] = damage
      del restored  # frees the memory for the next checkpoint
    lost = [f'{step} ({damage})' for step, damage in damaged.items()]
    lost += sorted(p.name for p in self.directory.glob('*.damaged'))
    if lost and not found and not self._start_over:
      raise ValueError(
        f'All checkpoints in {self.directory} are damaged: {", ".join(lost)}. '
        'To train from step 0 again, add --start_over, which replaces '
        'metrics.csv, or give another --workdir.'
      )
    if damaged:
      self._manager.close()
      for step, damage in damaged.items():
        self._metrics.pop(step, None)
        _log.warning(
          'Checkpoint %s is damaged (%s). It is renamed to %d.damaged, and the '
          'newest undamaged checkpoint, if any, is used.',
          self.path(step),
          damage,
          step,
        )
        multihost_utils.sync_global_devices('damaged checkpoint found')
        if jax.process_index() == 0:
          aside = self.directory / f'{step}.damaged'
          if aside.exists():
            aside.rmtree()
          (self.directory / str(step)).rename(aside)
        multihost_utils.sync_global_devices('damaged checkpoint set aside')
      self._manager = self._open()
    return found

  def _attempt(
    self, step: int, work: Callable[..., Any], *args: Any
  ) -> tuple[Any, str]:
    """Calls `work(*args)` to read or check the checkpoint of a step.

    Returns the result, and a description of damage that any process found, or
    ''. Raises OSError if any process cannot read the checkpoint at present.
    """
    folder = self.directory / str(step)
    result, damage, failure = None, '', ''
    try:
      result = work(*args)
    except Exception as e:  # damaged files raise errors of many types
      damage, failure = judge(folder, e)
      # asyncio would print a traceback for each concurrent read that failed.
      logging.getLogger('asyncio').setLevel(logging.CRITICAL)
    flags = np.array([bool(damage), bool(failure)])
    any_damage, any_failure = (
      multihost_utils.process_allgather(flags).reshape(-1, 2).any(axis=0)
    )
    if any_failure:
      error = OSError(
        f'The checkpoint {folder} cannot be read now: '
        f'{failure or "another process prints the reason"}. Nothing was '
        'changed. Run the same command again when the storage works.'
      )
      error.errno = errno.EIO  # gives all processes the same exit status
      raise error
    return result, damage or ('another process found it' if any_damage else '')

  def wait(self) -> None:
    """Waits until all checkpoints are written."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits until all checkpoints are written, and frees resources."""
    self._manager.close()


class _Manager(ocp.CheckpointManager):
  """A manager that leaves preemption to `preemption_notice`.

  After a failed write it does not wait for other processes.
  """

  def metrics(self, step: int) -> None:
    # Stops the manager from reading the metrics that orbax saved in old
    # checkpoints. `read_metrics` reads them.
    del step

  def reached_preemption(self, step: int) -> bool:
    # JAX chooses one step id at which all processes stop. `preemption_notice`
    # counts its calls and gives JAX this count as step id. If orbax also gave
    # JAX its step numbers, `preemption_notice` could miss the chosen id.
    return False

  def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
    # Raises the errors of background writes first. Otherwise, after an error in
    # one process, all processes would wait for each other until the timeout.
    self._wait_for_checkpointers()
    super()._finalize(step, steps_to_remove)


def judge(folder: epath.Path, error: Exception) -> tuple[str, str]:
  """Decides whether an error means a damaged checkpoint or a failed read.

  A checkpoint is damaged only if all its files can be read and the error is
  about their content or about a missing file. The error's type is not enough:
  orbax also raises FileNotFoundError for a folder that it cannot read. Returns
  descriptions of the damage and of the failed read; one of them is ''.
  """
  try:
    _read_all(folder)
  except Exception as e:
    return '', first_line(e)
  while error.__cause__:
    error = error.__cause__  # type: ignore[assignment]
  content = (ValueError, LookupError, TypeError, AttributeError)
  is_coded = re.match('[A-Z_]+: ', str(error))
  if isinstance(error, (*content, FileNotFoundError)) and (
    not is_coded or _DAMAGE.match(str(error))
  ):
    return first_line(error), ''
  return '', first_line(error)


def _read_all(folder: epath.Path) -> None:
  for path in folder.iterdir():
    if path.is_dir():
      _read_all(path)
    else:
      with path.open('rb') as f:
        while f.read(1 << 24):
          pass


def first_line(error: BaseException) -> str:
  """Returns the type and message of an error in one line."""
  # TensorStore appends its specification to messages.
  text = str(error).partition(' [tensorstore_spec')[0].strip().partition('\n')
  return f'{type(error).__name__}: {text[0]}'.removesuffix(': ')[:300]


def steps(folder: epath.Path) -> list[int]:
  """Returns the steps of the finished checkpoints in a folder, in order.

  Raises OSError if an existing folder cannot be listed.
  """
  try:
    return sorted(int(path.name) for path in folder.iterdir() if is_step(path))
  except FileNotFoundError:
    return []  # no checkpoints yet: buckets have no empty folders


def steps_in(workdir: str) -> list[int]:
  """Returns the steps of a workdir's checkpoints, in order."""
  return steps(absolute(workdir) / FOLDER)


def is_step(path: epath.Path) -> bool:
  """Whether an existing path is a finished checkpoint."""
  if not re.fullmatch('0|[1-9][0-9]*', path.name):
    return False
  # On a disk, unfinished checkpoints have other names.
  return '://' not in os.fspath(path) or ocp.utils.is_checkpoint_finalized(path)


def save_parameters(workdir: str, params: Any, meta: dict[str, Any]) -> None:
  """Writes a new workdir that has only parameters, as `checkpoints/0`.

  `params` are NumPy arrays. Unlike `Checkpoints.save`, does not copy them.
  """
  handler = ocp.CompositeCheckpointHandler(
    CHECKSUMS, META, params=_trees(copy=False)
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


def _trees(copy: bool = True) -> ocp.PyTreeCheckpointHandler:
  on_host = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=copy)
  on_devices = ocp.type_handlers.ArrayHandler(
    min_slice_bytes_for_replica_parallel=_LEAST_SLICE
  )
  return ocp.PyTreeCheckpointHandler(
    save_concurrent_gb=None if copy else 1,
    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
      (np.ndarray, on_host), (jax.Array, on_devices)
    ),
  )


def _meta_args(meta: dict[str, Any]) -> ocp.args.JsonSave:
  # Copy, because orbax writes `meta` in the background.
  meta = json.loads(json.dumps(meta))
  return ocp.args.JsonSave({'meta': meta, 'sha256': _digest(meta)})


def read_meta(step_dir: epath.Path) -> dict[str, Any]:
  """Returns `meta` of a checkpoint, verified by its checksum.

  Raises OSError, ValueError, LookupError or TypeError if damaged or missing.
  """
  # A checkpointer would wait for all processes, even if one of them fails here.
  saved = ocp.JsonCheckpointHandler().restore(step_dir / META)
  meta, step = saved['meta'], int(step_dir.name)
  if _digest(meta) != saved['sha256']:
    raise ValueError('its metadata differ from their checksum')
  # Old checkpoints and those of `convert` lack the step.
  if (was := meta.get('step', step)) != step:
    raise ValueError(
      f'it was saved as step {was}, but its folder is {step}. Rename the '
      f'folder to {was}'
    )
  return meta


def read_arrays(item_dir: epath.Path, like: Any = None) -> Any:
  """Returns NumPy arrays: all of an item, or only those that `like` names."""
  if like is None:
    like = ocp.PyTreeCheckpointHandler().metadata(item_dir).tree
  return ocp.PyTreeCheckpointer().restore(
    item_dir,
    args=ocp.args.PyTreeRestore(
      item=like,
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like
      ),
      partial_restore=True,
    ),
  )


def read_checksums(step_dir: epath.Path, item: str) -> np.ndarray:
  """Returns the saved checksums of an item."""
  like = {item: jax.ShapeDtypeStruct((1,), jnp.uint32)}
  return read_arrays(step_dir / CHECKSUMS, like)[item]


def read_metrics(step_dir: epath.Path) -> dict[str, float]:
  """Returns the metrics of a checkpoint.

  Verifies their checksum, except in checkpoints of old versions. Raises the
  errors of `read_meta`, or AttributeError.
  """
  metrics = read_meta(step_dir).get('metrics')
  if metrics is None:  # saved by an earlier version, or by `convert`
    file = step_dir / 'metrics' / 'metrics'
    metrics = json.loads(file.read_text()) if file.exists() else {}
  return {name: float(value) for name, value in metrics.items()}


def best_step(
  metrics: dict[int, dict[str, float]], name: str, best: str
) -> int | None:
  """Returns the step with the 'highest' or 'lowest' value of a metric, or None.

  Steps without a value, or with NaN, do not count. Ties go to the first step.
  """
  steps = [*metrics]
  i = best_index([metrics[step].get(name, math.nan) for step in steps], best)
  return None if i is None else steps[i]


def best_index(values: Sequence[float], best: str) -> int | None:
  """Returns the first index of the 'highest' or 'lowest' value.

  NaN does not count. Returns None if there is no other value.
  """
  known = [i for i, value in enumerate(values) if not math.isnan(value)]
  choose = min if best == 'lowest' else max
  return choose(known, key=values.__getitem__, default=None)


def _digest(meta: dict[str, Any]) -> str:
  text = json.dumps(meta, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def checksums(tree: Any) -> jax.Array | np.ndarray:
  """Returns one checksum for each array, uint32, in tree order.

  A checksum is the sum of the array's elements modulo 2^32, with their bits
  read as unsigned integers. It does not depend on the sharding, because the
  order of the elements does not matter.
  """
  arrays = jax.tree.leaves(tree)
  if all(isinstance(x, np.ndarray) for x in arrays):
    return _sums(arrays, np)  # on the host, without a copy to a device
  return jax.jit(_sums, static_argnums=1)(arrays, jnp)


def _sums(arrays: list[Any], numpy: Any) -> Any:
  bits = [x.view(f'uint{8 * x.dtype.itemsize}') for x in arrays]
  return numpy.array([numpy.sum(x, dtype='uint32') for x in bits], 'uint32')


def check_sums(tree: Any, kept: Any, item: str, is_part: bool = False) -> None:
  """Raises ValueError if checksums of a tree differ from the saved checksums.

  `is_part` means that the saved checksums include those of other arrays.
  """
  ours = checksums(tree)
  same = np.isin(ours, kept).all() if is_part else np.array_equal(ours, kept)
  if not same:
    raise ValueError(f'the arrays of {item} differ from their checksums')


def absolute(path: str) -> epath.Path:
  """Returns an absolute path for orbax; keeps a path with a scheme (gs://)."""
  if '://' in path:
    return epath.Path(path)
  return epath.Path(os.path.abspath(os.path.expanduser(path)))
