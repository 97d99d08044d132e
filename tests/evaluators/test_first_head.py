"""The first head of fine-tuning is the optimum of the loss of training."""

import jax
import numpy as np
import pytest

from tests.evaluators.small import mesh_of, model_of, parts_of
from vit_jax.data import sources
from vit_jax.evaluators import first_head


@pytest.mark.parametrize(
  'loss, probabilities',
  [('softmax', jax.nn.softmax), ('sigmoid', jax.nn.sigmoid)],
)
def test_mean_probabilities_are_the_shares_of_the_classes(loss, probabilities):
  """At the optimum, the gradient of the unpenalised bias is zero."""
  source = sources.open_source('digits', 'train[:300]')
  x = np.stack([source[i]['image'][::2, ::2, 0] for i in range(len(source))])
  x = x.reshape(len(x), -1).astype(np.float32)
  parts = parts_of(source, lambda *_: x, tuple(map(str, range(10))))
  parts.config.loss.name, parts.mesh = loss, mesh_of(1)
  _, params = model_of(10)
  head = first_head.fitted(parts, params, source)['head']
  mean = probabilities(x @ head['kernel'] + head['bias'][None]).mean(0)
  share = np.bincount(source.labels()) / len(source)
  np.testing.assert_allclose(mean, share, atol=1e-3)


def test_a_head_after_a_tanh_and_wrong_labels_are_refused():
  source = sources.open_source('digits', 'train[:20]')
  parts = parts_of(source, None, tuple(map(str, range(10))))
  _, params = model_of(10, representation_size=8)
  with pytest.raises(ValueError, match='has no linear head'):
    first_head.fitted(parts, params, source)
  parts.config.data.wrong_labels = 0.1
  with pytest.raises(ValueError, match='data.wrong_labels changes labels'):
    first_head.fitted(parts, params, source)
