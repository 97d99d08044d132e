"""How VTAB's classes follow from the objects in an image, by hand."""

import numpy as np
import pytest

from vit_jax.data import vtab


@pytest.mark.parametrize(('count', 'label'), [(3, 0), (4, 1), (10, 7)])
def test_clevr_count(count, label):
  task = vtab.TASKS['clevr_count'].label
  assert task.classify({'objects': {'size': np.zeros(count)}}) == label
  assert task.class_names[label] == f'{count} objects'


@pytest.mark.parametrize(
  ('nearest', 'label'),
  [
    (0.5, 0),
    (8.0, 0),  # An edge belongs to the nearer class.
    (8.001, 1),
    (8.75, 2),
    (10.001, 5),
    (99.0, 5),
  ],
)
def test_clevr_distance(nearest, label):
  task = vtab.TASKS['clevr_distance'].label
  # Only the third number is the depth, and only the nearest object counts.
  coords = np.array([[0, 1, 120], [300, 9.7, nearest]], np.float32)
  for order in (coords, coords[::-1]):
    assert task.classify({'objects': {'pixel_coords': order}}) == label


@pytest.mark.parametrize(
  ('objects', 'label'),
  [
    # The first five are the examples of task_adaptation's kitti_test.py.
    ([(0, 1.0)], 0),
    ([(0, 10.0)], 1),
    ([(0, 30.0)], 2),
    ([(0, 30.0), (1, 1.0)], 0),
    ([], 3),
    ([(0, -2.0)], 0),
    # An edge belongs to the nearer class.
    ([(0, 8.01)], 1),
    # Trucks count, pedestrians do not.
    ([(3, 1.0), (2, 25.0), (0, 90.0)], 2),
  ],
)
def test_kitti(objects, label):
  task = vtab.TASKS['kitti'].label
  fields = {
    'type': np.array([kind for kind, _ in objects], np.int64),
    # Only the third number is ahead.
    'location': np.array([(-50, 1, z) for _, z in objects], np.float32),
  }
  assert task.classify({'objects': fields}) == label
