"""The table of runs, from runs that were saved and not trained."""

import json

import numpy as np
import pytest

from vit_jax import config as config_lib
from vit_jax.checkpoints import saving
from vit_jax.cli import runs
from vit_jax.models import variants
from vit_jax.training import metric_log


def save(folder, losses, metric='test/loss', best='lowest', **fields):
  config = config_lib.base()
  config.best_metric = metric
  config.update_from_flattened_dict(fields)
  log = metric_log.MetricLog(str(folder), None)
  for step, loss in losses.items():
    log.write(step, {metric: loss, 'train/loss': 9.0})
  log.close()
  meta = {
    'config': json.loads(config.to_json()),
    'steps': max(losses),
    'elapsed_s': 90.0,
    'best': best,
    'since_log': [],
  }
  saving.save_parameters(str(folder), {'w': np.zeros(2, np.float32)}, meta)


def test_runs_are_listed_from_the_best(tmp_path, capsys):
  save(tmp_path / 'a', {1: 3.0, 2: 2.0})
  fields = {'optimizer.lr': 0.5, 'init': 'x' * 60}
  save(tmp_path / 'deeper' / 'b', {1: 1.0, 2: 1.5}, **fields)
  (tmp_path / 'c').mkdir()  # without anything
  assert runs.main([str(tmp_path)]) == 0
  head, first, second = capsys.readouterr().out.splitlines()
  # No other field differs. Both rows have their values in the same place.
  assert head.split()[-2:] == ['init', 'optimizer.lr']
  init = 'x' * 20 + '…' + 'x' * 19
  assert first.split() == f'deeper/b 1.0000 1 1.5000 2 1.5 {init} 0.5'.split()
  assert second.split() == 'a 2.0000 2 2.0000 2 1.5 0.001'.split()
  assert first.index('0.5') == second.index('0.001') == head.index('optimizer')
  assert (tmp_path / 'runs.png').read_bytes().startswith(b'\x89PNG')


def test_runs_of_older_versions_are_listed(tmp_path):
  """They lack the number of steps."""
  save(tmp_path / 'a', {1: 3.0, 2: 2.0})
  found = runs.find(str(tmp_path))
  del found[0].meta['steps']
  _, row = runs.table(found).splitlines()
  assert row.split() == 'a 2.0000 2 2.0000 1.5'.split()


def test_each_metric_is_sorted_in_its_own_direction(tmp_path, capsys):
  for name, value in (('b', 0.8), ('a', 0.9), ('c', 0.7)):
    save(tmp_path / name, {1: value}, 'test/accuracy', 'highest')
    save(tmp_path / f'{name}_loss', {1: value})
  assert runs.main([str(tmp_path)]) == 0
  _, *rows = capsys.readouterr().out.splitlines()
  names = [row.split()[0] for row in rows]
  assert names == ['a', 'b', 'c', 'c_loss', 'b_loss', 'a_loss']


def test_runs_that_diverged_come_last(tmp_path, capsys):
  nan = float('nan')
  for name, values in (('a', [nan]), ('b', [nan, 2.0, nan]), ('c', [1.0])):
    save(tmp_path / name, dict(enumerate(values, 1)))
  assert runs.main([str(tmp_path)]) == 0
  _, *rows = capsys.readouterr().out.splitlines()
  assert [row.split()[:3] for row in rows] == [
    ['c', '1.0000', '1'],
    ['b', '2.0000', '2'],
    ['a', 'nan', '1'],
  ]


@pytest.mark.parametrize('folder', ['none', 'empty'])
def test_nothing_to_list(tmp_path, capsys, folder):
  (tmp_path / 'empty').mkdir()
  assert runs.main([str(tmp_path / folder)]) == 2
  assert str(tmp_path / folder) in capsys.readouterr().err


def test_a_metric_that_no_run_has(tmp_path, capsys):
  save(tmp_path / 'a', {1: 3.0})
  assert runs.main([str(tmp_path), '--metric=test/map']) == 2
  assert 'train/loss' in capsys.readouterr().err


def test_other_architectures_do_not_get_the_fields_of_a_vit(tmp_path):
  save(tmp_path / 'vit', {1: 1.0}, **{'model.patch_size': 8})
  save(tmp_path / 'resnet', {1: 2.0})
  found = runs.find(str(tmp_path))
  resnet = {'name': 'resnet', **variants.fields('r50x1'), 'width': 32}
  found[1].meta['config']['model'] = resnet
  values = runs.differing(found)
  assert values['model.name'] == ['vit', 'resnet']
  assert values['model.patch_size'] == ['8', '']
  # The saved model lacks this field, which has a default.
  assert values['model.version'] == ['', '2']


def test_a_damaged_checkpoint_is_named(tmp_path, capsys):
  save(tmp_path / 'a', {1: 1.0})
  for text in ('{}', '['):
    (tmp_path / 'a/checkpoints/0/meta/metadata').write_text(text)
    assert runs.main([str(tmp_path)]) == 2
    assert 'checkpoints/0 is damaged' in capsys.readouterr().err
  (tmp_path / 'a/checkpoints/0/meta/metadata').unlink()
  assert runs.main([str(tmp_path)]) == 2
  assert 'checkpoints/0 is damaged' in capsys.readouterr().err
