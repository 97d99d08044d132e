"""Trains a model or evaluates it; the same loop trains every objective."""

import contextlib
import dataclasses
import functools
import json
import logging
import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from clu import parameter_overview
from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import own
from vit_jax.checkpoints import classes, fetch, from_init, opening, saving
from vit_jax.data import atomic_files, bad_images, loader, sources
from vit_jax.evaluators import build, first_head
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.experiment import CheckedConfig, Experiment, TrainState, facts_of
from vit_jax.models import variants
from vit_jax.models.model import Params
from vit_jax.objectives import several_labels
from vit_jax.objectives.objective import Best
from vit_jax.training import (
  dashboards,
  metric_log,
  processes,
  sharding,
  workdir_lock,
)
from vit_jax.training.preemption import Preempted, preemption_notice
from vit_jax.training.run import Run

_log = logging.getLogger(__name__)


def train(
  config: ConfigDict, workdir: str, start_over: bool = False
) -> dict[str, float]:
  """Trains the model of a config, or resumes the workdir's run.

  Args:
    config: from a file in `configs/`. Fields that it leaves open are filled in,
      so pass a copy to train again with the same config.
    workdir: receives checkpoints, metrics.csv, curves.png, parameters.txt and,
      if TensorBoard is installed, its logs.
    start_over: whether to start from step 0 if all checkpoints of the workdir
      are damaged.

  Returns:
    The metrics in the last row of metrics.csv; {} except in the first process.

  Raises:
    ValueError: if the config or data are invalid, if another run uses the
      workdir, or if all its checkpoints are damaged.
    OSError: if a file is missing, or storage fails.
    ImportError: if the config needs a package that is not installed.
    JaxRuntimeError: if a step does not fit into a device's memory.
    Diverged: if the loss, the gradient or the parameters are not finite.
    Preempted: after SIGTERM or Ctrl-C during training, once the state is saved.
  """
  for field in ('eval_only', 'sweep', 'tune.axes', 'stages'):
    if operator.attrgetter(field)(config):
      raise ValueError(
        f'{field} is set, and vit_jax.train trains a single run. Unset it, or '
        'use python -m vit_jax.main. To evaluate, import evaluate_only from '
        'vit_jax.train.'
      )
  dashboards.check(config)
  workdir = os.path.expanduser(workdir)
  from_init.resolve(config)
  workdir_lock.check(workdir)
  keep_choices = own.resolve(config, workdir)
  checked = CheckedConfig(config)
  build.check(config)
  shown = build.shown(config)
  processes.refuse_unlike(
    lambda: [*saving.steps_in(workdir)[-1:], -1][:1],
    f'The processes see different checkpoints in {workdir}: put it on storage '
    'that all of them share.',
    processes.SEEN_S,
  )
  init = None
  is_new = start_over or not saving.steps_in(workdir)
  if config.optimizer.lora and not config.init:
    raise ValueError(
      f'optimizer.lora is {config.optimizer.lora}, but init is empty. Adapters '
      'need a trained model: set init to its checkpoint, or optimizer.lora=0.'
    )
  if is_new or config.optimizer.lora:
    if config.init:
      init = opening.open_checkpoint(config.init)
    else:
      _refuse_frozen_statistics(config.model)
  with bad_images.kept_in(workdir):
    source = bad_images.open_checked(config.data, config.data.split)
    experiment = Experiment(checked, facts_of(config, source))
    if experiment.facts.several_labels:
      rename = functools.partial(several_labels.metric_for, config.evaluators)
      config.best_metric = rename(config.best_metric)
      shown = {rename(name): best for name, best in shown.items()}
    fixed = experiment.place(experiment.objective.fixed())
    parts = Parts(
      config, experiment.objective, experiment.mesh, experiment.facts
    )
    evaluators = build.make_evaluators(parts)
  params = experiment.params_from(init) if init else None
  fixed = experiment.all_fixed(fixed, params)
  if params and is_new and config.head_first:
    params = first_head.fitted(parts, params, source)
  del init  # frees its arrays
  with (
    workdir_lock.held(workdir),
    contextlib.closing(
      saving.Checkpoints(
        workdir,
        config.keep_last,
        config.best_metric,
        shown[config.best_metric],
        start_over,
      )
    ) as checkpoints,
  ):
    return _train(
      experiment,
      source,
      fixed,
      evaluators,
      params,
      shown,
      workdir,
      checkpoints,
      keep_choices,
    )


def _refuse_frozen_statistics(model: ConfigDict) -> None:
  """Raises ValueError for a frozen BatchNorm without pre-trained statistics."""
  for field in ('version', 'backbone_version'):
    if model.get(field) == 0 and model.get('backbone', 'resnet') == 'resnet':
      raise ValueError(
        f'model.{field} is 0, a frozen BatchNorm, which needs the statistics '
        'of a checkpoint. Give one, as in --config.init=resnet50.pth. To start '
        f'from random parameters set --config.model.{field}=1, and for DETR '
        'also --config.optimizer.frozen="()".'
      )


def _train(
  experiment: Experiment,
  source: sources.Source,
  fixed: Params,
  evaluators: list[Evaluator],
  params: Params | None,
  shown: dict[str, Best],
  workdir: str,
  checkpoints: saving.Checkpoints,
  keep_choices: Callable[[], None],
) -> dict[str, float]:
  """Trains or resumes in a workdir whose lock is held."""
  config, objective = experiment.config, experiment.objective
  durations = experiment.durations
  meta = _new_meta(experiment, source, fixed, shown[config.best_metric])
  if (saved_meta := checkpoints.latest_meta()) is not None:
    config_lib.check_resumable(saved_meta, meta)
  keep_choices()
  is_first = jax.process_index() == 0
  if is_first:
    print('building the model and its state ...', flush=True)
  if restored := checkpoints.restore(vars(experiment.state_shapes)):
    start_step, state = restored[0], TrainState(**restored[1])
    _log.info('Resuming after step %d.', start_step)
  else:
    start_step = 0
    state = experiment.start(params or experiment.new_params())
  # Read again, because an older checkpoint is restored if the newest one is
  # damaged.
  if (saved_meta := checkpoints.latest_meta()) is not None:
    names = {'elapsed_s', 'since_log', 'evaluated'} & saved_meta.keys()
    # Patience counts anew with another metric or a longer run.
    fields = ('best_metric', 'total')
    if any(saved_meta['config'].get(x) != config[x] for x in fields):
      names -= {'evaluated'}
    meta |= {name: saved_meta[name] for name in names}
  train_step = experiment.train_step()
  all_params = jax.jit(experiment.all_params)

  def runner(evaluator: Evaluator) -> Callable[[Params], Any]:
    if not experiment.has_adapters:
      return evaluator.run
    return lambda trained: evaluator.run(all_params(trained, fixed))

  part, parts = sharding.batch_share(experiment.mesh)
  with bad_images.kept_in(workdir):
    transform = objective.train_transform()
  batches = loader.train_batches(
    source,
    transform,
    batch_size=config.batch_size,
    seed=config.seed,
    start_step=start_step,
    process_index=part,
    process_count=parts,
    **{name: config.data[name] for name in ('workers', 'repeats', 'balance')},
  )
  if is_first:
    _summarise(experiment, workdir)
  run = Run(
    workdir=workdir,
    mesh=experiment.mesh,
    durations=durations,
    checkpoints=checkpoints,
    evaluators=[*map(runner, evaluators)],
    shown=shown,
    meta=meta,
    start_step=start_step,
    batch_size=config.batch_size,
    forward_flops=experiment.forward_flops * objective.images_seen,
  )
  with (
    contextlib.closing(batches),
    contextlib.closing(run),
    preemption_notice() as preempted,
  ):
    if saved_meta and saved_meta.get('evaluation_due'):
      run.evaluate_again(start_step, state)
    for step in range(start_step + 1, durations.total + 1):
      if run.is_out_of_patience():
        break
      run.profile(step)
      batch = run.wait_for(batches)
      steps_taken = sharding.replicate(np.int32(step - 1), experiment.mesh)
      # Raises if a host array would be copied to the devices in every step.
      with run.compiling(batch), jax.transfer_guard('disallow'):
        state, metrics = train_step(state, fixed, batch, steps_taken)
      run.add_metrics(step, metrics)
      if run.is_eval_step(step):
        run.evaluate(step, state)
      if run.is_checkpoint_step(step):
        run.save(step, state)
      if preempted() and step < durations.total:
        run.save(step, state)
        raise Preempted(f'Preempted: saved step {step}.')
    return run.finish()


def _new_meta(
  experiment: Experiment, source: sources.Source, fixed: Params, best: Best
) -> dict[str, Any]:
  """Returns the metadata that is saved with every checkpoint of a run."""
  config, objective = experiment.config, experiment.objective
  init = config.init
  is_first = jax.process_index() == 0  # only it computes the data's identity
  return {
    'config': json.loads(config.to_json()),
    'model': variants.fields_of(objective.model),
    'class_names': list(objective.class_names),
    'examples': len(source),
    'data': bad_images.gather([source.identity()] if is_first else [])[0],
    'steps': experiment.durations.total,
    'image_size': list(experiment.image_size),
    # Adapters load this checkpoint, from any working directory.
    'init': init if fetch.is_name(init) else init and os.path.abspath(init),
    'fixed': saving.checksums(fixed).tolist() if fixed else [],
    'best': best,
    'result': objective.result,
    'elapsed_s': 0.0,
    'since_log': [],
    'evaluation_due': False,
    'evaluated': [],
  }


def _summarise(experiment: Experiment, workdir: str) -> None:
  """Prints a summary of the run; writes WORKDIR/parameters.txt."""
  print(experiment.summary())
  table = parameter_overview.get_parameter_overview(
    experiment.state_shapes.params, include_stats='sharding'
  )
  path = epath.Path(workdir) / 'parameters.txt'
  atomic_files.replace(path, f'{table}\n'.encode())


def evaluate_only(config: ConfigDict, workdir: str) -> dict[str, float]:
  """Returns the metrics of `config.init` or, if that is empty, of the workdir.

  The checkpoint determines the size and preprocessing of images. DETR takes any
  size, so it uses the config's image size.

  Raises:
    ValueError: if the config or data are invalid, or do not fit the checkpoint.
    OSError: if the checkpoint or data are missing.
    ImportError: if the config needs a package that is not installed.
  """
  workdir = os.path.expanduser(workdir)
  config = config.copy_and_resolve_references()
  from_init.resolve(config)
  own.resolve(config, workdir, measure=False)
  build.check(config)
  if not build.metrics(config):
    raise ValueError(
      'eval_only needs an evaluator with metrics, and none is on. Turn one on, '
      'as in --config.evaluators.test.on=True.'
    )
  checkpoint = opening.open_checkpoint(config.init or workdir)
  source = bad_images.open_checked(config.data, config.data.split)
  with config.unlocked():
    config.model = ConfigDict(variants.config_of(checkpoint.model))
    if not checkpoint.model.any_size:
      size = 'x'.join(map(str, checkpoint.image_size))
      if size not in (asked := config.data.image_size, f'{asked}x{asked}'):
        _log.info(
          'Images have %s pixels, the size that %s takes, instead of %s.',
          *(size, checkpoint.path, asked),
        )
      config.data.image_size = size
    config.data.update(dataclasses.asdict(checkpoint.preprocessing))
  checked, facts = CheckedConfig(config), facts_of(config, source)
  mesh = checked.mesh
  objective = checked.objective.on_data(config, facts)
  known, wanted = map(variants.fields_of, (checkpoint.model, objective.model))
  for field in ('name', *known):
    if field != 'num_classes' and known[field] != wanted.get(field):
      raise ValueError(
        f'{checkpoint.path} has model.{field} {known[field]!r}, but the config '
        f'gives {wanted.get(field)!r}: use the config that the checkpoint was '
        'trained with.'
      )
  if objective.class_names:
    classes.check_same(
      checkpoint, objective.class_names, config.data.class_order
    )
  rules = objective.model.partitions
  shardings = sharding.tree_shardings(checkpoint.params, mesh, rules)
  params = sharding.place(checkpoint.params, shardings)
  _log.info('Evaluating %s.', checkpoint.path)
  results: dict[str, Any] = {}
  parts = Parts(config, objective, mesh, facts)
  for evaluator in build.make_evaluators(parts):
    results |= evaluator.run(params)
  # Pictures are only logged during training.
  return metric_log.numbers(results)


if __name__ == '__main__':
  raise SystemExit(
    'Train with python -m vit_jax.main --config=... --workdir=...'
  )
