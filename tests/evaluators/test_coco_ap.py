"""COCO's rows against another implementation, and the evaluator's plumbing."""

import contextlib
import dataclasses
import io

import numpy as np
import pytest
from ml_collections import ConfigDict

from tests.objectives import test_every
from vit_jax.data import sources
from vit_jax.evaluators import coco_ap
from vit_jax.evaluators.evaluator import Parts

pytest.importorskip('pycocotools')


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
  return found


def found_in(rng, objects, kind, classes):
  """Returns detections: near objects, wrong ones, and scores with ties."""
  found = {}
  for i, x in enumerate(objects):
    near = x['boxes'] + rng.normal(scale=4, size=x['boxes'].shape)
    low_N2 = rng.uniform(0, 300, (4, 2))
    wrong = np.concatenate([low_N2, low_N2 + 40], axis=1)
    boxes = (
      wrong if kind == 'all wrong' else np.concatenate([near, near, wrong])
    )
    labels = np.concatenate([x['labels'], x['labels'], np.zeros(4, int)])
    labels = labels[-len(boxes) :]
    if kind == 'other classes':
      labels = (labels + 1) % classes
    scores = rng.random(len(boxes))
    if kind == 'ties':
      scores = np.round(scores, 1)
    if kind != 'some images' or i % 2:
      found[i] = (
        labels,
        scores,
        np.sort(boxes.reshape(-1, 2, 2), 1).reshape(-1, 4),
      )
  return found


KINDS = ('near', 'all wrong', 'other classes', 'ties', 'some images')


@pytest.mark.parametrize('kind', KINDS)
def test_rows_are_those_of_another_implementation(kind):
  """Forty cases of each kind, among them crowds and areas at the borders."""
  library = pytest.importorskip('faster_coco_eval')
  for seed in range(40):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    objects = objects_of(rng, 5, 3)
    found = found_in(rng, objects, kind, 3)
    got = coco_ap.average_precision(objects, found)
    want = theirs(library, objects, found)
    assert got.keys() == {row for row, x in want.items() if x >= 0}
    for row, value in got.items():
      assert value == pytest.approx(want[row], abs=1e-6), (seed, row)


def theirs(library, objects, found):
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
    }
    for i, x in enumerate(objects)
    for j in range(len(x['labels']))
  ]
  results = [
    {
      'image_id': i,
      'category_id': int(labels[j]),
      'bbox': sides(boxes)[j].tolist(),
      'score': float(scores[j]),
    }
    for i, (labels, scores, boxes) in found.items()
    for j in range(len(labels))
  ]
  with contextlib.redirect_stdout(io.StringIO()):
    truth = library.COCO(
      {
        'images': [{'id': i} for i in range(len(objects))],
        'annotations': annotations,
        'categories': [{'id': i, 'name': str(i)} for i in range(3)],
      }
    )
    measured = library.COCOeval_faster(truth, truth.loadRes(results), 'bbox')
    measured.evaluate()
    measured.accumulate()
    measured.summarize()
  return dict(zip(coco_ap.ROWS, measured.stats, strict=False))


def test_nothing_found_and_all_found():
  rng = np.random.default_rng(0)
  objects = objects_of(rng, 20, 3)
  nothing = coco_ap.average_precision(objects, {})
  assert set(nothing.values()) == {0.0}
  all_of_them = {
    i: (x['labels'], np.ones(len(x['labels'])), x['boxes'])
    for i, x in enumerate(objects)
  }
  rows = coco_ap.average_precision(objects, all_of_them)
  assert rows['AP'] == rows['AP50'] == rows['AP75'] == 1


@pytest.fixture
def parts():
  made = test_every.experiment_of('detection', **{'data.split': 'train[:50]'})
  return Parts(made.config, made.objective, {}, made.mesh, made.facts)


def test_the_evaluator_measures_every_image_of_a_split_once(parts):
  """A model that knows the answers, behind batches that do not fit."""
  entry = ConfigDict({'type': 'coco', 'split': 'test[:21]'})
  evaluator = coco_ap.CocoEvaluator.from_entry(parts, 'coco', entry)
  source = sources.open_source('digits_canvas', 'test[:21]')
  batches = list(evaluator._batches())
  assert len(batches) == 2 and len(batches[0]['index']) == 16

  def knowing(params, batch):
    index_B = np.asarray(batch['index'])
    labels_BQ = np.zeros((16, 3), int)
    boxes_BQ4 = np.zeros((16, 3, 4))
    scores_BQ = np.full((16, 3), -1.0)
    for i in np.flatnonzero(index_B >= 0):
      x = source.objects(index_B[i])
      n = len(x['labels'])
      labels_BQ[i, :n], scores_BQ[i, :n] = x['labels'], params
      boxes_BQ4[i, :n] = x['boxes'] / 48
    return index_B, scores_BQ, labels_BQ, boxes_BQ4

  evaluator = coco_ap.CocoEvaluator(
    'coco', evaluator._objects, knowing, evaluator._batches
  )
  rows = evaluator.run(1.0)
  assert rows['coco/AP'] == rows['coco/AP_small'] == 1
  assert 'coco/AP_large' not in rows


def test_the_evaluator_runs_on_a_model(parts):
  entry = ConfigDict({'type': 'coco', 'split': 'test[:21]'})
  evaluator = coco_ap.CocoEvaluator.from_entry(parts, 'coco', entry)
  params = test_every.experiment_of('detection').new_params()
  rows = evaluator.run(params)
  assert {f'coco/{row}' for row in ('AP', 'AP50', 'AR100')} <= rows.keys()
  assert all(0 <= x <= 1 for x in rows.values())


def test_refusals_of_the_evaluator(parts):
  entry = ConfigDict({'type': 'coco', 'split': 'test'})
  few = dataclasses.replace(parts.objective, max_objects=2)
  with pytest.raises(
    ValueError, match=r'An image of train\[:50\] has 3 objects and'
  ):
    coco_ap.CocoEvaluator.from_entry(
      dataclasses.replace(parts, objective=few), 'coco', entry
    )
  other = test_every.experiment_of('classification')
  with pytest.raises(ValueError, match='name=classification does not learn'):
    coco_ap.CocoEvaluator.from_entry(
      Parts(other.config, other.objective, {}, other.mesh, other.facts),
      'coco',
      entry,
    )
  nothing = {'crowd': np.array([True])}
  with pytest.raises(ValueError, match='has no objects to be found'):
    coco_ap.CocoEvaluator('coco', [nothing], None, None)
