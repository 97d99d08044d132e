"""The axes of a sweep, its cells and their folders."""

import pytest

from configs import ablation
from tests.sweeps.small_sweep import small
from vit_jax import config as config_lib
from vit_jax.models import variants
from vit_jax.sweeps import axes, choosing

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


def names(config, workdir='w'):
  return [cell.workdir.name for cell in axes.cells(config, str(workdir))]


def test_every_combination_is_a_run_of_its_own(tmp_path):
  config = small(' optimizer.lr = 0.001, 3e-3 ', 'seed=0,1', 'data.flip=true')
  cells = axes.cells(config, str(tmp_path))
  assert [
    (c.config.optimizer.lr, c.config.seed, c.config.data.flip) for c in cells
  ] == [(0.001, 0, True), (0.001, 1, True), (0.003, 0, True), (0.003, 1, True)]
  assert [str(c.workdir) for c in cells] == [
    f'{tmp_path}/runs/lr={lr}_seed={seed}_flip=True'
    for lr in ('0.001', '0.003')
    for seed in (0, 1)
  ]
  assert all(c.config.sweep == () for c in cells)
  # All else is the config's.
  without = config.copy_and_resolve_references()
  without.update(sweep=(), seed=1)
  without.data.flip = True
  without.optimizer.lr = 0.003
  assert cells[-1].config.to_json() == without.to_json()


def test_a_tuple_is_one_value():
  config = small("optimizer.milestones=(),('30%','60%')")
  assert [c.config.optimizer.milestones for c in axes.cells(config, 'w')] == [
    (),
    ('30%', '60%'),
  ]


def test_skipped_combinations_have_no_run():
  config = small('optimizer.lr=0.1,0.2', 'seed=0,1,2')
  config.sweep_skip = ({'optimizer.lr': 0.1, 'seed': 1}, {'seed': 2})
  assert names(config) == ['lr=0.1_seed=0', 'lr=0.2_seed=0', 'lr=0.2_seed=1']
  assert all(c.config.sweep_skip == () for c in axes.cells(config, 'w'))
  config.sweep_skip = ({'model.pool': 'cls'},)
  with pytest.raises(ValueError, match='sweep_skip matches every run'):
    axes.cells(config, 'w')
  config.sweep_skip = ({'optimizer.lr': 0.1, 'optimizer.sede': 1},)
  with pytest.raises(ValueError, match="'optimizer.sede'. Did you mean optim"):
    axes.cells(config, 'w')
  # A field of some runs, and the name of a model.
  config = small('objective=rotation,exemplar', 'model=ti16,s16')
  config.sweep_skip = ({'objective.copies': 8}, {'model': 's16'})
  assert names(config) == ['objective=rotation_model=ti16']


def test_an_axis_of_the_command_replaces_that_of_the_config():
  config = ablation.get_config('head')
  before = names(config)
  axes.add_axes(config, ['optimizer.lr=0.001,0.5'])
  assert [name for name, _ in config.sweep] == ['Head', 'optimizer.lr', 'seed']
  assert set(names(config)) & set(before) == {
    n for n in before if 'lr=0.001' in n
  }
  assert 'Class-token-MLP_lr=0.5_seed=2' in names(config)
  axes.add_axes(config, ['optimizer.weight_decay=0.0,0.1'])
  assert [name for name, _ in config.sweep][-1] == 'optimizer.weight_decay'
  assert len(axes.cells(config, 'w')) == 4 * 2 * 3 * 2


def test_posemb_is_table_8_and_one_row():
  """The additional row adds learned embeddings in every layer."""
  cells = axes.cells(ablation.get_config('posemb'), 'w')
  places = [
    (c.config.model.posemb, c.config.model.posemb_at)
    for c in cells
    if c.config.seed == 0
  ]
  assert len(places) == 9 and len(cells) == 9 * 3
  kinds = {kind for kind, at in places if at != 'input'}
  assert kinds == {'learned1d', 'learned2d'}
  assert cells[6].workdir.name == '1-D-Pos-Emb_Every-Layer_seed=0'


def test_head_is_figure_9():
  config = ablation.get_config('head,./cifar10,model.width=256')
  cells = axes.cells(config, 'w')
  heads = {
    (c.config.model.pool, c.config.model.representation_size) for c in cells
  }
  assert heads == {('cls', 0), ('cls', 256), ('gap', 0), ('map', 0)}
  # Three learning rates for each head; one seed, where digits have three.
  assert len(cells) == 4 * 3
  assert config.data.name == './cifar10'


def test_vit5_loses_one_part_after_the_other():
  """And every model of the grid can be built."""
  config = ablation.get_config('vit5')
  cells = [c for c in axes.cells(config, 'w') if c.config.seed == 0]
  plain, whole, *others = (c.config.model for c in cells)
  parts = {k for k in plain if k in variants.VIT5 or k == 'rope_side'}
  assert all(plain[k] == variants.defaults('vit')[k] for k in parts)
  assert all(whole[k] != plain[k] for k in parts)
  assert whole.rope_side == 4
  lost = [{k for k in parts if model[k] == plain[k]} for model in others]
  assert lost == [
    {'norm'},
    {'layer_scale'},
    {'qk_norm'},
    {'qkv_bias'},
    {'rope', 'rope_side', 'rope_registers'},
    {'registers', 'rope_registers'},
  ]
  for model in (plain, whole, *others):
    variants.build(num_classes=10, image_size=(16, 16), **model)


@pytest.mark.parametrize(
  ('label', 'folder'),
  [
    ('1-D Pos. Emb.', '1-D-Pos-Emb'),
    ('name=../a b/c', 'name=-a-b-c'),
  ],
)
def test_labels_become_folders(label, folder):
  assert axes.folder('w', 'runs', {'x': label}).name == folder


@pytest.mark.parametrize(
  ('sweep', 'message'),
  [
    ('optimizer.lrr=1', "No config field 'optimizer.lrr'.*optimizer.lr"),
    ('seed=,', '--sweep=seed=, lacks values. Write a field and its values'),
  ],
)
def test_axes_that_do_not_work_are_refused(sweep, message):
  with pytest.raises(ValueError, match=message):
    small(sweep)


def test_axes_of_one_name_or_one_field_are_refused():
  config = small('seed=0')
  config.sweep += (('both', (('a', {'seed': 1, 'data.flip': True}),)),)
  with pytest.raises(ValueError, match="seed b.*'seed' of sweep and 'both' of"):
    axes.cells(config, 'w')
  config.sweep = (('x', (('a', {'seed': 1}),)), ('x', (('b', {'total': '1'}),)))
  with pytest.raises(ValueError, match='x belongs to two axes'):
    axes.cells(config, 'w')
  config.sweep = (('x', (('a b', {'seed': 1}), ('a/b', {'seed': 2}))),)
  with pytest.raises(ValueError, match='2 runs would share the folder a-b'):
    choosing.entries(config, 'w')


def test_values_are_gathered_and_each_is_one_run():
  config = small('seed=0,1', 'optimizer.lr=1e-3,0.001', 'seed=2,1')
  assert names(config) == [f'seed={i}_lr=0.001' for i in range(3)]


def test_an_axis_of_models():
  config = small('model=ti16,s/16,r26x1', 'seed=0,1')
  cells = axes.cells(config, 'w')
  assert [c.workdir.name for c in cells[::2]] == [
    'model=ti16_seed=0',
    'model=s-16_seed=0',
    'model=r26x1_seed=0',
  ]
  assert [c.config.model.width for c in cells[::2]] == [192, 384, 64]
  assert cells[4].config.model.name == 'resnet'
  with pytest.raises(ValueError, match="variant 'ti17q'"):
    small('model=ti17q')


def test_a_named_model_and_its_fields_do_not_go_together():
  """The variant would take the place of the field, or the other way round."""
  config = small('model=ti16,s16', 'model.width=8')
  with pytest.raises(ValueError, match="'model' of sweep and 'model.width' of"):
    axes.cells(config, 'w')
  with pytest.raises(
    ValueError, match="model.depth is set by the axis 'model'"
  ):
    axes.refuse_swept(small('model=ti16,s16'), ['model.pool', 'model.depth'])


def test_an_empty_value_is_a_value():
  config = small('data.augment=,3augment(0.3)')
  augments = [cell.config.data.augment for cell in axes.cells(config, 'w')]
  assert augments == ['', '3augment(0.3)']
  assert len(axes.cells(small('seed=0,1,'), 'w')) == 2


def test_an_axis_of_objectives_keeps_fields_that_are_set_for_all():
  config = small('objective=rotation,exemplar')
  config_lib.override(config, {'objective': 'video', 'objective.weight': '2'})
  axes.refuse_swept(config, ['objective.weight'])
  cells = axes.cells(config, 'w')
  assert [c.config.objective.weight for c in cells] == [2, 2]
  with pytest.raises(ValueError, match='objective.name is set by the axis'):
    axes.refuse_swept(config, ['objective.name'])
