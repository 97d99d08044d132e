"""Published checkpoints agree with their files and with timm."""

import importlib.util
import pathlib
import re

import pytest

from tests.conftest import PEERS
from vit_jax.checkpoints.catalogue import PUBLISHED
from vit_jax.models import flops, variants


def test_at_224_pixels_augregs_are_those_that_timm_names():
  found = importlib.util.find_spec('timm')
  if found is None:
    pytest.skip(PEERS)
  (folder,) = found.submodule_search_locations
  texts = [
    pathlib.Path(folder, 'models', f'{name}.py').read_text()
    for name in ('vision_transformer', 'vision_transformer_hybrid')
  ]
  url = r"'https://storage.googleapis.com/(vit_models/augreg/[^']*)'"
  named = {f'gs://{name}' for text in texts for name in re.findall(url, text)}
  ours = {
    entry.address
    for name, entry in PUBLISHED.items()
    if name.startswith('augreg/') and name.endswith('-224')
  }
  assert ours == {x for x in named if '-i21k-' in x and '-res_224' in x}
  # The only one without a file at another size.
  assert PUBLISHED['augreg/b8'].address in named


SIZED = [name for name, entry in PUBLISHED.items() if entry.size_mib]


@pytest.mark.parametrize('name', SIZED)
def test_published_sizes_are_those_of_the_parameters(name):
  """Four bytes a parameter, with the 21,843 classes of ImageNet-21k."""
  entry = PUBLISHED[name]
  size = (entry.image_size, entry.image_size)
  model = variants.build(
    num_classes=21_843, image_size=size, **variants.fields(entry.model)
  )
  mib = 4 * flops.count_params(model, size) / 2**20
  # The table has whole MiB; the archive adds some kB.
  assert entry.size_mib == pytest.approx(mib, abs=1)


def test_every_model_is_known():
  for entry in PUBLISHED.values():
    assert variants.fields(entry.model)
