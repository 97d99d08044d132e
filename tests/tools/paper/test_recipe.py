"""Fine-tuning: the recipe of table 4, from a variant or from a checkpoint."""

import dataclasses

import jax.numpy as jnp
import pytest

from tests.checkpoints.formats.timm_folder import TINY
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax import config as config_lib
from vit_jax.checkpoints import from_init, opening
from vit_jax.checkpoints.formats import table
from vit_jax.experiment import CheckedConfig
from vit_jax.models import variants
from vit_jax.sweeps import axes
from vit_jax.tools.paper import recipe

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

GOLDEN = ROOT / 'tests/golden'


def fine_tuning(model, **fields):
  config = config_lib.base()
  recipe.fine_tuning(config, model)
  config.update_from_flattened_dict(fields)
  from_init.resolve(config)
  return config


@pytest.mark.parametrize(
  ('model', 'pixels', 'side'),
  [
    ('h14', 384, 378),  # 27 patches are nearer than 28
    ('h14', 512, 518),  # as in table 2
    ('l16', 376, 368),  # and not 384, which is as near
    ('l16', 0, 0),  # invalid: building the model raises the error
  ],
)
def test_sizes_are_tiled_by_patches(model, pixels, side):
  assert from_init.nearest_size(fine_tuning(model), pixels) == side


@pytest.mark.parametrize(('patch', 'side'), [(448, 448), (449, 384)])
def test_no_size_is_taken_that_is_far(patch, side):
  """By more than 64 pixels: the model says what is wrong with the one asked."""
  config = fine_tuning('b16', **{'model.patch_size': patch})
  assert from_init.nearest_size(config, 384) == side


def test_a_checkpoint_brings_its_model_and_the_scaling_of_its_images():
  path = str(GOLDEN / 'tiny-rep_s7.npz')
  config = fine_tuning(path)
  checkpoint = opening.open_checkpoint(path)
  model = variants.build(num_classes=3, image_size=(32, 32), **config.model)
  assert model.dtype == jnp.bfloat16
  assert model.clone(dtype=jnp.float32) == checkpoint.model.clone(
    num_classes=3, representation_size=0
  )
  assert config.init == path
  assert tuple(config.data.mean) == checkpoint.preprocessing.mean
  assert config.data.image_size == '384'


def test_what_pre_training_left_out_at_random_fine_tuning_does_not(
  tmp_path, monkeypatch
):
  fields = {'dropout': 0.1, 'stochastic_depth': 0.2, 'remat': 'cheap'}
  checkpoint = dataclasses.replace(
    random_checkpoint(None, (32, 32), **TINY, **fields, head_bias=-3.0),
    preprocessing=table.Preprocessing(
      0, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 'bicubic'
    ),
  )
  monkeypatch.setattr(opening, 'open_checkpoint', lambda path: checkpoint)
  config = fine_tuning(str(tmp_path))
  assert {name: config.model[name] for name in (*fields, 'head_bias')} == {
    'dropout': 0.0,
    'stochastic_depth': 0.0,
    'remat': 'none',
    'head_bias': 0.0,
  }
  assert tuple(config.data.mean) == (0.1, 0.2, 0.3)
  assert tuple(config.data.std) == (0.4, 0.5, 0.6)
  assert config.data.interpolation == 'bicubic'


@pytest.mark.parametrize(
  ('name', 'model', 'rates'),
  [
    ('imagenet2012', 'b16', (0.003, 0.01, 0.03)),
    ('imagenet2012', 'r50+b16', (0.003, 0.01, 0.03, 0.06)),
    ('imagenet2012', 'r50x1', (0.003, 0.01, 0.03, 0.06)),
    ('vtab/dmlab', 'b16', (0.01,)),
    ('./mine', 'b16', (0.001, 0.003, 0.01, 0.03)),
  ],
)
def test_learning_rates_of_table_4(name, model, rates):
  ((field, values),) = recipe.grid(fine_tuning(model), name)['tune.axes']
  assert field == 'optimizer.lr'
  assert tuple(fields[field] for _, fields in values) == rates


# Table 4: steps; held-out parts of appendix B.1.1; BiT's exceptions for VTAB.
ROWS = [
  ('cifar100', 10_000, 'test', '98%', True, 0.05, 0),
  ('vtab/kitti', 2_500, 'test', '', True, 1.0, 0),
  ('vtab/smallnorb_azimuth', 2_500, 'test', '', False, 0.05, 448),
]


@pytest.mark.parametrize(
  ('name', 'steps', 'test', 'tuned', 'flip', 'min_area', 'resize'), ROWS
)
def test_one_data_set(name, steps, test, tuned, flip, min_area, resize, load):
  config = load('transfer.py', f'b16,{name}')
  assert config.total == f'{steps} steps'
  assert config.evaluators.test.split == test
  assert (config.tune.train, config.tune.val, config.data.split) == (
    (f'train[:{tuned}]', f'train[{tuned}:]', 'train')
    if tuned
    else ('train800', 'val200', 'train800val200')
  )
  assert config.data.flip == flip
  assert config.data.crop_min_area == min_area
  assert round(config.data.crop_resize * 384) == resize
  assert config.data.image_size == '384'
  assert config.optimizer.polyak == 0
  assert config.batch_size == 512
  o = config.optimizer
  assert (o.name, o.decay, o.clip_norm) == ('sgd', 'cosine', 1)
  assert config.optimizer.weight_decay == 0


def test_every_cell_of_table_2_is_the_config_of_its_data_set(load, tmp_path):
  config = load(
    'transfer.py',
    'h14,table2,evaluators.real.on=True,evaluators.real.labels=real.json',
  )
  cells = axes.cells(config, str(tmp_path))
  assert len(cells) == 24 * 3
  by_name = {cell.config.data.name: cell.config for cell in cells}
  assert len(by_name) == 24
  imagenet = by_name.pop('imagenet2012')
  assert imagenet.data.image_size == '518'
  assert imagenet.optimizer.polyak == 0.9999
  assert imagenet.evaluators.real.on
  assert imagenet.evaluators.real.labels == 'real.json'
  for name, cell_config in by_name.items():
    assert cell_config.data.image_size == '378'
    assert cell_config.optimizer.polyak == 0
    assert not cell_config.evaluators.real.on
    assert cell_config.evaluators.real.labels == ''
    alone = load('transfer.py', f'h14,{name}')
    assert cell_config.tune == alone.tune
    assert cell_config.data == alone.data
    assert cell_config.total == alone.total


def test_what_is_asked_for_goes_before_the_recipe(load, tmp_path):
  config = load('transfer.py', 'b16,table2,total=7 steps,data.image_size=64')
  for cell in axes.cells(config, str(tmp_path)):
    assert cell.config.total == '7 steps'
    assert cell.config.data.image_size == '64'


def test_data_of_ones_own_take_as_long_as_vtab():
  """With the splits that the config has."""
  assert recipe.on('./mine') == {'data.name': './mine', 'total': '2500 steps'}
  assert recipe.grid(fine_tuning('b16'), './mine').keys() == {'tune.axes'}


def test_a_suite_of_folders(load, tmp_path):
  config = load('transfer.py', 'b16,./a+./b')
  names = [c.config.data.name for c in axes.cells(config, str(tmp_path))]
  assert names == ['./a'] * 3 + ['./b'] * 3


@pytest.fixture
def load():
  from configs import finetune, transfer

  modules = {'finetune.py': finetune, 'transfer.py': transfer}
  return lambda name, argument: modules[name].get_config(argument)


def test_a_config_opens_no_checkpoint(load, monkeypatch):
  """What flags set goes before the checkpoint; the rest is its own."""
  monkeypatch.setattr(from_init.opening, 'open_checkpoint', None)
  path = str(GOLDEN / 'tiny-rep_s7.npz')
  config = load(
    'finetune.py', f'{path},digits,model.dropout=0.25,model.depth=1'
  )
  suite = load('transfer.py', f'{path},table2')
  config.data.std = (0.3, 0.3, 0.3)
  monkeypatch.undo()
  want = opening.open_checkpoint(path)
  for given in (config, suite):
    from_init.resolve(given)
    assert given.model.name == 'vit' and given.model.dtype == 'bfloat16'
    assert given.model.width == want.model.width
    assert tuple(given.data.mean) == want.preprocessing.mean
    assert given.data.image_size == '384'
  assert (config.model.dropout, config.model.depth) == (0.25, 1)
  assert config.data.std == (0.3, 0.3, 0.3)
  assert suite.model.dropout == 0.0
  sizes = {
    fields['data.image_size']
    for _, values in suite.sweep
    for _, fields in values
    if 'data.image_size' in fields
  }
  assert sizes == {'512'}
  config = load('finetune.py', f'{path},digits,model.version=2')
  from_init.resolve(config)
  with pytest.raises(ValueError, match='not have the field model.version'):
    CheckedConfig(config)
