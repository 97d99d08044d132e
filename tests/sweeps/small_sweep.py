"""Sweeps of models that compile in a second or two, or do not train at all."""

import csv
import itertools
import pathlib
import types

from configs import digits
from vit_jax import config as config_lib
from vit_jax.sweeps import axes, running, stages
from vit_jax.training import metric_log, run

SMALL = {
  'model.width': '16',
  'model.depth': '1',
  'model.mlp_dim': '16',
  'model.heads': '2',
  'data.image_size': '8',
  'batch_size': '16',
  'total': '4 steps',
  'optimizer.warmup': '1 step',
  'log_every': '1 step',
  'eval_every': '2 steps',
  'checkpoint_every': '2 steps',
}


def small(*sweeps, tune=()):
  config = digits.get_config()
  config_lib.override(config, SMALL)
  config.lock()
  axes.add_axes(config, sweeps, tune)
  return config


def with_grids(config, *grids):
  """Gives every value of the first axis learning rates of its own."""
  (name, values), *others = config.sweep
  values = tuple(
    (
      label,
      fields | {'tune.axes': (axes.axis(config, 'optimizer.lr', rates),)},
    )
    for (label, fields), rates in zip(values, grids, strict=True)
  )
  config.sweep = ((name, values), *others)
  return config


def fake_training(monkeypatch, accuracy):
  """Replaces training; gives the list of the folders that were trained.

  Args:
    monkeypatch: of the test.
    accuracy: from the config and the number of steps, 2 or 4, to the accuracy
      of all its evaluators. A learning rate of 99 diverges after 2 steps.
  """
  trained = []

  def fake_train(config, workdir, start_over=False):
    trained.append(pathlib.Path(workdir).name)
    log = metric_log.MetricLog(workdir, None)
    for step in (2, 4):
      if config.optimizer.lr == 99 and step == 4:
        raise run.Diverged('Step 3: the loss is nan.')
      value = accuracy(config, step)
      log.write(
        step,
        {'train/loss': 1.0}
        | {
          f'{name}/accuracy': value
          for name, entry in config.evaluators.items()
          if entry.on
        },
      )
    log.close()

  monkeypatch.setattr(stages, 'train_one', fake_train)
  return trained


def fake_clock(monkeypatch):
  """Has every run take ten seconds."""
  seconds = itertools.count(0, 10)
  clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
  monkeypatch.setattr(running, 'time', clock)


def table(path):
  with open(path) as f:
    return list(csv.DictReader(f))
