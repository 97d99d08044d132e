"""The cells of configs/scaling.py, and a study of two models."""

import csv

import pytest

from configs import scaling
from vit_jax.data import images
from vit_jax.models import variants
from vit_jax.sweeps import axes

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


def models(config):
  """Returns the model of each label, built as training does."""
  size = images.size_of(config.data.image_size)
  return {
    cell.labels['Model']: variants.build(
      num_classes=10, image_size=size, **cell.config.model
    )
    for cell in axes.cells(config, 'w')
  }


def test_every_model_sees_the_same():
  for argument in ('digits', 'imagenet21k'):
    cells = axes.cells(scaling.get_config(argument), 'w')
    own = {'model', 'optimizer', 'seed'}
    shared = [
      {k: v for k, v in cell.config.items() if k not in own} for cell in cells
    ]
    assert all(other == shared[0] for other in shared)
    rest = [
      {k: v for k, v in cell.config.optimizer.items() if k != 'lr'}
      for cell in cells
    ]
    assert all(other == rest[0] for other in rest)
    assert len({cell.workdir for cell in cells}) == len(cells)


def test_folders_take_small_models_with_smaller_patches_and_one_seed():
  config = scaling.get_config('./images,digits,total=1 epochs')
  built = models(config)
  assert built['ViT-2x32'].patch_size == 4
  assert built.keys() == models(scaling.get_config()).keys()
  assert config.data.name == './images'
  assert config.evaluators.fewshot.data == 'digits'
  assert config.total == '1 epochs'
  assert len(axes.cells(config, 'w')) == 9
  assert len(axes.cells(scaling.get_config(), 'w')) == 27


@pytest.mark.parametrize(
  ('argument', 'few', 'total', 'test', 'bias'),
  [
    ('imagenet21k', 'imagenet2012', '30 epochs', 'train[:51200]', -10),
    ('imagenet2012', 'imagenet2012', '90 epochs', 'validation', 0),
    ('cars196,digits', 'digits', '90 epochs', 'test', 0),
  ],
)
def test_large_data(argument, few, total, test, bias):
  config = scaling.get_config(argument)
  assert config.evaluators.fewshot.data == few
  assert config.total == total
  assert config.evaluators.test.split == test
  cells = {c.labels['Model']: c.config for c in axes.cells(config, 'w')}
  for cell_config in cells.values():
    assert cell_config.model.head_bias == bias
    assert cell_config.model.dtype == 'bfloat16'
  # The rate is from table 3; the representation is as wide as the model.
  assert cells['ViT-L/16'].optimizer.lr == 4e-4
  assert cells['ViT-L/16'].model.representation_size == 1024
  assert cells['R50x1'].model.name == 'resnet'


def test_fields_of_the_models_are_refused():
  with pytest.raises(ValueError, match='model.width is set by the axis .Model'):
    scaling.get_config('digits,model.width=3')


@pytest.mark.slow
def test_a_study_of_two_families(command, tmp_path):
  argument = (
    'digits,total=4 steps,batch_size=16,optimizer.warmup=1 steps,'
    'evaluators.fewshot.shots=(10,),evaluators.fewshot.seeds=1'
  )
  folder = tmp_path / 'w'
  config = scaling.get_config(argument)
  kept = ('ViT-2x32', 'R2x32')
  assert set(kept) <= models(config).keys()
  # The rest is left out as a finished study would find it: by a config of two.
  file = tmp_path / 'two.py'
  file.write_text(
    'from configs import scaling\n'
    'def get_config():\n'
    f'  config = scaling.get_config({argument!r})\n'
    '  (name, entries), _ = config.sweep\n'
    f'  entries = tuple(e for e in entries if e[0] in {kept})\n'
    '  config.sweep = ((name, entries),)\n'
    '  return config\n'
  )
  status, out, err = command(f'--config={file}', f'--workdir={folder}')
  assert status == 0, err
  with open(folder / 'results.csv') as f:
    rows = {row['Model']: row for row in csv.DictReader(f)}
  assert rows.keys() == set(kept)
  for row in rows.values():
    assert 0 <= float(row['fewshot/10shot_accuracy']) <= 1
    want = 3 * float(row['gflops']) * 4 * 16 / 1e9
    assert float(row['exaflops']) == pytest.approx(want)
  table = (folder / 'table.md').read_text()
  assert '| ViT-2x32 | ViT | ' in table and '| R2x32 | ResNet (BiT) | ' in table
  assert (folder / 'plot.png').exists() and 'plot.png' in out
