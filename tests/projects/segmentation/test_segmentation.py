"""Segmentation: masks from files, the loss, mean IoU, and painted classes."""

import importlib
import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from ml_collections import ConfigDict
from PIL import Image

from configs import segment
from configs import small as small_config
from tests.checkpoints.random_weights import random_checkpoint
from tests.objectives import test_every
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening
from vit_jax.cli import flags, predict
from vit_jax.convert import orbax
from vit_jax.data import bad_images, sources, write_shards
from vit_jax.evaluators import pretrained
from vit_jax.evaluators.evaluator import Parts
from vit_jax.experiment import CheckedConfig, Experiment, facts_of
from vit_jax.objectives.objective import Facts
from vit_jax.projects.segmentation import data, objective, painting
from vit_jax.projects.segmentation.evaluator import (
  SegmentationEvaluator,
  measures,
)
from vit_jax.tools.serve import board
from vit_jax.training import features, sharding

train = importlib.import_module('vit_jax.train')

NAMES = ('tree', 'car')
VIT = {
  'patch_size': 8,
  'width': 16,
  'depth': 1,
  'mlp_dim': 32,
  'heads': 2,
  'registers': 2,
}


def rectangles(i):
  """Returns (class, crowd, (x0, y0, x1, y1)) of the objects of an image."""
  return [
    (1, 0, (2, 3, 20 + i, 25)),
    (2, 0, (10, 5, 16, 12)),
    (1, 1, (30, 0, 36, 8)),
  ]


@pytest.fixture
def root(tmp_path):
  """Ten images of 40x30 pixels: trees, a car before each, and a crowd."""
  for name in ('images', 'masks'):
    (tmp_path / name).mkdir()
  rng = np.random.default_rng(0)
  for i in range(10):
    classes_HW = np.zeros((30, 40), np.uint8)
    for c, crowd, (x0, y0, x1, y1) in rectangles(i):
      classes_HW[y0:y1, x0:x1] = data.IGNORED if crowd else c
    Image.fromarray(classes_HW).save(tmp_path / f'masks/{i}.png')
    pixels = rng.integers(0, 40, (30, 40, 3)) + 70 * (classes_HW % 3)[..., None]
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f'images/{i}.jpg')
  (tmp_path / 'classes.txt').write_text('tree\ncar\n')
  return tmp_path


def annotate(root):
  """Writes the objects of the images as COCO's polygons."""
  objects = [
    {
      'image_id': i,
      'category_id': c - 1,
      'iscrowd': crowd,
      'bbox': [x0, y0, x1 - x0, y1 - y0],
      'segmentation': [[x0, y0, x0, y1, x1, y1, x1, y0]],
    }
    for i in range(10)
    for c, crowd, (x0, y0, x1, y1) in rectangles(i)
  ]
  images = [
    {'id': i, 'file_name': f'{i}.jpg', 'height': 30, 'width': 40}
    for i in range(10)
  ]
  annotations = {
    'images': images,
    'annotations': objects,
    'categories': [{'id': i, 'name': name} for i, name in enumerate(NAMES)],
  }
  (root / 'instances.json').write_text(json.dumps(annotations))


def config_of(name, **changes):
  config = segment.get_config(name)
  config.model.update(**VIT)
  config.data.image_size = '32'
  config.total = '4 steps'
  config.batch_size = 8
  config.mesh.data = 1
  config.update_from_flattened_dict(changes)
  return config


def objective_of(name='./unused', **changes):
  config = config_of(name, **changes)
  checked = CheckedConfig(config, jax.devices()[:1])
  return checked.objective.on_data(config, Facts(NAMES, 100))


def made_batch(rows=8):
  """Returns a batch with ignored pixels, and without class 2."""
  rng = np.random.default_rng(0)
  classes = rng.choice([0, 1, data.IGNORED], (rows, 32, 32), p=[0.5, 0.2, 0.3])
  classes[0] = data.IGNORED
  return {
    'image': jnp.asarray(rng.integers(0, 256, (rows, 32, 32, 3), np.uint8)),
    'classes': jnp.asarray(classes.astype(np.uint8)),
    'mask': jnp.float32(np.arange(rows) < rows - 2),
  }


def random_params():
  return random_checkpoint(
    None, (32, 32), 3, name='segmentation_vit', pool='gap', **VIT
  ).params


def test_png_files_and_coco_polygons_are_equal_masks(root):
  pytest.importorskip('hotcoco')
  transform = objective_of().train_transform()
  found = []
  for _ in range(2):
    source = sources.open_source(f'{root}/', 'train')
    assert source.class_names == NAMES
    assert len(source) == 8
    found.append([transform(record) for record in source])
    found[-1] += [
      transform(x, np.random.default_rng(i)) for i, x in enumerate(source)
    ]
    annotate(root)
  for of_png, of_polygons in zip(*found, strict=True):
    assert of_png.keys() == of_polygons.keys()
    jax.tree.map(np.testing.assert_array_equal, of_png, of_polygons)
  assert {*np.unique(found[0][0]['classes'])} == {0, 1, 2, data.IGNORED}


def test_polygons_without_hotcoco_say_what_to_install(
  root, monkeypatch, capsys
):
  annotate(root)
  monkeypatch.setitem(sys.modules, 'hotcoco', None)
  record = sources.open_source(f'{root}/', 'train')[0]
  with pytest.raises(ImportError) as e:
    data.classes_of(record)
  assert flags.status(e.value) == 71
  assert "pip install -c requirements.txt -e '.[detection]'" in (
    capsys.readouterr().err
  )


def test_crops_and_flips_move_the_mask_with_the_image(root):
  """Bright pixels are those of class 1, but for the edges between them."""
  pixels = np.zeros((300, 400, 3), np.uint8)
  pixels[40:170, 90:300] = 255
  record = {
    'image': pixels,
    'name': 'made',
    'labels': np.array([0]),
    'crowd': np.array([False]),
    'masks': [pixels[..., 0] > 0],
    'size': (300, 400),
  }
  objective = objective_of()
  transform = objective.train_transform()
  examples = [transform(record, np.random.default_rng(i)) for i in range(16)]
  batch = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *examples)
  moved = objective.augment(batch, jax.random.key(0))
  for images_BHWC, classes_BHW in (
    (batch['image'] / 127.5 - 1, batch['classes']),
    (moved['image'], moved['classes']),
  ):
    is_bright_BHW = np.asarray(images_BHWC[..., 0] > 0)
    assert np.mean(is_bright_BHW == (classes_BHW == 1)) > 0.99
  is_moved_B = (moved['classes'] != batch['classes']).any((1, 2))
  assert 0 < np.sum(is_moved_B) < 16


def test_logits_are_a_linear_function_of_the_patches():
  """Without the class token and the registers."""
  model = random_checkpoint(
    None, (32, 24), 3, name='segmentation_vit', pool='cls', **VIT
  )
  assert model.model.extra_tokens == ('cls', 'registers', 'registers')
  x_BHWC = jax.random.normal(jax.random.key(0), (2, 32, 24, 3))
  patches_BhwD = features.layer(model.model, 'pre_logits', patches=True)(
    model.params, x_BHWC
  )
  got, _ = model.model.apply({'params': model.params}, x_BHWC)
  head = model.params['head']
  want = np.asarray(patches_BhwD) @ head['kernel'] + head['bias']
  assert got.shape == (2, 4, 3, 3)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_pixels_that_count():
  objective, params = objective_of(), random_params()
  batch = objective.augment(made_batch(), jax.random.key(0))
  both = jax.jit(lambda b: objective.loss(params, b, None))

  def loss(b):
    return both(b)[0]

  logits, _ = jax.jit(objective.model.apply)({'params': params}, batch['image'])
  logits = jax.image.resize(logits, (8, 32, 32, 3), 'bilinear')
  classes = np.asarray(batch['classes'])
  is_counted = classes != data.IGNORED
  log_p = np.asarray(jax.nn.log_softmax(logits))[is_counted]
  want = -np.mean(log_p[np.arange(len(log_p)), classes[is_counted]])
  assert loss(batch) == pytest.approx(want, rel=1e-5)
  right = np.argmax(np.asarray(logits), -1)[is_counted] == classes[is_counted]
  accuracy = both(batch)[1]['pixel_accuracy']
  assert 0 < accuracy == pytest.approx(np.mean(right), abs=1e-3)
  halves = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
  assert np.mean([loss(x) for x in halves]) == pytest.approx(want, rel=1e-5)


def test_mean_iou_is_that_of_numpy():
  objective, params = objective_of(), random_params()
  batch = made_batch()
  got_CC = jax.jit(objective.confusion)(params, batch)
  images = objective.images.normalize(batch['image'])
  logits, _ = jax.jit(objective.model.apply)({'params': params}, images)
  predicted = jax.image.resize(logits, (8, 32, 32, 3), 'bilinear').argmax(-1)
  predicted, classes = (
    np.asarray(predicted[:6]),
    np.asarray(batch['classes'][:6]),
  )
  is_counted = classes != data.IGNORED
  predicted, classes = predicted[is_counted], classes[is_counted]
  assert np.sum(got_CC) == len(classes)
  iou = {
    c: np.sum((predicted == c) & (classes == c))
    / np.sum((predicted == c) | (classes == c))
    for c in (0, 1, 2)
    if c in predicted or c in classes
  }
  found = measures(np.asarray(got_CC), ('background', *NAMES))
  assert found['mean_iou'] == pytest.approx(np.mean([*iou.values()]))
  assert found['pixel_accuracy'] == pytest.approx(np.mean(predicted == classes))
  assert found['iou_tree'] == pytest.approx(iou[1])


def test_a_class_that_is_nowhere_does_not_count():
  found = measures(np.array([[3, 1, 0], [2, 4, 0], [0, 0, 0]]), 'abc')
  assert found == {
    'mean_iou': pytest.approx((3 / 6 + 4 / 7) / 2),
    'pixel_accuracy': pytest.approx(7 / 10),
    'iou_a': pytest.approx(3 / 6),
    'iou_b': pytest.approx(4 / 7),
  }
  # Several classes may have one name: COCO's unused ids are all 'N/A'.
  counts_CC = np.array([[1, 0, 1], [0, 3, 1], [0, 0, 4]])
  found = measures(counts_CC, ('x', 'N/A', 'N/A'))
  assert found['mean_iou'] == pytest.approx((1 / 2 + 3 / 4 + 4 / 6) / 3)
  # Absent and predicted is wrong.
  found = measures(np.array([[3, 1], [0, 0]]), 'ab')
  assert found['mean_iou'] == pytest.approx(3 / 4 / 2)


@pytest.mark.slow
def test_every_image_counts_once_on_any_number_of_devices():
  entry = ConfigDict({'type': 'segmentation', 'split': 'test[:21]'})
  found = []
  for devices in (1, 8):
    made = test_every.experiment_of('segmentation', devices)
    parts = Parts(made.config, made.objective, made.mesh, made.facts)
    evaluator = SegmentationEvaluator(parts, 'it', entry)
    params = made.place(test_every.new_params('segmentation'))
    counts = [evaluator.confusion(params, b) for b in evaluator.batches()]
    assert np.sum(counts) == 21 * 16 * 16
    found.append(evaluator.run(params))
  assert found[0] == pytest.approx(found[1])
  assert {'it/mean_iou', 'it/pixel_accuracy'} <= found[0].keys()
  other = test_every.experiment_of('classification')
  parts = Parts(other.config, other.objective, other.mesh, other.facts)
  with pytest.raises(ValueError, match='use objective.name=segmentation'):
    SegmentationEvaluator(parts, 'it', entry)


@pytest.fixture
def checkpoint(tmp_path):
  """A classifier at another image size."""
  made = random_checkpoint(None, (24, 24), 5, pool='cls', **VIT)
  orbax.write(made, str(tmp_path / 'start'), 'float32')
  return str(tmp_path / 'start')


@pytest.mark.slow
def test_a_linear_probe_leaves_the_body(root, checkpoint):
  config = segment.get_config(f'{root}/,{checkpoint}')
  train.from_init.resolve(config)
  config.data.image_size = '32'
  config.batch_size, config.mesh.data = 8, 1
  made = Experiment(CheckedConfig(config, jax.devices()[:1]), Facts(NAMES, 8))
  before = made.params_from(opening.open_checkpoint(checkpoint))
  before = jax.device_get(before)
  assert before['head']['kernel'].shape == (16, 3)
  # A head that is 0 would give the body no gradient.
  before['head']['kernel'] = before['head']['kernel'] + np.float32(0.1)
  state = made.start(made.place(before))
  rows = {k: x for k, x in made_batch().items() if k != 'mask'}
  rows = sharding.global_batch(jax.device_get(rows), made.mesh)
  state, metrics = made.train_step()(state, {}, rows, np.int32(0))
  assert np.isfinite(metrics['loss'])
  moved = jax.tree.map(
    lambda a, b: bool(np.any(np.asarray(a) != b)), state.params, before
  )
  moved = traverse_util.flatten_dict(moved, sep='/')
  body = [x for name, x in moved.items() if not name.startswith('head/')]
  assert moved['head/kernel'] and moved['head/bias']
  assert not any(body)


@pytest.mark.slow
def test_a_run_is_measured_and_painted(
  root, checkpoint, tmp_path, capsys, monkeypatch
):
  config = segment.get_config(f'{root}/,{checkpoint},whole')
  config.data.image_size = '32'
  config.update(total='4 steps', batch_size=8, eval_every='4 steps')
  config.optimizer.lr = 0.1
  run = str(tmp_path / 'run')
  want = train.train(config, run)
  config.init = run
  train.from_init.resolve(config)
  found = train.evaluate_only(config, str(tmp_path / 'unused'))
  assert found['segmentation/mean_iou'] == pytest.approx(
    want['segmentation/mean_iou']
  )

  out = tmp_path / 'seen'
  files = [str(root / f'images/{i}.jpg') for i in (0, 1)]
  args = ['predict', run, *files, f'--out={out}', '--format=json']
  monkeypatch.setattr(sys, 'argv', args)
  capsys.readouterr()
  assert predict.main() == 0
  rows = json.loads(capsys.readouterr().out)
  for file in files:
    shares = [x['share'] for x in rows if x['file'] == file]
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
  classes_HW = np.asarray(Image.open(out / 'classes-1.png'))
  assert classes_HW.shape == (30, 40)
  opened = opening.open_checkpoint(run)
  seen_HWC = opened.transform().image(np.asarray(Image.open(files[1])), '1')
  want_HWC = jax.image.resize(
    opened.logits(seen_HWC[None])[0], (30, 40, 3), 'bilinear'
  )
  assert np.mean(classes_HW == want_HWC.argmax(-1)) > 0.99
  share = {x['class']: x['share'] for x in rows if x['file'] == files[1]}
  assert share.get('tree', 0) == pytest.approx(np.mean(classes_HW == 1))
  painted_HWC = np.asarray(Image.open(out / 'painted-1.png'))
  shown_HWC = np.asarray(Image.open(files[1]))
  is_kept_HW = (painted_HWC == shown_HWC).all(-1)
  np.testing.assert_array_equal(is_kept_HW, classes_HW == 0)


def test_a_photograph_is_segmented_at_its_own_size():
  logits_hwC = np.random.default_rng(0).normal(size=(4, 5, 3))
  want = jax.image.resize(np.float32(logits_hwC), (37, 61, 3), 'bilinear')
  got = painting.likeliest(np.float32(logits_hwC), (37, 61))
  assert np.mean(got == want.argmax(-1)) > 0.999


def test_masks_that_do_not_fit_are_named(root):
  transform = objective_of().train_transform()

  def third():
    return transform(sources.open_source(f'{root}/', 'all')[3])

  names = [x['name'] for x in sources.open_source(f'{root}/', 'all')]
  mask = names[3].replace('images', 'masks').replace('.jpg', '.png')
  Image.fromarray(np.zeros((30, 41), np.uint8)).save(mask)
  with pytest.raises(ValueError, match='40x30 pixels and its mask 41x30'):
    third()
  with pytest.raises(ValueError, match='has objects, masks'):
    write_shards.write(f'{root}/', str(root / 'shards'), ['train'])
  (root / 'classes.txt').write_text('chêne\n', encoding='latin-1')
  with pytest.raises(ValueError, match='classes.txt has the byte 0xea at pos'):
    third()
  for names in ('background\ntree', 'tree\n\ncar', 'tree\ntree'):
    (root / 'classes.txt').write_text(names)
    with pytest.raises(ValueError, match='classes.txt needs a different name'):
      third()
  (root / 'classes.txt').write_text('chêne\n', encoding='utf-8')
  (root / 'masks/2.png').unlink()
  with pytest.raises(ValueError, match='1 of 10 images .* lack a mask'):
    sources.open_source(f'{root}/', 'all')
  with pytest.raises(ValueError, match='digits/.* has no mask. Give a folder'):
    transform(sources.open_source('digits', 'test')[0])


def test_bad_masks_are_found_before_training(root):
  source = sources.open_source(f'{root}/', 'all')
  before = [*source.states(range(10))], source.identity()
  names = [pathlib.Path(source[i]['name']).stem for i in range(10)]
  wide = root / 'masks' / f'{names[2]}.png'
  Image.fromarray(np.zeros((30, 41), np.uint8)).save(wide)
  torn = root / 'masks' / f'{names[5]}.png'
  torn.write_bytes(torn.read_bytes()[:60])
  seven = root / 'masks' / f'{names[7]}.png'
  Image.fromarray(np.full((30, 40), 7, np.uint8)).save(seven)
  after = sources.open_source(f'{root}/', 'all')
  states = [*after.states(range(10))]
  changed = [i for i in range(10) if states[i] != before[0][i]]
  assert changed == [2, 5, 7] and after.identity() != before[1]
  with pytest.raises(ValueError, match='3 of 10 images') as e:
    bad_images.checked(after, 'error')
  assert '40x30 pixels, but its annotation says 41x30' in str(e.value)
  assert 'has the class 7, and classes are 0 to 2' in str(e.value)
  assert len(bad_images.checked(after, 'skip')) == 7
  for path in (root / 'masks').iterdir():  # as many tools write them
    Image.fromarray(255 * np.eye(30, 40, dtype=np.uint8)).save(path)
  with pytest.raises(ValueError, match='have no classes: .* 255 .ignored'):
    sources.open_source(f'{root}/', 'all')
  # A class may be rare: one image in ten has it.
  mask = np.full((30, 40), 255, np.uint8)
  mask[:5] = 1
  Image.fromarray(mask).save(sorted((root / 'masks').iterdir())[9])
  for split in ('all', 'train[:1]'):
    sources.open_source(f'{root}/', split)


def test_pixels_and_objects_do_not_make_a_class_of_an_image(root):
  made = CheckedConfig(small_config.get_config(f'{root}/'), jax.devices()[:1])
  for _ in range(2):  # masks, then objects
    source = sources.open_source(f'{root}/', 'all')
    with pytest.raises(ValueError, match='has classes of objects or pixels'):
      Experiment(made, facts_of(made.config, source))
    annotate(root)
    shutil.rmtree(root / 'masks', ignore_errors=True)


def test_splits_may_have_folders(root):
  for kind, end in (('images', 'jpg'), ('masks', 'png')):
    for i in range(10):
      folder = root / kind / ('val' if i < 3 else 'train')
      folder.mkdir(exist_ok=True)
      (root / kind / f'{i}.{end}').rename(folder / f'{i}.{end}')
  source = sources.open_source(f'{root}/', 'test')
  assert len(source) == 3
  assert data.classes_of(source[0]).shape == (30, 40)


def test_folders_of_images_are_not_classes(root):
  """As in Cityscapes, where each split has a folder for each city."""
  for kind, end in (('images', 'jpg'), ('masks', 'png')):
    for i in range(10):
      place = 'val/frankfurt' if i < 3 else f'train/{("aachen", "bonn")[i % 2]}'
      (root / kind / place).mkdir(parents=True, exist_ok=True)
      (root / kind / f'{i}.{end}').rename(root / kind / place / f'{i}.{end}')
  sizes = {x: len(sources.open_source(f'{root}/', x)) for x in ('train', 'val')}
  assert sizes == {'train': 7, 'val': 3}
  one, other = (
    [
      x['name']
      for x in sources.open_source(f'{root}/', 'train', split_seed=seed)
    ]
    for seed in (0, 1)
  )
  assert one != other and sorted(one) == sorted(other)


def test_what_cannot_work_is_refused():
  for changes, problem in (
    ({'model.representation_size': 8}, 'representation_size is 8'),
    ({'model.norm_pooled': True}, 'norm_pooled is True'),
    ({'model.heads': 3}, 'not a multiple of model.heads 3'),
    ({'data.augment': '3augment(0.3)'}, 'ignores data.augment'),
  ):
    with pytest.raises(ValueError, match=problem):
      objective_of(**changes)
  config = config_of('./unused')
  checked = CheckedConfig(config, jax.devices()[:1])
  for names in ((), tuple(map(str, range(255)))):
    with pytest.raises(ValueError, match=f'has {len(names)} classes'):
      checked.objective.on_data(config, Facts(names, 100))
  config_lib.choose_model(config, 'r50x1')
  with pytest.raises(ValueError, match='segmentation needs .vit'):
    CheckedConfig(config, jax.devices()[:1])
  with pytest.raises(ValueError, match="value is 'all'; write head or whole"):
    segment.get_config('./unused,vit/b16,all')


def test_classes_of_whole_images_are_refused(tmp_path):
  made = random_checkpoint(
    None, (24, 24), 3, name='segmentation_vit', pool='cls', **VIT
  )
  vit = pretrained.TrainedModel(made)
  image = np.zeros((40, 30, 3), np.uint8)
  assert vit.features([image], patches=True).shape == (1, 3, 3, 16)
  assert vit.rollout([image]).shape == (1, 3, 3)
  for ask in (vit.predict, lambda x: vit.rollout(x, of=1)):
    with pytest.raises(ValueError, match='SegmentationViT, predicts masks'):
      ask([image])
  with pytest.raises(ValueError, match='predicts masks, which the page'):
    board.write_model(made, tmp_path, 'it', 'float32')


def test_ignored_pixels_have_no_loss_and_no_gradient():
  classes_BHW = jnp.array([[[1, 255]]])
  logits_BHWC = jnp.array([[[[0.0, 1.0], [2.0, 0.0]]]])
  nats_BHW = objective.nats(logits_BHWC, classes_BHW)
  np.testing.assert_allclose(nats_BHW, [[[np.log1p(np.exp(-1.0)), 0]]], 1e-6)
  slope = jax.grad(lambda x: objective.nats(x, classes_BHW).sum())(logits_BHWC)
  np.testing.assert_array_equal(slope[0, 0, 1], 0)
