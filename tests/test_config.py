"""Recipes against the paper's tables, and what a config refuses."""

import importlib.util
import json

import pytest

from configs import finetune, vit
from tests.conftest import ROOT
from tests.tools.paper import table_6
from vit_jax import config as config_lib
from vit_jax.data import images
from vit_jax.models import variants
from vit_jax.training import durations

FILES = sorted((ROOT / 'configs').glob('*.py'))


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_every_config_file_builds_a_model_and_has_no_field_of_its_own(path):
  module = load(path)
  config = module.get_config().lock()
  assert '--config=configs/' in module.__doc__
  known = config_lib.base()
  config_lib.choose_objective(known, config.objective.name)
  variant = {'igpt': 'igpt_s', 'detr': 'detr_r50'}.get(config.model.name)
  if variant:
    config_lib.choose_model(known, variant)
  assert config_lib.flatten(config).keys() == config_lib.flatten(known).keys()
  variants.build(
    num_classes=10,
    image_size=images.size_of(config.data.image_size or '64'),
    **config.model,
  )
  json.loads(config.to_json())  # travels with checkpoints


def test_locked_configs_refuse_new_fields():
  chosen = config_lib.base()
  config_lib.choose_model(chosen, 'ti16')
  config_lib.choose_objective(chosen, 'rotation')
  for group in (chosen.model, chosen.objective):
    with pytest.raises(AttributeError, match='locked'):
      group.wieght = 2.0
  config = config_lib.base().lock()
  with pytest.raises(AttributeError, match='learning_rate'):
    config.optimizer.learning_rate = 1.0


def test_every_field_can_be_given_as_text():
  """The command line has to know its type."""
  config = config_lib.base()
  for key, value in config_lib.flatten(config).items():
    assert type(value) in (str, int, float, bool, tuple), key
    config_lib.override(config, {key: str(value)})
  assert config == config_lib.base()


# Table 3: variant and data, then epochs, learning rate, decay, weight decay,
# dropout, clipping. L/16 was trained for 7 and 14 epochs on JFT-300M and L for
# 30 and 90 on ImageNet-21k; the better one is the recipe. One model stands for
# all models with the same row of the recipe.
TABLE_3 = [
  ('b16', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
  ('l32', 'jft', 7, 6e-4, 'linear', 0.1, 0.0, 0.0),
  ('l16', 'jft', 14, 4e-4, 'linear', 0.1, 0.0, 0.0),
  ('h14', 'jft', 14, 3e-4, 'linear', 0.1, 0.0, 0.0),
  ('r50x1', 'jft', 7, 1e-3, 'linear', 0.1, 0.0, 0.0),
  ('r101x1', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
  ('r152x1', 'jft', 7, 6e-4, 'linear', 0.1, 0.0, 0.0),
  ('r50+b16', 'jft', 7, 8e-4, 'linear', 0.1, 0.0, 0.0),
  ('r50+l32', 'jft', 7, 2e-4, 'linear', 0.1, 0.0, 0.0),
  ('r50+l16', 'jft', 14, 4e-4, 'linear', 0.1, 0.0, 0.0),
  ('b16', 'imagenet21k', 90, 1e-3, 'linear', 0.03, 0.1, 0.0),
  ('b16', 'imagenet2012', 300, 3e-3, 'cosine', 0.3, 0.1, 1.0),
]


# Table 1: layers, width D, MLP, heads; and Ti, S of 2012.12877, g, G of
# 2106.04560.
TABLE_1 = {
  'ti16': (12, 192, 768, 3),
  's16': (12, 384, 1536, 6),
  'b16': (12, 768, 3072, 12),
  'l16': (24, 1024, 4096, 16),
  'h14': (32, 1280, 5120, 16),
  'g14': (40, 1408, 6144, 16),
  'G14': (48, 1664, 8192, 16),
}


def test_the_row_of_a_model_is_that_of_its_other_spelling():
  for variant in ('b16', 'l32', 'l16', 'r50+b16', 'r50+l32'):
    slashed = f'{variant[:-2]}/{variant[-2:]}'
    assert vit.get_config(slashed) == vit.get_config(variant)


@pytest.mark.parametrize(
  ('variant', 'nearest'),
  [
    ('vit5_s16', 's16'),
    ('axial_l32', 'l32'),
    ('axial_l16', 'l16'),
    ('axial_r50x1', 'r50x1'),
    ('s32', 'b32'),
    ('G14', 'h14'),
    ('r26x1', 'r50x1'),
    ('r+ti16', 'r50+b16'),
  ],
)
def test_a_model_that_table_3_lacks_has_the_row_of_the_nearest(
  variant, nearest
):
  found, expected = map(vit.get_config, (variant, nearest))
  assert found.total == expected.total
  assert found.optimizer == expected.optimizer


def test_the_largest_resnet_has_the_epochs_of_table_6():
  found, nearest = map(vit.get_config, ('r200x3', 'r152x2'))
  assert found.optimizer == nearest.optimizer
  epochs = {row.variant: row.epochs for row in table_6.TABLE_6}
  assert found.total == f'{epochs["r200x3"]} epochs'


@pytest.mark.parametrize(
  ('variant', 'data', 'epochs', 'lr', 'decay', 'wd', 'dropout', 'clip'), TABLE_3
)
def test_pre_training_is_table_3(
  variant, data, epochs, lr, decay, wd, dropout, clip
):
  config = vit.get_config(f'{variant},{data}')
  assert config.total == f'{epochs} epochs'
  o = config.optimizer
  assert (o.name, o.b1, o.b2) == ('adam', 0.9, 0.999)
  assert (o.lr, o.decay, o.weight_decay) == (lr, decay, wd)
  assert o.warmup == '10000 steps'
  assert o.clip_norm == clip
  assert config.batch_size == 4096
  assert config.data.image_size == '224'
  # ResNets have neither dense layers to drop out after nor hidden ones.
  assert config.model.get('dropout', 0) == dropout
  if config.model.name == 'vit':
    # Section 3.1: a head with one hidden layer.
    assert config.model.representation_size == config.model.width


def test_sgd_is_that_of_bit():
  """Appendix D.1 takes it from 1912.11370, section 3: upstream training."""
  config = vit.get_config('r50x1,jft,sgd')
  o = config.optimizer
  assert (o.name, o.momentum, o.weight_decay) == ('sgd', 0.9, 1e-4)
  assert o.lr == pytest.approx(0.03 * 4096 / 256)
  assert (o.decay, o.warmup) == ('staircase', '5000 steps')
  # BiT-L: 40 epochs, divided by ten after 10, 23, 30 and 37 of them.
  steps = [
    durations.steps_of(m, batch_size=1, examples=1, total_steps=4000)
    for m in o.milestones
  ]
  assert steps == [1000, 2300, 3000, 3700]
  assert config.total == '7 epochs'
  with pytest.raises(ValueError, match="'lamb': use adam or sgd"):
    vit.get_config('r50x1,jft,lamb')


@pytest.mark.parametrize('variant', ['r50+b16', 'axial_r50x1'])
def test_any_variant_can_be_chosen(variant):
  for config in (vit.get_config(variant), finetune.get_config(variant)):
    want = json.loads(json.dumps(variants.fields(variant)))
    got = json.loads(config.to_json())['model']
    assert got | want == got
    # Everything that the architecture knows can be set, and nothing else.
    assert got.keys() == variants.defaults(got['name']).keys() | want.keys()
    variants.build(num_classes=2, image_size=(224, 224), **got)


def test_tuples_may_stand_in_an_argument():
  config = vit.get_config('r50+b16,jft,model.stem_layers=(1,2),seed=3')
  assert config.model.stem_layers == (1, 2)
  assert config.seed == 3


def test_data_of_the_rows():
  jft = vit.get_config('l16')
  assert jft.to_json() == vit.get_config('l16,jft').to_json()
  for config in (jft, vit.get_config('l16,imagenet21k')):
    assert config.data.name == 'imagenet21k'
    assert config.loss.name == 'sigmoid'
    assert config.model.head_bias == -10
    # Its test examples are cut from the training set and not trained on.
    assert config.data.split == 'train[51200:]'
    assert config.evaluators.test.split == 'train[:51200]'
  imagenet = vit.get_config('b16,imagenet2012')
  assert imagenet.data.name == 'imagenet2012'
  assert imagenet.loss.name == 'softmax'
  assert imagenet.model.head_bias == 0
  assert imagenet.data.split == 'train'
  assert imagenet.evaluators.test.split == 'validation'
  folder = vit.get_config('s16,/data/my_folder')
  assert folder.data.name == '/data/my_folder'
  assert (folder.data.split, folder.loss.name) == ('train', 'softmax')
  assert folder.evaluators.test.split == 'test'
  # 10,000 steps may be longer than the whole run on a small folder.
  assert folder.optimizer.warmup == '10%'


@pytest.mark.parametrize('variant', TABLE_1)
def test_sizes_are_table_1(variant):
  model = vit.get_config(variant).model
  size = (model.depth, model.width, model.mlp_dim, model.heads)
  assert size == TABLE_1[variant]
  assert model.patch_size == int(variant.lstrip('tisblhgG'))


def test_fine_tuning_begins_with_a_new_head_of_one_layer():
  """Image size, length and optimizer are those of table 4."""
  config = finetune.get_config('l16,cifar10')
  assert (config.data.name, config.data.image_size) == ('cifar10', '384')
  assert (config.total, config.batch_size) == ('10000 steps', 512)
  o = config.optimizer
  assert (o.name, o.momentum, o.decay) == ('sgd', 0.9, 'cosine')
  assert (o.weight_decay, o.clip_norm) == (0, 1)
  assert config.model.representation_size == 0
  assert config.model.head_bias == 0
  assert config.model.dropout == 0


def test_key_value_pairs_come_last():
  config = vit.get_config('b16,imagenet2012,total=3 epochs,optimizer.lr=1')
  assert config.total == '3 epochs'
  assert config.optimizer.lr == 1.0
  config = finetune.get_config('b16,cifar10, data.image_size = 224 ')
  assert config.data.image_size == '224'


@pytest.mark.parametrize(
  ('argument', 'message'),
  [
    ('l16x', "Unknown model variant 'l16x'. Did you mean l16"),
    ('b16,cifar10,sgd,12', 'has 4 values without a key; at most 3'),
    ('b16,cifar10,modle.depth=1', "'modle.depth'. Did you mean model.depth"),
    ('b16,cifar10,depth=1', "No config field 'depth'.*model.depth"),
    ('b16,cifar10,batch_size=many', "batch_size='many': .* type int, as in"),
  ],
)
def test_arguments_that_fit_nothing_are_refused(argument, message):
  with pytest.raises(ValueError, match=message):
    vit.get_config(argument)


@pytest.mark.parametrize(
  ('argument', 'positional', 'pairs'),
  [
    ('', ['x', 'y'], {}),
    ('a,b', ['a', 'b'], {}),
    (' a , b ', ['a', 'b'], {}),
    (',b', ['x', 'b'], {}),
    ('a,k = v=w ,', ['a', 'y'], {'k': 'v=w'}),
    ('a,train[:10%],k=', ['a', 'train[:10%]'], {'k': ''}),
    ('runs/lr=1,k.l=./a=b', ['runs/lr=1', 'y'], {'k.l': './a=b'}),
  ],
)
def test_arguments_are_positional_values_and_pairs(argument, positional, pairs):
  got = config_lib.parse_argument(argument, ['x', 'y'])
  assert got == (positional, pairs)


@pytest.mark.parametrize(
  ('key', 'text', 'value'),
  [
    ('data.image_size', '224', '224'),
    ('batch_size', '1e3', 1000),
    ('optimizer.lr', '1', 1.0),
    ('data.flip', 'False', False),
    ('eval_only', 'true', True),
  ],
)
def test_values_take_the_type_of_their_field(key, text, value):
  config = config_lib.base()
  config_lib.override(config, {key: text})
  got = config_lib.flatten(config)[key]
  assert got == value and type(got) is type(value)


def test_an_objective_is_overridden_with_its_fields():
  config = config_lib.base()
  config_lib.override(
    config, {'objective': 'rotation', 'objective.weight': '2'}
  )
  assert (config.objective.name, config.objective.weight) == ('rotation', 2.0)
  config_lib.override(config, {'objective': 'classification'})
  assert config.objective.to_dict() == {'name': 'classification'}
  with pytest.raises(ValueError, match="'rotations'.*rotation"):
    config_lib.override(config, {'objective': 'rotations'})


def test_an_objective_keeps_the_fields_that_were_set_before():
  config = config_lib.base()
  pairs = {'objective': 'exemplar', 'objective.weight': '2'}
  config_lib.override(config, pairs | {'objective.copies': '4'})
  before = config.objective.to_dict()
  config_lib.choose_objective(config, 'exemplar')
  assert config.objective.to_dict() == before
  config_lib.choose_objective(config, 'rotation')
  assert config.objective.weight == 2 and 'copies' not in config.objective
  # A default is not kept: mae hides 75 % of the patches, masked hides 50 %.
  config_lib.choose_objective(config, 'mae')
  config_lib.choose_objective(config, 'masked')
  assert config.objective.rate == 0.5


def test_a_model_and_an_objective_come_before_their_fields():
  config = config_lib.base()
  pairs = {'objective.weight': '2', 'model.width': '24'}
  pairs |= {'objective': 'rotation', 'model': 'ti16'}
  with config.unlocked():
    config_lib.choose_objective(config, 'exemplar')
  config_lib.override(config, pairs)
  assert (config.objective.name, config.objective.weight) == ('rotation', 2.0)
  assert (config.model.width, config.model.mlp_dim) == (24, 768)


@pytest.mark.parametrize(
  ('group', 'fields', 'message'),
  [
    ('evaluators.test', {'spilt': 'train'}, 'Did you mean evaluators.test.spl'),
    ('evaluators.near', {'k': 0}, 'evaluators.near.k is 0'),
  ],
)
def test_fields_of_evaluators_are_checked(group, fields, message):
  config = config_lib.base()
  with config.unlocked():
    config.evaluators.near = config.evaluators.knn.copy_and_resolve_references()
    config.update_from_flattened_dict(
      {f'{group}.{name}': value for name, value in fields.items()}
    )
  with pytest.raises(ValueError, match=message):
    config_lib.check_fields(config)


@pytest.mark.parametrize(
  ('key', 'text'),
  [
    ('batch_size', '1.5'),
    ('batch_size', 'True'),
    ('batch_size', ''),
    ('batch_size', '1e999'),
    ('optimizer.lr', '__import__("os")'),
    ('data.flip', '2'),
  ],
)
def test_values_of_another_type_are_refused(key, text):
  config = config_lib.base()
  with pytest.raises(ValueError) as e:
    config_lib.override(config, {key: text})
  kind = type(config_lib.flatten(config)[key]).__name__
  assert f'{key}={text!r}: expected a value of type {kind}' in str(e.value)
  assert config == config_lib.base()


@pytest.mark.parametrize('text', ['', '8x8x3', '2٢4'])
def test_what_is_no_image_size_says_how_to_write_one(text):
  with pytest.raises(ValueError) as e:
    images.size_of(text)
  assert f'data.image_size is {text!r}' in str(e.value)
  assert '224' in str(e.value) and '384x512' in str(e.value)


def meta(examples=10, class_names=('a', 'b'), fixed=(), **changes):
  config = config_lib.base()
  config.update_from_flattened_dict(changes)
  return {
    'config': json.loads(config.to_json()),
    'examples': examples,
    'class_names': list(class_names),
    'fixed': list(fixed),
  }


def test_a_field_that_an_objective_gained_has_its_default():
  saved, given = meta(), meta()
  for x in (saved, given):
    x['config']['objective'] = {'name': 'mae', 'rate': 0.75, 'normalized': True}
  del saved['config']['objective']['rate']
  config_lib.check_resumable(saved, given)
  given['config']['objective']['rate'] = 0.5
  with pytest.raises(ValueError, match='objective.rate'):
    config_lib.check_resumable(saved, given)


def test_what_does_not_change_learning_may_change():
  changes = {'log_every': '1 step', 'mesh.fsdp': 2, 'model.remat': 'cheap'}
  changes |= {'evaluators.test.split': 'val', 'sweep': (1,), 'wandb': 'mine'}
  config_lib.check_resumable(meta(), meta(**changes))


def test_what_changes_learning_is_refused_by_name():
  given = meta(**{'optimizer.lr': 1.0, 'log_every': '1'})
  with pytest.raises(ValueError) as e:
    config_lib.check_resumable(meta(), given)
  assert '  optimizer.lr: 0.001 -> 1.0\n' in str(e.value)
  assert str(e.value).count('->') == 1
  assert 'another --workdir' in str(e.value)


def test_all_changes_are_named_in_their_order():
  changes = {'total': '9 epochs', 'batch_size': 8, 'optimizer.lr': 1.0}
  with pytest.raises(ValueError) as e:
    config_lib.check_resumable(meta(), meta(**changes))
  names = [x.split(':')[0] for x in str(e.value).splitlines() if '->' in x]
  assert names == ['  batch_size', '  optimizer.lr', '  total']


def test_other_data_is_refused():
  with pytest.raises(ValueError, match='data.examples: 10 -> 11'):
    config_lib.check_resumable(meta(), meta(examples=11))
  with pytest.raises(ValueError, match=r"data.class_names: .*'b'.* -> .*'c'"):
    config_lib.check_resumable(meta(), meta(class_names=('a', 'c')))


def test_images_or_labels_that_changed_are_said(caplog):
  config_lib.check_resumable(meta() | {'data': 'a'}, meta() | {'data': 'a'})
  config_lib.check_resumable(meta(), meta() | {'data': 'a'})
  assert not caplog.messages
  config_lib.check_resumable(meta() | {'data': 'b'}, meta() | {'data': 'a'})
  assert 'images or labels' in caplog.text


def test_images_that_are_gone_can_be_skipped(caplog):
  skip = {'data.on_bad_image': 'skip'}
  config_lib.check_resumable(meta(), meta(**skip))
  assert not caplog.records
  config_lib.check_resumable(meta(examples=11), meta(examples=10, **skip))
  assert 'had 11 images and now have 10' in caplog.text
  # Those that could not be read once may be back.
  config_lib.check_resumable(meta(), meta(examples=11, **skip))
  assert 'had 10 images and now have 11' in caplog.text
  with pytest.raises(ValueError, match='data.on_bad_image=skip resumes'):
    config_lib.check_resumable(meta(examples=11), meta(examples=10))


def test_fields_that_went_are_refused():
  old = meta()
  old['config']['optimizer']['amsgrad'] = True
  with pytest.raises(ValueError) as e:
    config_lib.check_resumable(old, meta())
  assert "  optimizer.amsgrad: True -> '(absent)'\n" in str(e.value)
  assert str(e.value).count('->') == 1


def test_fields_that_came_have_had_their_defaults():
  old = meta()
  del old['config']['model']['scan'], old['config']['objective']
  del old['config']['optimizer']['milestones']  # a tuple, a list as JSON
  config_lib.check_resumable(old, meta())
  with pytest.raises(ValueError, match='  model.scan: False -> True\n'):
    config_lib.check_resumable(old, meta(**{'model.scan': True}))
  # A ResNet's width is another than that of a ViT, which has no version.
  config = config_lib.base()
  config_lib.choose_model(config, 'r50x1')
  resnet = meta() | {'config': json.loads(config.to_json())}
  old = meta() | {'config': json.loads(config.to_json())}
  for field in ('width', 'version'):
    del old['config']['model'][field]
  config_lib.check_resumable(old, resnet)


def test_another_teacher_is_refused():
  with pytest.raises(
    ValueError, match=r'objective.fixed: \[1, 2\] -> \[1, 3\]'
  ):
    config_lib.check_resumable(meta(fixed=[1, 2]), meta(fixed=[1, 3]))


def test_a_run_is_extended_to_a_longer_one_alone(caplog):
  saved = meta() | {'steps': 100}
  longer = meta(extend=True, total='9 epochs')
  with pytest.raises(ValueError, match='100 steps, and the run .* has 100'):
    config_lib.check_resumable(saved, longer | {'steps': 100})
  config_lib.check_resumable(saved, longer | {'steps': 101})
  # A workdir from before the number of steps was saved.
  config_lib.check_resumable(meta(), longer | {'steps': 1})
  assert 'was 90 epochs and is now 9 epochs (101 steps)' in caplog.text
  assert 'was 90 epochs and is now 9 epochs (1 steps)' in caplog.text
  # The same length is not a change.
  caplog.clear()
  config_lib.check_resumable(saved, meta(extend=True) | {'steps': 100})
  assert not caplog.records


def test_stages_of_a_workdir_that_moved_are_its_own():
  old = meta(init='/old/stages/teacher')
  new = meta(init='/new/place/stages/teacher')
  config_lib.check_resumable(old, new)


def test_every_number_has_a_range_and_its_default_lies_in_it():
  config = config_lib.base()
  config_lib.check_fields(config)
  del config.model  # its fields declare theirs
  numbers = {
    field
    for field, value in config_lib.flatten(config).items()
    if isinstance(value, int | float) and not isinstance(value, bool)
  }
  assert numbers <= config_lib.VALID.keys()


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('optimizer.lr', float('inf')),
    ('evaluators.fewshot.shots', (1, 0)),
  ],
)
def test_numbers_out_of_their_range_are_refused(field, value):
  config = config_lib.base()
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=f'^{field} is .*; it must be '):
    config_lib.check_fields(config)


def test_unknown_choices_are_refused_with_the_known_ones():
  config = config_lib.base()
  config.optimizer.name = 'lion'
  with pytest.raises(
    ValueError, match="^optimizer.name is 'lion'; .* adam, sgd, lamb, muon"
  ):
    config_lib.check_fields(config)


@pytest.mark.parametrize(
  ('text', 'parts'),
  [
    ('a, b ,,c', ['a', 'b', '', 'c']),
    ("a=(('(b|c)', 1.0), ('d', 2)),e", ["a=(('(b|c)', 1.0), ('d', 2))", 'e']),
  ],
)
def test_commas_of_a_tuple_do_not_split(text, parts):
  assert config_lib.split_commas(text) == parts


# As the papers have them: fields of a config file that depend on its argument.
PUBLISHED = {
  'baseline:s16': {
    'data.split': 'train[:99%]',
    'evaluators.test.split': 'validation',
    'model.representation_size': 384,
  },
  'deit:s16': {'optimizer.lr': 1e-3, 'evaluators.test.split': 'validation'},
  'vit5:s16': {
    'optimizer.lr': 4e-3,
    'model.stochastic_depth': 0.05,
    'evaluators.test.split': 'validation',
  },
  'vit5:vit5_b16': {'optimizer.lr': 3e-3, 'model.stochastic_depth': 0.2},
  'vit5:l16,./mine': {
    'model.stochastic_depth': 0.45,
    'data.name': './mine',
    'evaluators.test.split': 'test',
  },
  'masked:b16': {
    'data.name': 'imagenet21k',
    'data.split': 'train[51200:]',
    'evaluators.test.split': 'train[:51200]',
  },
  'masked:b16,imagenet2012': {
    'data.split': 'train',
    'evaluators.test.split': 'validation',
  },
  'masked:b16,./mine': {
    'data.split': 'train',
    'evaluators.test.split': 'test',
  },
  'igpt:s': {'optimizer.lr': 3e-3, 'evaluators.test.split': 'validation'},
  'igpt:l': {'optimizer.lr': 1e-3},
  'detr:r50,./coco': {
    'objective.short_sides': (
      *(480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800),
    ),
    'evaluators.coco.split': 'validation',
    'evaluators.test.split': 'validation',
  },
  'noisy_student:imagenet2012': {
    'data.split': 'train[:0.5%]',
    'evaluators.test.split': 'validation',
  },
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_recipes_are_those_that_they_say(name):
  file, _, argument = name.partition(':')
  flat = config_lib.flatten(
    load(ROOT / f'configs/{file}.py').get_config(argument)
  )
  wanted = PUBLISHED[name]
  assert {field: flat[field] for field in wanted} == wanted


@pytest.mark.parametrize(
  ('file', 'argument', 'message'),
  [
    ('finetune', 'l16x', "Unknown model variant 'l16x'. Did you mean l16"),
    ('igpt', 'xl', "'xl' is not a size. Did you mean l"),
    (
      's4l',
      './cifar10,jigsaw',
      "'jigsaw' is not a task of S4L; use rotation or",
    ),
    ('transfer', 'b16,cifar10,seed=1', 'seed is set by the axis .seed'),
    ('noisy_student', 'digits,all', "The second value is 'all': use comp"),
  ],
)
def test_arguments_that_files_do_not_know(file, argument, message):
  with pytest.raises(ValueError, match=message):
    load(ROOT / f'configs/{file}.py').get_config(argument)


def test_names_of_other_projects_lead_to_fields():
  known = config_lib.flatten(config_lib.base())
  for other, field in config_lib._OTHER_NAMES.items():
    assert other not in known and field.partition('=')[0] in known
