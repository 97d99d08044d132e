"""Own photos: configs/own.py, `finetune`, and what a run ends with."""

import dataclasses
import json
import re
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

import vit_jax
from configs import own as own_config
from tests.checkpoints.random_weights import random_checkpoint
from vit_jax import config as config_lib
from vit_jax import own
from vit_jax.checkpoints import from_init
from vit_jax.cli import evaluate
from vit_jax.convert import orbax
from vit_jax.data import sources
from vit_jax.evaluators import final
from vit_jax.experiment import CheckedConfig, Experiment, facts_of

TINY = {
  'model.stem_layers': (1,),
  'model.width': 16,
  'model.depth': 1,
  'model.mlp_dim': 16,
  'model.heads': 2,
  'batch_size': 8,
}


@pytest.fixture
def photos(tmp_path):
  """Fifty photos of two classes, dark and bright."""
  rng = np.random.RandomState(0)
  for i in range(50):
    folder = tmp_path / 'photos' / ('dark', 'bright')[i % 2]
    folder.mkdir(parents=True, exist_ok=True)
    pixels = rng.randint(100, size=(20, 30, 3)) + 155 * (i % 2)
    Image.fromarray(pixels.astype(np.uint8)).save(folder / f'{i}.png')
  return tmp_path / 'photos'


def test_parsing_opens_nothing_and_leaves_choices_open():
  made = own_config.get_config('/no/such/folder,/no/checkpoint,seed=3')
  assert made.total == '10 minutes' and made.seed == 3
  assert made.batch_size is None and made.init == '/no/checkpoint'
  with pytest.raises(ValueError, match='minutes is '):
    own_config.get_config('./photos,minutes=0')


def test_open_fields_are_refused_where_nothing_chooses():
  with pytest.raises(ValueError, match='data.image_size.*--config'):
    CheckedConfig(own.config('./photos'))


def test_minutes_become_steps_once(photos, tmp_path, monkeypatch):
  """The steps of a slower day are those of the first."""
  seconds = []
  monkeypatch.setattr(own, '_speed', lambda *args: (5.0, seconds.pop()))
  monkeypatch.setitem(own.MOST_EPOCHS, 'new', 10**6)

  def resolved(minutes, **fields):
    made = own.config(str(photos), '', minutes)
    made.update_from_flattened_dict(fields)
    own.resolve(made, str(tmp_path / 'run'))()
    return made

  seconds.append(0.2)
  first = resolved(5)
  # 5 minutes without two compilations and ten evaluations of ten images.
  left_s = 300 - 10 - 10 * 10 / 64 / 3 * 0.2
  assert first.total == f'{int(left_s / 0.2)} steps'
  assert first.data.image_size == '40' and not seconds
  assert first.data.train_size == '32'
  assert resolved(5).to_json() == first.to_json()
  given = resolved(5, batch_size=16)
  assert given.batch_size == 16 and given.total == first.total
  # A length that is given stays as it is written.
  assert resolved(5, total='3 epochs').total == '3 epochs'
  seconds.append(100.0)
  assert resolved(1).total == f'{own.LEAST_STEPS} steps'
  # A run that may not use the workdir does not replace the saved choices.
  seconds.append(0.2)
  own.resolve(own.config(str(photos), '', 7), str(tmp_path / 'run'))
  assert resolved(1).total == f'{own.LEAST_STEPS} steps'
  kept = json.loads((tmp_path / 'run' / own.FILE).read_text())
  assert kept['total']['asked'] == '1 minutes'


def test_a_size_that_is_given_holds_in_training_too(photos, tmp_path):
  made = own.config(str(photos))
  made.data.image_size = '96'
  own.resolve(made, str(tmp_path / 'run'), measure=False)
  assert (made.data.image_size, made.data.train_size) == ('96', '')


def chosen_sizes(photos, workdir, **data):
  """Returns the sizes that a run chooses for its images."""
  made = own.config(str(photos))
  made.total = '300 steps'
  made.data.update(data)
  own.resolve(made, str(workdir))()
  return made.data.image_size, made.data.train_size


def test_sizes_of_a_run_that_never_saved_are_chosen_together(photos, tmp_path):
  chosen = chosen_sizes(photos, tmp_path)
  assert chosen_sizes(photos, tmp_path, image_size=chosen[0]) == chosen
  assert chosen_sizes(photos, tmp_path, image_size='96') == ('96', '')
  assert chosen_sizes(photos, tmp_path) == chosen


def test_a_run_from_before_train_size_keeps_one_size(photos, tmp_path):
  chosen_sizes(photos, tmp_path)
  path = tmp_path / own.FILE
  kept = json.loads(path.read_text())
  del kept['data.train_size']
  kept['data.image_size']['chosen'] = '32'
  path.write_text(json.dumps(kept))
  assert chosen_sizes(photos, tmp_path) == ('32', '')


def test_photos_that_come_more_often_are_changed_more():
  photos = own.Photos(200, (300, 400), 10, 90)
  few, many = (own._choices(photos, n, 'new') for n in (3, 300))
  assert few['data.crop_min_area'] > many['data.crop_min_area']
  assert not few['loss.mixup'] and many['loss.mixup']
  rates = [own._choices(photos, 3, k)['optimizer.lr'] for k in own.OPTIMIZERS]
  assert rates == sorted(rates, reverse=True)
  assert few['data.balance'] > 0 and few['data.image_size'] == '56'


def test_a_step_is_chosen_by_a_hundred_photos_or_not_at_all():
  few, many = (
    own._held_out(own.Photos(n, (64, 64), 9, 9)) for n in (999, 1000)
  )
  assert few['data.split'] == 'train' and not few['early_stopping']
  assert many['data.split'] == 'train[:90%]' and many['early_stopping']
  assert many['best_metric'] == 'val/loss' and many['evaluators.val.on']


@pytest.fixture
def init(tmp_path):
  """A small checkpoint of large patches."""
  fields = dict(patch_size=16, width=16, depth=1, mlp_dim=16, heads=2)
  checkpoint = random_checkpoint(None, (64, 64), **fields)
  orbax.write(checkpoint, str(tmp_path / 'init'), 'float32')
  return str(tmp_path / 'init')


def test_a_large_resnet_has_one_rate_for_all_layers(
  photos, tmp_path, monkeypatch
):
  fields = dict(name='resnet', layers=(1,), width=32)
  checkpoint = random_checkpoint(None, (32, 32), **fields)
  orbax.write(checkpoint, str(tmp_path / 'init'), 'float32')
  monkeypatch.setattr(own, 'SMALL', 0)
  made = own.config(str(photos), str(tmp_path / 'init'))
  from_init.resolve(made)
  made.total = '20 steps'
  own.resolve(made, str(tmp_path / 'run'))
  assert made.optimizer.layer_decay == 1
  source = sources.open_config(made.data, 'train')
  Experiment(CheckedConfig(made), facts_of(made, source))


def test_a_small_checkpoint_has_sizes_that_its_patches_tile(
  photos, init, tmp_path, monkeypatch, capsys
):
  """And of 2,000 photos it learns from nine tenths."""
  made = own.config(str(photos), init)
  whole = len(sources.open_config(made.data, 'train'))

  def photos_of(source):
    count, *classes = (n * len(source) // whole for n in (2000, 900, 1100))
    return own.Photos(count, (300, 400), *classes)

  monkeypatch.setattr(own, 'photos_of', photos_of)
  made.total = '2 epochs'
  from_init.resolve(made)
  own.resolve(made, str(tmp_path / 'run'))
  assert (made.data.image_size, made.data.train_size) == ('48', '48')
  assert made.data.split == 'train[:90%]'
  said = capsys.readouterr().out
  assert 'photos  1,800 to learn from, 810 to 990 a class' in said
  (tmp_path / 'run').mkdir()
  chosen = {'data.image_size': {'asked': None, 'chosen': '56'}, 'init': ''}
  (tmp_path / 'run' / own.FILE).write_text(json.dumps(chosen))
  again = own.config(str(photos), init)  # chosen for another checkpoint
  again.total = '2 epochs'
  from_init.resolve(again)
  own.resolve(again, str(tmp_path / 'run'))()
  assert again.data.image_size == '48'
  assert '(1.99 epochs)' in said


@pytest.mark.slow
def test_the_speed_of_adapters_is_measured(photos, init, tmp_path, monkeypatch):
  monkeypatch.setattr(own, '_MEASURE_S', 0.0)
  made = own.config(str(photos), init, 0.001)
  made.optimizer.lora = 2
  from_init.resolve(made)
  own.resolve(made, str(tmp_path / 'run'))
  assert made.total == f'{own.LEAST_STEPS} steps'


@pytest.mark.slow
def test_from_photos_to_a_model(photos, tmp_path, monkeypatch):
  """From nothing, then from that checkpoint, which begins with its head."""
  workdir = tmp_path / 'run'
  fields = TINY | {'eval_every': '50%'}
  monkeypatch.setattr(own, 'LEAST_STEPS', 6)
  monkeypatch.setattr(own, '_MEASURE_S', 0.0)
  with pytest.raises(ValueError, match="field 'lr'. Did you mean optimizer.lr"):
    vit_jax.finetune(photos, workdir=workdir, fields={'lr': 1e-3})
  vit = vit_jax.finetune(photos, minutes=0.001, workdir=workdir, fields=fields)
  assert vit.class_names == ('bright', 'dark')
  assert vit.checkpoint.path.endswith('/6')
  said = (workdir / final.FILE).read_text()
  assert re.search(r'baseline +50\.0% always ', said), said
  assert re.search(r'baseline +100\.0% a linear classifier', said), said
  # With a rate of 0 the head of the linear probe stays.
  still = {'total': '4 steps', 'optimizer.lr': 0.0, 'patience': 1}
  still |= {'eval_every': '1 steps', 'batch_size': 8}
  tuned = vit_jax.finetune(
    photos, str(workdir), workdir=tmp_path / 'tuned', fields=still
  )
  names = [
    tuned.predict(path, topk=1)[0][0][0] == path.parent.name
    for path in photos.rglob('*.png')
  ]
  assert np.mean(names) > 0.9
  # Forty photos are too few to choose a step by. With a patience of 1, training
  # ends at the first evaluation that does not improve.
  assert tuned.checkpoint.path.endswith('/2')
  rows = (tmp_path / 'tuned' / 'metrics.csv').read_text().splitlines()
  assert len(rows) == 1 + 2
  assert 'val/loss' not in rows[0]


def test_the_report_names_the_split_that_was_used(photos, tmp_path):
  """`val`, if `test` has no labels."""
  for split in ('train', 'val'):
    shutil.copytree(photos, tmp_path / 'data' / split)
  (tmp_path / 'data' / 'test').mkdir()
  shutil.copy(photos / 'dark' / '0.png', tmp_path / 'data' / 'test')
  checkpoint = random_checkpoint(
    None, (8, 8), 2, patch_size=4, width=8, depth=1, mlp_dim=8, heads=2
  )
  names = ('bright', 'dark')
  named = dataclasses.replace(checkpoint, class_names=names)
  orbax.write(named, str(tmp_path / 'run'), 'float32')
  made = config_lib.base()
  made.data.name = str(tmp_path / 'data')
  assert ' of 50 val images ' in final.report(made, str(tmp_path / 'run'))


def test_intervals_are_wilsons():
  """Of 10 in 20, and of the ends, by Wilson's closed form."""
  assert final.wilson(10, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
  low, high = final.wilson(0, 20)
  assert low == 0 and high == pytest.approx(1.96**2 / (20 + 1.96**2))
  assert final.wilson(20, 20) == pytest.approx((1 - high, 1))


def test_wrong_labels_have_no_baselines():
  data = config_lib.base().data
  data.update(name='digits', wrong_labels=0.1)
  assert final.baselines(data, 'train', 'test') == {}


def test_photos_of_several_classes_are_not_counted_by_class():
  made = config_lib.base()
  made.init = 'a checkpoint'
  alone, shared = (
    own._summary(own.Photos(16, (9, 9), fewest, 16), made, 10, 1.0)
    for fewest in (3, 16)
  )
  assert ' 3 to 16 a class,' in alone and 'a class' not in shared


def test_resuming_knows_data_by_what_they_are(photos):
  """A folder that moved holds the same data, and another one does not."""
  made = own.config(str(photos))
  source = sources.open_config(made.data, 'train')
  before = source.identity(), [*source.states([0])]
  photos.rename(photos.parent / 'moved')
  made.data.name = str(photos.parent / 'moved')
  moved = sources.open_config(made.data, 'train')
  assert moved.identity() == before[0]
  assert [*moved.states([0])] != before[1]

  def meta(name, identity):
    config = config_lib.base()
    config.data.name = name
    facts = {'examples': 40, 'class_names': ['a', 'b'], 'steps': 1}
    saved = json.loads(config.to_json())
    return facts | {'config': saved, 'data': identity}

  config_lib.check_resumable(meta('./a', 'x'), meta('./b', 'x'))
  with pytest.raises(ValueError, match='data.name: '):
    config_lib.check_resumable(meta('./a', 'x'), meta('./b', 'y'))
  with pytest.raises(ValueError, match='data.name: '):
    config_lib.check_resumable(meta('./a', None), meta('./b', None))


def test_packages_are_imported_first(monkeypatch, tmp_path):
  monkeypatch.delitem(sys.modules, 'wandb', raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'wandb.py').write_text('None.version')  # damaged
  made = own.config('/no/such/folder')
  made.wandb = 'photos'
  with pytest.raises(ImportError, match='AttributeError.*: pip install'):
    vit_jax.train(made, '/no/such/workdir')


@pytest.mark.slow
def test_several_labels_are_measured_alike_everywhere(photos, tmp_path):
  """By training, by the report at its end, and by `evaluate`."""
  lines = ['file,labels']
  for i, path in enumerate(sorted(photos.rglob('*.png'))):
    names = [path.parent.name, *['third'] * (i % 3 == 0)]
    lines.append(f'{path},{";".join(names)}')
  table = tmp_path / 'photos.csv'
  table.write_text('\n'.join(lines))
  made = own.config(str(table))
  made.update_from_flattened_dict(TINY | {'total': '6 steps'})
  made.update(eval_every='100%', best_metric='test/accuracy')
  made.loss.name = 'sigmoid'
  workdir = str(tmp_path / 'run')
  trained = vit_jax.train(made, workdir)
  assert 'test/accuracy' not in trained and 'train/accuracy' not in trained
  found = vit_jax.evaluate(workdir, str(table)).measures
  assert found.mean_ap == pytest.approx(trained['test/map'], abs=1e-6)
  assert found.mean_f1 == pytest.approx(trained['test/f1'], abs=1e-6)
  assert final.report(made, workdir).lstrip().startswith('mean AP  ')
  assert evaluate.main([workdir, str(table), f'--output={tmp_path}/out']) == 0
  rows = (tmp_path / 'out' / 'classes.csv').read_text().splitlines()
  assert rows[0] == 'class,images,average_precision,f1' and len(rows) == 4
  # With a rate of 0, the head of the linear probe stays.
  made = own.config(str(table), workdir)
  made.update_from_flattened_dict(
    {'total': '1 steps', 'optimizer.lr': 0.0, 'batch_size': 8}
  )
  made.loss.name = 'sigmoid'
  vit_jax.train(made, str(tmp_path / 'tuned'))
  found = vit_jax.evaluate(str(tmp_path / 'tuned'), str(table)).measures
  assert found.f1_C[:2].tolist() == [1, 1]


def test_swept_sizes_of_a_checkpoint_are_tiled(init):
  made = config_lib.base()
  from_init.choose(made, init)
  made.sweep = (('size', (('a', {'data.image_size': 50}),)),)
  from_init.resolve(made)
  assert made.sweep == (('size', (('a', {'data.image_size': '48'}),)),)
