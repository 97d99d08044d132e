"""Every example counts once, whatever the batches."""

import jax
import numpy as np
import pytest

from tests.evaluators.small import SIZE, mesh_of, model_of
from vit_jax.data import loader, sources, transforms
from vit_jax.data.images import Images
from vit_jax.evaluators.mean import MeanEvaluator
from vit_jax.objectives.classification import Classification
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
  return model, params, source, transform, correct, loss


def run(setup, batch_size, devices, source=None):
  model, params, whole, transform, _, _ = setup
  source = source or whole
  mesh = mesh_of(devices)
  objective = Classification(model, Images(SIZE))

  def batches():
    for batch in loader.eval_batches(source, transform, batch_size=batch_size):
      yield sharding.global_batch(batch, mesh)

  evaluate = jax.jit(
    objective.evaluate, out_shardings=sharding.replicated(mesh)
  )
  params = jax.device_put(params, sharding.replicated(mesh))
  evaluator = MeanEvaluator(
    'test', lambda params, batch: evaluate(params, {}, batch), batches
  )
  first = evaluator.run(params)
  assert evaluator.run(params) == first  # a pass can be made again
  return first


# 360 test digits: batches that fit, that leave a rest, that are too large.
@pytest.mark.parametrize(
  ('batch_size', 'devices'), [(40, 8), (56, 8), (7, 1), (1000, 8)]
)
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

  def evaluate(params, batch):
    del params, batch
    return {
      'examples': np.float32(n),
      'accuracy': np.float32(1),
      'loss': np.float32(1),
    }

  evaluator = MeanEvaluator('val', evaluate, lambda: [{}] * 3)
  sums = {'val/examples': 3.0 * n, 'val/accuracy': 1 / n, 'val/loss': 1 / n}
  assert evaluator.run({}) == sums
  one_more = MeanEvaluator(
    'val',
    lambda params, batch: {
      'examples': np.float32(batch['n']),
      'accuracy': np.float32(0),
      'loss': np.float32(0),
    },
    lambda: [{'n': n}, {'n': 1}],
  )
  assert float(one_more.run({})['val/examples']) == n + 1
