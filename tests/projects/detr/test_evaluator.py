"""COCO's rows against another implementation, and the evaluator's plumbing."""

import contextlib
import dataclasses
import io

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from tests.objectives import test_every
from vit_jax.data import sources
from vit_jax.evaluators.evaluator import Parts
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.projects.detr import evaluator as coco_ap
from vit_jax.projects.detr import segments, set_losses
from vit_jax.projects.detr.objective import Detection

coco_mask = pytest.importorskip('hotcoco.mask')


def objects_of(rng, images, classes):
  """Returns objects whose areas lie on both sides of COCO's borders, and on."""
  found = []
  for _ in range(images):
    n = rng.integers(0, 6)
    low_N2 = rng.uniform(0, 300, (n, 2))
    sides_N2 = rng.choice([8, 31, 32, 33, 95, 96, 97, 200], (n, 2))
    found.append(
      {
        'boxes': np.concatenate([low_N2, low_N2 + sides_N2], axis=1),
        'labels': rng.integers(0, classes, n),
        'crowd': rng.random(n) < 0.15,
        'area': np.prod(sides_N2, axis=1) * rng.choice([1, 0.7], n),
        'size': (500, 500),
      }
    )
    found[-1]['masks'] = [
      written(box_4, i, crowd)
      for i, (box_4, crowd) in enumerate(
        zip(found[-1]['boxes'], found[-1]['crowd'], strict=True)
      )
    ]
  return found


def written(box_4, i, crowd):
  """Returns a box's mask as polygons, run lengths or, of a crowd, as nothing.

  Its lower right corner is cut off.
  """
  x0, y0, x1, y1 = (float(x) for x in box_4)
  polygon = [x0, y0, x0, y1, x1, y0]
  if crowd and i % 2:
    return None
  if crowd or i % 3 == 0:
    (rle,) = coco_mask.frPyObjects([polygon], 500, 500)
    return {'size': [500, 500], 'counts': rle['counts'].decode()}
  middle = [x0, (y0 + y1) / 2, (x0 + x1) / 2, (y0 + y1) / 2, x0, y1]
  return [polygon, middle]


def found_in(rng, objects):
  """Returns detections: near objects, wrong ones, and scores with ties."""
  found = {}
  for i, x in enumerate(objects):
    near = x['boxes'] + rng.normal(scale=4, size=x['boxes'].shape)
    low_N2 = rng.uniform(0, 300, (4, 2))
    wrong = np.concatenate([low_N2, low_N2 + 40], axis=1)
    boxes = np.concatenate([near, near, wrong])
    boxes = np.sort(boxes.reshape(-1, 2, 2), 1).reshape(-1, 4)
    found[i] = {
      'labels': np.concatenate([x['labels'], x['labels'], np.zeros(4, int)]),
      'scores': np.round(rng.random(len(boxes)), 1),
      'boxes': boxes,
      'masks': [
        coco_mask.merge(coco_mask.frPyObjects(written(x, 1, False), 500, 500))
        for x in boxes
      ],
    }
  return found


def entry_of(split, **changes):
  return ConfigDict({'type': 'coco', 'split': split, 'masks': False} | changes)


def test_rows_are_those_of_another_implementation():
  """With crowds, areas at the borders, and images without detections."""
  library = pytest.importorskip('faster_coco_eval')
  for seed in range(20):
    rng = np.random.default_rng(seed)
    objects = objects_of(rng, 5, 3)
    found = found_in(rng, objects)
    if seed % 2:
      del found[0], found[2]
    # Masks take longer, and a few of them have all that matters.
    for what in ('bbox', 'segm')[: 1 + (seed < 8)]:
      got = coco_ap.average_precision(dict(enumerate(objects)), found, what)
      want = theirs(library, objects, found, what)
      assert got.keys() == {row for row, x in want.items() if x >= 0}
      for row, value in got.items():
        assert value == pytest.approx(want[row], abs=1e-6), (seed, row, what)


def corners(box_4):
  x0, y0, x1, y1 = (float(x) for x in box_4)
  return [[x0, y0, x0, y1, x1, y1, x1, y0]]


def theirs(library, objects, found, what):
  """Returns the rows of faster-coco-eval, which reads results as files."""

  def sides(boxes_N4):
    return np.concatenate(
      [boxes_N4[:, :2], boxes_N4[:, 2:] - boxes_N4[:, :2]], 1
    )

  annotations = [
    {
      'id': 1000 * i + j + 1,
      'image_id': i,
      'category_id': int(x['labels'][j]),
      'bbox': sides(x['boxes'])[j].tolist(),
      'area': float(x['area'][j]),
      'iscrowd': int(x['crowd'][j]),
      'segmentation': x['masks'][j] or corners(x['boxes'][j]),
    }
    for i, x in enumerate(objects)
    for j in range(len(x['labels']))
  ]
  results = [
    {
      'image_id': i,
      'category_id': int(x['labels'][j]),
      'score': float(x['scores'][j]),
    }
    | (
      {'bbox': sides(x['boxes'])[j].tolist()}
      if what == 'bbox'
      else {'segmentation': x['masks'][j]}
    )
    for i, x in found.items()
    for j in range(len(x['labels']))
  ]
  with contextlib.redirect_stdout(io.StringIO()):
    truth = library.COCO(
      {
        'images': [
          {'id': i, 'height': 500, 'width': 500} for i in range(len(objects))
        ],
        'annotations': annotations,
        'categories': [{'id': i, 'name': str(i)} for i in range(3)],
      }
    )
    measured = library.COCOeval_faster(truth, truth.loadRes(results), what)
    measured.evaluate()
    measured.accumulate()
    measured.summarize()
  return dict(zip(coco_ap.ROWS, measured.stats, strict=False))


def test_nothing_found_and_all_found():
  rng = np.random.default_rng(0)
  objects = dict(enumerate(objects_of(rng, 20, 3)))
  nothing = coco_ap.average_precision(objects, {})
  assert set(nothing.values()) == {0.0}
  all_of_them = {
    i: {
      'labels': x['labels'],
      'scores': np.ones(len(x['labels'])),
      'boxes': x['boxes'],
      'masks': [
        segments.run_lengths(m or corners(b), (500, 500))
        for m, b in zip(x['masks'], x['boxes'], strict=True)
      ],
    }
    for i, x in objects.items()
  }
  for kind in ('bbox', 'segm'):
    rows = coco_ap.average_precision(objects, all_of_them, kind)
    assert rows['AP'] == rows['AP50'] == rows['AP75'] == 1


def parts_of(**changes):
  made = test_every.experiment_of(
    'detection', **{'data.split': 'train[:50]'} | changes
  )
  return Parts(made.config, made.objective, made.mesh, made.facts)


@pytest.fixture(scope='module')
def parts():
  # Four stages down to 2x2 places, and the finest map at half the side.
  return parts_of(
    **{
      'model.masks': True,
      'model.width': 128,
      'model.heads': 8,
      'model.backbone_layers': (1, 1, 1, 1),
    }
  )


def test_the_evaluator_measures_every_image_of_a_split_once(parts):
  """A model that knows the answers, behind batches that do not fit."""
  entry = entry_of('test[:21]', masks=True)
  evaluator = coco_ap.CocoEvaluator(parts, 'coco', entry)
  source = sources.open_source('digits_canvas', 'test[:21]')
  batches = list(evaluator.batches())
  assert len(batches) == 2 and len(batches[0]['index']) == 16

  def knowing(params, batch):
    index_B = np.asarray(batch['index'])
    labels_BQ = np.zeros((16, 3), int)
    boxes_BQ4 = np.zeros((16, 3, 4))
    scores_BQ = np.full((16, 3), -1.0)
    masks_BQHW = np.zeros((16, 3, 48, 48), np.float32)
    for i in np.flatnonzero(index_B >= 0):
      x = source.objects(index_B[i])
      n = len(x['labels'])
      labels_BQ[i, :n], scores_BQ[i, :n] = x['labels'], params
      boxes_BQ4[i, :n] = x['boxes'] / 48
      masks_BQHW[i, :n] = np.array(x['masks']) - 0.5
    size_B2 = np.full((16, 2), 48)
    return {
      'index': index_B,
      'scores': scores_BQ,
      'labels': labels_BQ,
      'boxes': boxes_BQ4,
      'size': size_B2,
      'mask_logits': masks_BQHW,
    }

  evaluator.detect, evaluator.canvas = knowing, (48, 48)
  rows = evaluator.run(1.0)
  boxes_and_masks = ('AP', 'AP_small', 'mask_AP', 'mask_AP_small')
  for row in (*boxes_and_masks, 'PQ', 'SQ', 'RQ'):
    assert rows[f'coco/{row}'] == 1
  # All digits are small.
  known = coco_ap.CocoEvaluator.metrics(entry, type(parts.objective))
  assert rows.keys() == {
    f'coco/{row}' for row in known if not row.endswith(('_medium', '_large'))
  }


def evaluator_with(objects, **attributes):
  """Returns an evaluator of the given objects, without opening a split."""
  made = object.__new__(coco_ap.CocoEvaluator)
  vars(made).update(name='coco', objects=objects, **attributes)
  return made


def test_images_that_went_are_no_missed_objects():
  rng = np.random.default_rng(0)
  objects = objects_of(rng, 6, 3)
  found = found_in(rng, objects)
  del found[2]
  evaluator = evaluator_with(
    objects,
    batches=lambda: [0],
    detect=lambda params, batch: None,
    _found_in=lambda outputs: found,
  )
  kept = [0, 1, 3, 4, 5]
  want = coco_ap.average_precision(
    {i: objects[x] for i, x in enumerate(kept)},
    {i: found[x] for i, x in enumerate(kept)},
  )
  assert evaluator.run(None) == {f'coco/{row}': x for row, x in want.items()}
  assert (
    want['AR100']
    > coco_ap.average_precision(dict(enumerate(objects)), found)['AR100']
  )


def test_what_is_found_is_in_pixels_of_each_image():
  """Of a wide and of a tall one, each with another part of the canvas."""
  sizes = [(4, 8), (12, 8)]
  objects = [
    {'size': size, 'labels': np.zeros(0), 'crowd': np.zeros(0, bool)}
    | {'masks': [], 'boxes': np.zeros((0, 4))}
    for size in sizes
  ]
  evaluator = evaluator_with(objects, canvas=(8, 8))
  logits_B1HW = -np.ones((2, 1, 8, 8), np.float32)
  logits_B1HW[0, 0, :2, 1:] = 1  # the image is 4 x 8 of it
  logits_B1HW[0, 0, 3] = 0  # as likely as not, which is not enough
  logits_B1HW[1, 0, 2:, :3] = 1  # and 8 x 4
  found = evaluator._found_in(
    {
      'index': np.arange(2),
      'scores': np.array([[0.9], [0.95]]),
      'labels': np.array([[1], [2]]),
      'boxes': np.array([[[0, 0.25, 0.5, 1]]] * 2),
      'size': np.array([[4, 8], [8, 4]]),
      'mask_logits': logits_B1HW,
    }
  )
  for i, (height, width) in enumerate(sizes):
    (rle,), (_, written) = found[i]['masks'], found[i]['segments']
    assert (found[i]['labels'], found[i]['scores']) == (
      [i + 1],
      [[0.9, 0.95][i]],
    )
    want_14 = [[0, height / 4, width / 2, height]]
    np.testing.assert_array_equal(found[i]['boxes'], want_14)
    want_HW = np.zeros((height, width))
    part = np.s_[:2, 1:] if i == 0 else np.s_[3:, :6]
    want_HW[part] = 1
    np.testing.assert_array_equal(coco_mask.decode(rle), want_HW)
    assert [x['category_id'] for x in written] == [i + 2]


@pytest.mark.parametrize('masks', [True, False])
def test_masks_are_kept_where_they_are_measured(masks, parts, monkeypatch):
  rng = np.random.default_rng(0)
  logits_BQC = rng.normal(size=(2, 5, 11)).astype(np.float32)
  aux = {
    'boxes': rng.uniform(0.2, 0.4, (2, 2, 5, 4)).astype(np.float32),
    'mask_logits': rng.normal(size=(2, 5, 8, 8)).astype(np.float32),
  }
  monkeypatch.setattr(
    Detection, 'predict', lambda self, params, batch: (logits_BQC, aux)
  )
  entry = entry_of('test[:3]', masks=masks)
  evaluator = coco_ap.CocoEvaluator(parts, 'coco', entry)
  assert [('masks' in x) for x in evaluator.objects] == [masks] * 3
  batch = {'index': np.array([2, 0]), 'size': np.array([[48, 40], [30, 48]])}
  found = evaluator.detect({}, batch)
  assert found['index'].tolist() == [2, 0]
  np.testing.assert_array_equal(found['size'], batch['size'])
  # test_objective.py compares these with the original's.
  want = set_losses.likeliest(logits_BQC, aux)
  if not masks:
    del want['mask_logits']
  assert found.keys() == {'index', 'size', *want}
  for name, x in want.items():
    np.testing.assert_allclose(found[name], x, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_evaluator_runs_on_a_model():
  parts, entry = parts_of(), entry_of('test[:21]')
  evaluator = coco_ap.CocoEvaluator(parts, 'coco', entry)
  params = Experiment(
    CheckedConfig(parts.config, jax.devices()[:1]), parts.facts
  ).new_params()
  rows = evaluator.run(params)
  assert {'coco/AP', 'coco/AR100'} <= rows.keys()
  assert all(0 <= x <= 1 for x in rows.values())
  known = coco_ap.CocoEvaluator.metrics(entry, type(parts.objective))
  assert {x.removeprefix('coco/') for x in rows} <= known.keys()


def test_refusals_of_the_evaluator(parts):
  entry = entry_of('test')
  other = test_every.experiment_of('classification')
  with pytest.raises(ValueError, match='name=classification does not predict'):
    coco_ap.CocoEvaluator(
      dataclasses.replace(
        parts, config=other.config, objective=other.objective
      ),
      'coco',
      entry,
    )
  boxes_alone = dataclasses.replace(
    parts, objective=test_every.experiment_of('detection').objective
  )
  coco_ap.CocoEvaluator(boxes_alone, 'coco', entry_of('test[:3]'))
  with pytest.raises(
    ValueError, match='masks is True and model.masks is False'
  ):
    coco_ap.CocoEvaluator(boxes_alone, 'coco', entry_of('test', masks=True))
  config = parts.config.copy_and_resolve_references()
  config.best_metric = 'coco/AR_medium'
  with pytest.raises(ValueError, match='no object of that size. Choose'):
    coco_ap.CocoEvaluator(
      dataclasses.replace(parts, config=config), 'coco', entry
    )


def test_a_split_of_crowds_alone_is_refused(parts, monkeypatch):
  source = parts.source('test')
  objects = dict(source.objects(0))
  objects['crowd'] = np.ones(len(objects['labels']), bool)
  monkeypatch.setattr(type(source), 'objects', lambda self, index: objects)
  with pytest.raises(ValueError, match='split=test has no objects to measure'):
    coco_ap.CocoEvaluator(parts, 'coco', entry_of('test'))
