"""Runs that need others first, in their order, and resumed in any of them."""

import json
import pathlib
import signal

import numpy as np
import pytest

from configs import digits, noisy_student
from tests.sweeps.small_sweep import SMALL, table
from tests.test_resume import (
  WAITING_AT_THE_END,
  Command,
  changed,
  final_arrays,
  saved_steps,
  wait_until,
)
from vit_jax import config as config_lib
from vit_jax.experiment import CheckedConfig
from vit_jax.sweeps import axes, running, stages
from vit_jax.training import preemption, run

STEPS = 30
ARGS = (
  '--config.model.width=16',
  '--config.model.depth=1',
  '--config.model.mlp_dim=16',
  '--config.model.heads=2',
  f'--config.total={STEPS} steps',
  # Their averages are compared, too.
  '--config.optimizer.polyak=0.9',
  '--config.log_every=1 step',
  '--config.eval_every=10 steps',
  '--config.checkpoint_every=10 steps',
  # So small a teacher is sure of nothing.
  '--config.objective.threshold=0.1',
)

# Of the three that Noisy Student has.
TWO_GENERATIONS = """
from configs import noisy_student

def get_config():
  config = noisy_student.get_config()
  config.stages = config.stages[:2]
  config.teacher = 'stages/student_1'
  config.objective.labels = 'stages/student_1.npz'
  return config
"""


def small(argument='digits'):
  config = noisy_student.get_config(argument)
  config_lib.override(config, SMALL | {'objective.threshold': '0.0'})
  return config


def test_what_is_given_holds_for_the_teacher_too():
  config = noisy_student.get_config('digits,batch_size=8,objective.ratio=4')
  config.model.dropout = 0.3  # a flag
  (teacher, _), *_ = stages.runs(config, 'runs')
  assert (teacher.batch_size, teacher.model.dropout) == (40, 0.3)
  with pytest.raises(ValueError, match='model.dropout is set by the axis'):
    noisy_student.get_config('digits,compare,model.dropout=0.3')


def test_each_stage_has_a_folder_and_finds_those_before(tmp_path):
  found = stages.runs(small(), str(tmp_path))
  folders = [
    *(tmp_path / 'stages' / n for n in ('teacher', 'student_1', 'student_2')),
    tmp_path,
  ]
  assert [place for _, place in found] == list(map(str, folders))
  configs = [config for config, _ in found]
  assert [c.objective.name for c in configs] == (
    ['classification'] + 3 * ['pseudo_labels']
  )
  assert [c.teacher for c in configs] == ['', *map(str, folders[:3])]
  assert [c.objective.labels for c in configs[1:]] == [
    f'{folder}.npz' for folder in folders[:3]
  ]
  assert [c.batch_size for c in configs] == [64, 16, 16, 16]
  # As many as it was given, and none of another seed's.
  seeds = {c.seed for c in configs}
  assert len(seeds) == 4 and configs[-1].seed == 0
  others = stages.runs(small('digits,seed=1'), str(tmp_path))
  assert not seeds & {config.seed for config, _ in others}
  assert all(c.stages == () for c in configs)


def test_a_teacher_of_another_architecture(tmp_path):
  """It is not looked for before it is trained."""
  config = digits.get_config('deit')
  config.stages = (
    ('resnet', {'model': 'r50x1', 'objective': 'classification'}),
  )
  config.teacher = 'stages/resnet'
  CheckedConfig(config)
  (teacher, _), (student, _) = stages.runs(config, str(tmp_path))
  assert (teacher.model.name, student.model.name) == ('resnet', 'deit')
  CheckedConfig(teacher)
  with pytest.raises(FileNotFoundError, match='No checkpoint at .*/stages/res'):
    CheckedConfig(student)


def test_a_stage_that_there_is_not_yet_is_refused_first(tmp_path):
  name = 'stages/techer'
  config = small()
  (first, fields), *others = config.stages
  config.stages = ((first, fields), ('student_1', {'teacher': name}))
  with pytest.raises(
    ValueError, match=f"'{name}'.* earlier stage. Earlier stages: teacher"
  ):
    stages.train(config, str(tmp_path))
  config.stages, config.teacher = ((first, fields), *others), 'stages/techer'
  with pytest.raises(ValueError, match='techer.* stages: teacher, student_1'):
    stages.train(config, str(tmp_path))
  assert not list(tmp_path.iterdir())


def test_a_workdir_that_was_moved_goes_on(tmp_path):
  """Its stages' paths are made of where it is."""
  metas = []
  for place in ('here', 'there'):
    config, _ = stages.runs(small(), str(tmp_path / place))[-1]
    given = {'config': json.loads(config.to_json()), 'examples': 1}
    metas.append(given | {'class_names': []})
  config_lib.check_resumable(*metas)
  metas[1]['config']['teacher'] = 'stages/another'
  with pytest.raises(ValueError, match='teacher: .*student_2.* -> .*another'):
    config_lib.check_resumable(*metas)


def test_a_diverged_stage_ends_its_run_alone(tmp_path, monkeypatch):
  config = small('digits,compare')
  (name, methods), (seed, seeds) = config.sweep
  config.sweep = (name, methods[:1]), (seed, seeds[:2])

  def diverging(stage, workdir, start_over):
    pathlib.Path(workdir).mkdir(parents=True)
    raise run.Diverged('Step 3: the loss is nan')

  monkeypatch.setattr(stages, 'train_one', diverging)
  running.run(config, str(tmp_path))
  rows = table(tmp_path / 'results.csv')
  assert [row['status'] for row in rows] == 2 * ['diverged']


def test_a_run_without_stages_is_itself(monkeypatch, capsys):
  config, given = config_lib.base(), []
  assert stages.runs(config, 'anywhere') == [(config, 'anywhere')]
  monkeypatch.setattr(stages, 'train_one', lambda *args: given.append(args))
  stages.train(config, 'anywhere')
  assert given == [(config, 'anywhere', False)]
  assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
  ('field', 'message'),
  [
    ({'accum_steps': 7}, 'stage student_1: .*accum_steps'),
    ({'batchsize': 7}, 'batchsize'),
  ],
)
def test_a_wrong_field_of_any_stage_is_refused_first(tmp_path, field, message):
  config = small()
  teacher, (name, fields), *others = config.stages
  config.stages = teacher, (name, fields | field), *others
  with pytest.raises(ValueError, match=message):
    stages.train(config, str(tmp_path))
  config.sweep = (('seed', (('0', {'seed': 0}), ('1', {'seed': 1}))),)
  with pytest.raises(ValueError, match=message):
    running.run(config, str(tmp_path))
  assert not list(tmp_path.rglob('checkpoints'))


def test_preempted_between_stages(tmp_path, monkeypatch, capsys):
  trained = []

  def fake_train(config, workdir, start_over):
    trained.append(workdir)
    if len(trained) == 2:
      with preemption.preemption_notice():
        signal.raise_signal(signal.SIGTERM)

  monkeypatch.setattr(stages, 'train_one', fake_train)
  with pytest.raises(preemption.Preempted, match='every stage so far is saved'):
    stages.train(small(), str(tmp_path))
  assert (
    trained == [place for _, place in stages.runs(small(), str(tmp_path))][:2]
  )
  assert capsys.readouterr().out.splitlines() == [
    f'stage {n} of 4: {place}' for n, place in enumerate(trained, 1)
  ]


@pytest.mark.slow
def test_a_sweep_of_stages(tmp_path):
  """Whose runs have their own, and are not run again."""
  config = small('digits,compare')
  (name, methods), (seed, seeds) = config.sweep
  config.sweep = (name, methods[::2]), (seed, seeds[:1])
  config.stages = config.stages[:1]
  config.teacher = 'stages/teacher'
  config.objective.labels = 'stages/labels.npz'
  first, second = (
    stages.runs(cell.config, str(cell.workdir))
    for cell in axes.cells(config, str(tmp_path))
  )
  assert (len(first), len(second)) == (2, 1)
  assert second[0][0].objective.name == 'classification'
  config.sweep = (name, methods[:1]), (seed, seeds[:1])
  running.run(config, str(tmp_path))
  folder = tmp_path / 'runs/noisy-student_seed=0'
  files = sorted(path.name for path in (folder / 'stages').iterdir())
  assert files == ['labels.npz', 'teacher']
  written = (folder / 'stages/labels.npz').stat().st_mtime_ns
  (row,) = table(tmp_path / 'results.csv')
  # As if it had been killed in its last moment.
  (folder / 'result.json').unlink()
  running.run(config, str(tmp_path))
  (again,) = table(tmp_path / 'results.csv')
  assert {**again, 'elapsed_s': ''} == {**row, 'elapsed_s': ''}
  assert (folder / 'stages/labels.npz').stat().st_mtime_ns == written


@pytest.mark.slow
def test_killed_in_its_second_stage_it_ends_the_same(tmp_path):
  command = Command(tmp_path / 'cache')
  (tmp_path / 'two.py').write_text(TWO_GENERATIONS)
  given = {'config': f'{tmp_path}/two.py', 'settings': ARGS}
  reference, parts = tmp_path / 'whole', tmp_path / 'parts'

  command.finish(reference, 1, **given)
  places = ['stages/teacher', 'stages/student_1', '.']
  program = changed(WAITING_AT_THE_END)
  process = command.start(parts, 1, program=program, **given)
  try:
    assert wait_until(lambda: saved_steps(parts / places[1]), process)
  finally:
    process.kill()
  _, err = process.communicate()
  assert process.returncode == -signal.SIGKILL, err
  command.finish(parts, 1, **given)
  for place in places:
    got, want = (final_arrays(folder / place) for folder in (parts, reference))
    assert got.keys() == want.keys()
    for name, x in want.items():
      assert got[name].tobytes() == x.tobytes(), (place, name)
    metrics = [folder / place / 'metrics.csv' for folder in (parts, reference)]
    assert metrics[0].read_text() == metrics[1].read_text()
  for place in places[:2]:
    labels = [
      np.load(f'{folder / place}.npz')['probabilities']
      for folder in (parts, reference)
    ]
    assert np.array_equal(*labels)


def test_the_time_of_a_run_includes_its_stages(monkeypatch, tmp_path):
  monkeypatch.setattr(stages.saving, 'steps', lambda folder: [2, 4])
  monkeypatch.setattr(
    stages.saving, 'read_meta', lambda path: {'elapsed_s': float(path.name)}
  )
  # A teacher, two students and the run itself, each at step 4.
  assert stages.elapsed_s(small(), str(tmp_path)) == 16.0
