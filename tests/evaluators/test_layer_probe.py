"""What is said and drawn of probes on every layer."""

import numpy as np

from tests.evaluators.small import SIZE, model_of
from vit_jax.evaluators import layer_probe
from vit_jax.evaluators.fewshot_curves import ProbeResult


def probes(count):
  """Results of so many blocks and the head, the last block the best."""
  names = [*(f'block_{i}' for i in range(count)), 'pre_logits']
  return {
    name: ProbeResult(2.0, 0.9 - 0.01 * abs(i + 1 - count))
    for i, name in enumerate(names)
  }


def test_the_table_and_the_file_have_every_layer_and_the_best():
  found = probes(2)
  assert layer_probe.table(found).splitlines() == [
    'block_0      89.00%',
    'block_1      90.00%  best',
    'pre_logits   89.00%',
  ]
  assert layer_probe.csv_text(found) == (
    'layer,l2,accuracy\nblock_0,2.0,0.89\nblock_1,2.0,0.9\npre_logits,2.0,0.89\n'
  )


def test_what_every_layer_gives_comes_apart_by_their_names():
  """Also where they differ in width."""
  model, params = model_of(
    4, depth=2, representation_size=5, pool='gap', patch_size=2
  )
  assert layer_probe.names(model) == ['block_0', 'block_1', 'pre_logits']
  images = np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 3))
  images = images.astype(np.float32)
  x_NX = np.asarray(layer_probe.every_layer(model)(params, images))
  found = layer_probe.split(model, params, SIZE, x_NX)
  _, aux = model.apply({'params': params}, images, capture=('blocks',))
  want = {f'block_{i}': aux['blocks'][i].mean(1) for i in range(2)}
  want['pre_logits'] = aux['pre_logits']
  assert [*found] == [*want]
  for name, x in want.items():
    np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5)
  assert found['pre_logits'].shape == (3, 5)
