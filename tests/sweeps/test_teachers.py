"""The tables of configs/teachers.py: every run can work, on one budget."""

import pytest

from configs import teachers
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.objectives.objective import Facts
from vit_jax.sweeps import axes, choosing, refusing, stages


@pytest.mark.parametrize('grid', teachers.GRIDS)
def test_every_run_can_work(grid):
  config = teachers.get_config(f'{grid},optimizer.lr=0.002')
  config.sweep = (config.sweep[0],)  # Seeds make no difference.
  refusing.check(choosing.entries(config, 'anywhere'), refusing.KnownData())


def test_methods_have_one_budget():
  """Of images that a model trains on, teachers and pre-training included."""
  config = teachers.get_config()
  config.sweep = (config.sweep[0],)
  images = {}
  for cell in axes.cells(config, 'anywhere'):
    images[cell.name] = 0
    for stage, _ in stages.runs(cell.config, 'anywhere'):
      stage.teacher = stage.teacher and cell.config.teacher
      # A stage that is yet to be trained is not looked for.
      stage.stages = cell.config.stages
      made = Experiment(
        CheckedConfig(stage), Facts(tuple(map(str, range(10))), 40)
      )
      shapes = made.objective.batch_shapes(stage.batch_size)
      *_, height, width, channels = shapes['image'].shape
      a_step = sum(
        x.size // (height * width * channels)
        for name, x in shapes.items()
        if name in ('image', 'unlabelled')
      )
      turns = 4 if stage.objective.name == 'rotation' else 1
      images[cell.name] += made.durations.total * a_step * turns
  budget = teachers.STEPS * 64
  assert len(images) == 7 and set(images.values()) == {budget}, images


def test_of_40_percent_of_the_labels_the_teacher_has_the_right_ones():
  config = teachers.get_config('wrong_labels')
  for cell in axes.cells(config, 'anywhere'):
    *first, (student, _) = stages.runs(cell.config, 'anywhere')
    assert student.data.wrong_labels == 0.4
    assert [teacher.data.wrong_labels for teacher, _ in first] == (
      [] if cell.labels['teacher'] == 'none' else [0.0]
    )
