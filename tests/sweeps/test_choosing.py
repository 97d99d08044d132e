"""Candidates, trials and runs of a tuned sweep, and what is refused."""

import csv

import pytest

from tests.sweeps.small_sweep import fake_training, small, with_grids
from vit_jax.checkpoints import saving
from vit_jax.data import splits
from vit_jax.sweeps import axes, choosing, running

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

RATES = 'optimizer.lr=0.1,0.2,0.3'


def entries(config, workdir='w'):
  return choosing.entries(config, str(workdir))


def test_trials_take_the_held_out_part_and_runs_the_whole(tmp_path):
  config = small('data.flip=true,false', 'seed=3,4', tune=[RATES])
  config.tune.update(train='train[:80%]', val='train[80%:]')
  found = entries(config, tmp_path)
  assert [list(entry.labels.values()) for entry in found] == [
    [f'flip={flip}', f'seed={seed}']
    for flip in (True, False)
    for seed in (3, 4)
  ]
  assert found[0].group is found[1].group is not found[2].group
  group = found[2].group
  assert group.name == 'flip=False'
  assert [(c.config.seed, c.config.optimizer.lr) for c in group.trials] == [
    (3, 0.1),
    (3, 0.2),
    (3, 0.3),
  ]
  assert [str(c.workdir) for c in group.trials] == [
    f'{tmp_path}/tune/flip=False_lr={lr}' for lr in (0.1, 0.2, 0.3)
  ]
  trial, expected = group.trials[1].config, small()
  expected.update(seed=3, best_metric='val/accuracy')
  expected.data.update(flip=False, split='train[:80%]')
  expected.optimizer.lr = 0.2
  expected.evaluators = {
    'val': {'type': 'mean', 'on': True, 'split': 'train[80%:]'}
  }
  expected.tune.update(train='train[:80%]', val='train[80%:]')
  assert trial.to_dict() == expected.to_dict()

  final, expected = found[3].runs[2], small()
  assert str(final.workdir) == f'{tmp_path}/runs/flip=False_seed=4_lr=0.3'
  assert final.chosen == {'optimizer.lr': 0.3}
  expected.seed = 4
  expected.data.flip = False
  expected.optimizer.lr = 0.3
  expected.tune.update(train='train[:80%]', val='train[80%:]')
  assert final.config.to_dict() == expected.to_dict()


def test_candidates_are_all_combinations():
  config = small(tune=['optimizer.lr=1,2', 'optimizer.weight_decay=0,3'])
  (entry,) = entries(config)
  assert [fields for _, fields in entry.group.candidates] == [
    {'optimizer.lr': lr, 'optimizer.weight_decay': decay}
    for lr in (1.0, 2.0)
    for decay in (0.0, 3.0)
  ]
  assert entry.runs[1].workdir.name == 'lr=1.0_weight_decay=3.0'


def test_the_first_of_the_best_values_is_taken_and_never_a_nan():
  nan = float('nan')
  assert saving.best_index([nan, 0.0, 0.0], 'highest') == 1
  assert saving.best_index([2.0, nan, 1.0, 1.0], 'lowest') == 2
  assert saving.best_index([nan], 'highest') is None


def test_parts_of_their_own():
  config = small('data.flip=true,false', tune=[RATES])
  ((name, ((label, fields), other)),) = config.sweep
  parts = {'tune.train': 'train[:50%]', 'tune.val': 'train[60%:]'}
  config.sweep = ((name, ((label, fields | parts), other)),)
  trials = [entry.group.trials[0].config for entry in entries(config)]
  assert [(t.data.split, t.evaluators.val.split) for t in trials] == [
    ('train[:50%]', 'train[60%:]'),
    ('train[:90%]', 'train[90%:]'),
  ]


def test_the_command_replaces_the_candidates_of_all_groups():
  config = with_grids(small('data.flip=true,false'), ['0.2', '0.3'], ['0.1'])
  ((_, (_, (_, without))),) = config.sweep
  without['tune.axes'] = ()  # chooses nothing, until the command has it choose
  axes.add_axes(config, [], ['optimizer.lr=0.5', 'optimizer.b1=0.8,0.9'])
  for entry in entries(config):
    assert [fields for _, fields in entry.group.candidates] == [
      {'optimizer.lr': 0.5, 'optimizer.b1': b1} for b1 in (0.8, 0.9)
    ]


@pytest.mark.parametrize(
  ('tunes', 'fields', 'message'),
  [
    (
      ['data.flip=true,false'],
      {},
      "flip' of sweep and 'data.flip' of tune",
    ),
    ([RATES], {'tune.train': 'trian'}, "flip=True / lr=0.1: .*'trian'"),
    ([RATES], {'tune.train': 'train[:91%]'}, 'share 15 images. Set tune.val'),
    ([RATES], {'tune.val': 'test[:30]'}, 'share 30 images. Set tune.val'),
  ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
  monkeypatch, tmp_path, tunes, fields, message
):
  fake = fake_training(monkeypatch, lambda config, step: 0.5)
  config = small('data.flip=true,false', 'seed=0,1', tune=tunes)
  config.update_from_flattened_dict(fields)
  with pytest.raises(ValueError, match=message):
    running.run(config, str(tmp_path / 'w'))
  assert fake == []
  assert not (tmp_path / 'w').exists()


def test_no_more_is_chosen_by_than_is_trained_on():
  config = small()
  config.data.split = 'train[:40]'

  def check(train, val):
    config.tune.update(train=train, val=val)
    choosing.check_held_out(config, lambda split: 100)

  check('train[:30]', 'train[30:40]')
  with pytest.raises(ValueError, match='\\[:41.* not in data.split'):
    check('train[:41]', 'train[41:]')
  with pytest.raises(ValueError, match='\\[50:60.* not in data.split'):
    check('train[:30]', 'train[50:60]')


def test_other_images_of_the_same_sets_are_no_overlap():
  config = small()
  counted = []

  def count(split):
    counted.append(split)
    return 10

  def parts(train, val):
    config.tune.update(train=train, val=val)
    return config

  choosing.check_held_out(parts('train800', 'val200'), count)
  assert counted == []
  choosing.check_held_out(parts('a[:90%]+b[:5]', 'a[90%:]+b[5:]'), count)
  choosing.check_held_out(parts('b+a[:5]', 'a[5:]+c'), count)
  with pytest.raises(ValueError, match='share 6 images'):
    choosing.check_held_out(parts('c[:5]+a[:7]', 'a[1:]'), count)


def test_a_missing_test_split_is_not_tuned_on():
  """`test` then stands for `val`."""
  config = small()
  config.tune.update(train='train', val='val[:4]')

  def check(members):
    choosing.check_held_out(
      config, lambda split: len(splits.select(split, members, 'x'))
    )

  members = {'train': range(10), 'val': range(10, 16)}
  with pytest.raises(ValueError, match=r"'val\[:4\]' and 'test' share 4 im"):
    check(members)
  check(members | {'test': range(16, 20)})


def test_nothing_is_chosen_before_all_was_tried():
  (entry,) = entries(small(tune=[RATES]))
  group = entry.group
  known = {'status': 'done', 'steps': 4, 'elapsed_s': 1.5}
  results = {
    trial.workdir: known | {'chosen': trial.chosen, 'metrics': {}}
    for trial in group.trials[:2]
  }

  def chosen(choices):
    text = choosing.csv_text([group], results, choices)
    rows = list(csv.DictReader(text.splitlines()))
    assert [row['optimizer.lr'] for row in rows] == ['0.1', '0.2']
    return [row['chosen'] for row in rows]

  assert chosen({}) == ['', '']
  assert chosen({group: 1}) == ['no', 'yes']
  assert chosen({group: None}) == ['no', 'no']
