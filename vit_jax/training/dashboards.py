"""Sends the metrics of a run to TensorBoard and Weights & Biases.

Once a run has started, a failing dashboard never stops the run and delays only
its end.
"""

import importlib
import io
import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from vit_jax.data import atomic_files

_log = logging.getLogger(__name__)

# Seconds between flushes to a bucket. Each flush rewrites the file, because
# objects in a bucket cannot be appended to.
_BUCKET_FLUSH_S = 60
# Seconds that a run waits for each dashboard. At the end of the run it waits
# CLOSE_S: two dashboards take less than the 300 s that JAX waits for a process.
# After an error or SIGTERM it waits BRIEF_S, because other processes then wait
# only `processes.MEET_S`.
CLOSE_S, BRIEF_S = 120.0, 7.0

# Numbers, and pictures uint8 HWC, by name.
Values = Mapping[str, float | np.ndarray]


class Dashboard:
  """Writes metrics in a background thread.

  Imports take seconds and file systems can block; the thread keeps both out of
  the training loop. A failure is reported once and ends only this thread.
  """

  def __init__(
    self, name: str, open_writer: 'Callable[[], EventFile | WandbRun]'
  ):
    """Starts the thread. It calls `open_writer`, which may raise any error."""
    self._name, self._open = name, open_writer
    self._queue: queue.SimpleQueue[tuple[int, Values] | None]
    self._queue = queue.SimpleQueue()
    # A daemon, so that a crashed run does not hang on a stuck import.
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def write(self, step: int, values: Values) -> None:
    """Queues numbers and pictures of a step."""
    if self._thread.is_alive():
      self._queue.put((step, values))

  def close(self, wait_s: float) -> None:
    """Waits until everything is written, for at most `wait_s`."""
    self._queue.put(None)
    self._thread.join(wait_s)
    if self._thread.is_alive():
      _log.warning(
        '%s did not write everything within %.0f s. metrics.csv is complete.',
        self._name,
        wait_s,
      )

  def _run(self) -> None:
    try:
      writer = self._open()
      while (item := self._queue.get()) is not None:
        writer.write(*item)
      writer.close()
    except Exception as e:
      _log.warning(
        '%s logs end here, but metrics.csv continues. %s: %s',
        self._name,
        type(e).__name__,
        e,
      )


class EventFile:
  """A new event file of TensorBoard, on disk or in a bucket."""

  def __init__(self, folder: str, first_step: int):
    """Opens a file of a run that starts or resumes at `first_step`.

    TensorBoard hides events of older files at `first_step` and later steps.
    Raises ImportError without tensorboard, OSError if `folder` is not writable.
    """
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
    # Named as TensorBoard names its files, which it reads in order of name.
    self._path = epath.Path(folder) / (
      f'events.out.tfevents.{time.time_ns() / 1e9:020.9f}'
      f'.{socket.gethostname()}.{os.getpid()}'
    )
    self._is_local = '://' not in folder
    self._file = open(self._path, 'xb') if self._is_local else io.BytesIO()
    self._records = record_writer.RecordWriter(self._file)
    self._flushed_at_s = -float('inf')
    self._add(file_version='brain.Event:2')
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(step=first_step, session_log=start)

  def write(self, step: int, values: Values) -> None:
    """Adds numbers and pictures; a bucket gets them at most once a minute."""
    summary = self._summary_pb2.Summary()
    for name, value in values.items():
      entry = summary.value.add(tag=name)
      if isinstance(value, np.ndarray):
        entry.image.height, entry.image.width, _ = value.shape
        entry.image.colorspace = 3  # RGB
        png = io.BytesIO()
        Image.fromarray(value).save(png, 'png')
        entry.image.encoded_image_string = png.getvalue()
      else:
        entry.simple_value = value
    self._add(step=step, summary=summary)
    waited_s = time.monotonic() - self._flushed_at_s
    if self._is_local or waited_s > _BUCKET_FLUSH_S:
      self._flush()

  def close(self) -> None:
    """Makes everything visible and closes the file."""
    self._flush()
    self._file.close()

  def _flush(self) -> None:
    self._flushed_at_s = time.monotonic()
    if isinstance(self._file, io.BytesIO):
      atomic_files.replace(self._path, self._file.getvalue())
    else:
      self._file.flush()

  def _add(self, **fields) -> None:
    event = self._event_pb2.Event(wall_time=time.time(), **fields)
    self._records.write(event.SerializeToString())


def check(config: Mapping[str, Any]) -> None:
  """Raises ImportError if `config.wandb` is set but wandb does not import."""
  if not config['wandb']:
    return
  try:
    importlib.import_module('wandb')
  except Exception as e:  # a damaged installation may raise any type
    raise ImportError(
      f'config.wandb is {config["wandb"]!r}, but wandb cannot be imported '
      f"({type(e).__name__}: {e}): pip install -e '.[wandb]', or leave "
      'config.wandb empty.'
    ) from e


class WandbRun:
  """A run of Weights & Biases; a resumed workdir continues the same run.

  The run's id is in `<workdir>/wandb_id`. Steps that a resumed run repeats are
  skipped, because they were logged with the same values.
  """

  def __init__(
    self, project: str, workdir: str, config: dict[str, Any], is_new: bool
  ):
    """Starts or resumes the run, named after the last part of `workdir`.

    Raises:
      ConnectionError: if Weights & Biases rejects the run.
    """
    import wandb

    kept = epath.Path(workdir) / 'wandb_id'
    if is_new or not kept.exists():
      atomic_files.replace(kept, uuid.uuid4().hex.encode())
    self._image = wandb.Image
    try:
      self._run = wandb.init(
        project=project,
        id=kept.read_text(),
        resume='allow',
        name=kept.parent.name,
        config=config,
        # Local files go into the workdir, or for a bucket into the current
        # folder.
        dir=None if '://' in workdir else workdir,
      )
    except wandb.Error as e:
      reason = str(e).partition('\n')[0] or type(e).__name__
      raise ConnectionError(
        f'config.wandb is {project!r}, and Weights & Biases rejects the '
        f'run: {reason} Log in with `wandb login`, set WANDB_MODE=offline to '
        'send it later, or leave the field empty.'
      ) from e

  def write(self, step: int, values: Values) -> None:
    """Adds numbers and pictures."""
    if step >= self._run.starting_step:
      shown = {
        name: self._image(value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
      }
      self._run.log(shown, step=step)

  def close(self) -> None:
    """Waits until everything is sent."""
    self._run.finish()
