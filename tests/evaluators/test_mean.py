"""Every example counts once, for any batch size."""

from unittest import mock

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits
from tests.evaluators.small import SIZE, mesh_of, model_of
from vit_jax.data import sources, transforms
from vit_jax.data.images import Images
from vit_jax.evaluators.evaluator import Parts
from vit_jax.evaluators.mean import MeanEvaluator
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts
from vit_jax.training import sharding


@pytest.fixture(scope='module')
def setup():
  """A random model, and the predictions of a plain loop over the digits."""
  model, params = model_of()
  source = sources.open_source('digits', 'test')
  transform = transforms.EvalTransform(SIZE)
  correct, loss = 0, 0.0
  logits = jax.jit(lambda images: model.apply({'params': params}, images)[0])
  for i in range(len(source)):
    example = transform(source[i])
    image = (example['image'][None] - np.float32(127.5)) / 127.5
    row = np.asarray(logits(image)[0], np.float64)
    correct += int(row.argmax() == example['label'])
    loss += np.log(np.exp(row - row.max()).sum()) + row.max()
    loss -= row[example['label']]
  return model, params, source, correct, loss


def run(setup, batch_size, devices, source=None):
  model, params, whole, *_ = setup
  source = source or whole
  mesh = mesh_of(devices)
  config = digits.get_config()
  config.batch_size = batch_size
  parts = Parts(
    config,
    Classification(model, Images(SIZE)),
    mesh,
    Facts(whole.class_names, 9),
  )
  params = jax.device_put(params, sharding.replicated(mesh))
  with mock.patch.object(Parts, 'source', lambda parts, split: source):
    evaluator = MeanEvaluator(parts, 'test', ConfigDict({'split': 'test'}))
  first = evaluator.run(params)
  assert evaluator.run(params) == first  # a pass can be made again
  return first


# 360 test digits: batches that fit, and batches that leave a rest.
@pytest.mark.fast('7-1')
@pytest.mark.parametrize(('batch_size', 'devices'), [(40, 8), (7, 1)])
def test_equals_a_plain_loop(setup, batch_size, devices):
  *_, correct, loss = setup
  got = run(setup, batch_size, devices)
  assert got.keys() == {'test/accuracy', 'test/loss', 'test/examples'}
  assert got['test/examples'] == 360
  assert got['test/accuracy'] == correct / 360
  # float32 losses of around 3, each good to 1e-6.
  assert got['test/loss'] == pytest.approx(loss / 360, rel=1e-5)


def test_few_examples_in_a_large_batch(setup):
  source = sources.subset(setup[2], [5])
  got = run(setup, 16, 8, source)
  assert got['test/examples'] == 1
  assert got['test/accuracy'] in (0, 1)


def test_sums_of_many_batches_lose_no_digit():
  """A float32 sum of examples would stop growing at 2^24."""
  n = 2**24

  def sums_of(*batches):
    parts = mock.Mock()
    parts.passes.return_value = lambda: batches
    parts.compiled.return_value = lambda params, batch: batch
    evaluator = MeanEvaluator(parts, 'val', ConfigDict({'split': 'val'}))
    return evaluator.run({})

  batch = {name: np.float32(1) for name in ('accuracy', 'loss')}
  found = sums_of(*[batch | {'examples': np.float32(n)}] * 3)
  sums = {'val/examples': 3.0 * n, 'val/accuracy': 1 / n, 'val/loss': 1 / n}
  assert found == sums
  one_more = sums_of({'examples': np.float32(n)}, {'examples': np.float32(1)})
  assert float(one_more['val/examples']) == n + 1
