"""A trained workdir classifies the same images alike in every framework."""

import importlib.util

import numpy as np
import pytest

from tests.checkpoints import hf_peer, timm_peer
from tests.test_digits import final_metrics
from vit_jax.checkpoints import opening
from vit_jax.convert import __main__ as cli
from vit_jax.convert import check
from vit_jax.data import sources, transforms

pytestmark = pytest.mark.slow

LIBRARIES = {
  'npz': 'jax',
  'timm': 'timm',
  'hf': 'transformers',
  'onnx': 'onnxruntime',
  'stablehlo': 'jax',
}


def test_digits_are_classified_alike_to_the_image(tmp_path, request):
  workdir = tmp_path / 'digits'
  final_metrics(
    workdir,
    'configs/digits.py',
    '--config.total=5 epochs',
    '--config.eval_every=100%',
  )
  checkpoint = opening.open_checkpoint(str(workdir))
  source = sources.open_source('digits', 'test')
  transform = transforms.EvalTransform(checkpoint.image_size)
  batch = [transform(source[i]) for i in range(len(source))]
  images = np.stack([example['image'] for example in batch])
  labels = np.array([example['label'] for example in batch])
  want = check.open_peer(str(workdir)).run(images)
  accuracy = np.mean(want.argmax(-1) == labels)
  # Far from chance and from certainty, where agreement would mean little.
  assert 0.5 < accuracy < 1
  atol = 1e-5 * np.abs(want).max()
  second_N, first_N = np.sort(want, axis=-1)[:, -2:].T
  sure_N = first_N - second_N > 2 * atol

  for to, library in LIBRARIES.items():
    if importlib.util.find_spec(library) is None:
      continue
    if to in ('timm', 'hf'):
      request.getfixturevalue('torch')
    target = str(tmp_path / ('digits.onnx' if to == 'onnx' else to))
    assert cli.main([str(workdir), target, f'--to={to}']) == 0
    peers = {'timm': timm_peer, 'hf': hf_peer}
    peer = peers.get(to, check).open_peer(target)
    got = peer.run(images)
    print(f'{peer.framework}: {np.mean(got.argmax(-1) == labels):.4f}')
    np.testing.assert_array_equal(
      got.argmax(-1)[sure_N], want.argmax(-1)[sure_N], to
    )
    np.testing.assert_allclose(got, want, atol=atol)
