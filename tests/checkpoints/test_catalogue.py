"""What is said of a published checkpoint agrees with its file."""

import importlib.util
import math
import pathlib
import re

import jax
import pytest

from tests.conftest import PEERS
from vit_jax.checkpoints.catalogue import FAMILIES, PUBLISHED
from vit_jax.checkpoints.formats.recognise import WHAT_OPENS
from vit_jax.models import flops, variants

NAMES = {
  # The names are those of the files, which AugReg writes without ViT.
  'gs://vit_models': re.compile(
    r'(?P<stage>imagenet21k|imagenet21k\+imagenet2012|augreg)/'
    r'(?:R(?P<stem>\d*)[+_])?(?:ViT-)?(?P<size>[A-Z]i?)_(?P<patch>\d+)'
    r'(?P<rest>.*)\.npz'
  ),
  'gs://bit_models': re.compile(
    r'BiT-(?P<data>[SM])-R(?P<depth>\d+)x(?P<factor>\d)(?P<rest>.*)\.npz'
  ),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_the_address_says_what_the_entry_says(name):
  entry = PUBLISHED[name]
  family, _, rest = name.partition('/')
  assert family in FAMILIES
  bucket, pattern = next(
    item for item in NAMES.items() if entry.address.startswith(item[0])
  )
  match = pattern.fullmatch(entry.address.removeprefix(f'{bucket}/'))
  is_tuned = entry.data == 'ImageNet-21k, ImageNet'
  if family == 'bit':
    assert entry.model == f'r{match["depth"]}x{match["factor"]}'
    assert match['rest'] == ('-ILSVRC2012' if is_tuned else '')
    assert entry.image_size == (480 if is_tuned else 224)
    assert (match['data'] == 'S') == (entry.data == 'ImageNet')
    suffix = '-imagenet' if is_tuned else ''
    assert rest == f'{match["data"].lower()}-{entry.model}{suffix}'
    return
  stem = '' if match['stem'] is None else f'r{match["stem"]}+'
  assert entry.model == f'{stem}{match["size"].lower()}{match["patch"]}'
  assert is_tuned or entry.image_size == 224
  assert rest == f'{entry.model}{f"-{entry.image_size}" if is_tuned else ""}'
  if family == 'augreg':
    found = re.search('--imagenet2012-.*-res_(.*)$', match['rest'])
    assert bool(found) == is_tuned
    assert not found or int(found[1]) == entry.image_size
  else:
    assert ('imagenet2012' in match['stage']) == is_tuned
    assert (match['rest'] == '-224') == (is_tuned and entry.image_size == 224)


def test_all_of_big_transfers_resnets_but_one_are_there_of_imagenet_alone():
  """As its README lists them: R152x2 came after the paper, as BiT-M."""
  alone = [name for name in PUBLISHED if name.startswith('bit/s-')]
  assert alone == [
    f'bit/s-r{x}' for x in ('50x1', '50x3', '101x1', '101x3', '152x4')
  ]
  assert PUBLISHED['bit/m-r152x2'].data == 'ImageNet-21k'


def test_files_are_different_and_accuracies_have_a_source():
  addresses = [entry.address for entry in PUBLISHED.values()]
  assert len(set(addresses)) == len(addresses)
  for entry in PUBLISHED.values():
    assert (entry.accuracy is None) == (not entry.accuracy_from)
    assert not entry.accuracy or entry.data == 'ImageNet-21k, ImageNet'


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
  # Which is the only one that has no other file.
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
  shapes = jax.tree.leaves(flops.param_shapes(model, size))
  mib = 4 * sum(math.prod(x.shape) for x in shapes) / 2**20
  # Of the table, whole MiB; the archive adds some kB.
  assert entry.size_mib == pytest.approx(mib, abs=1)


def test_help_names_one_of_them():
  (name,) = re.findall(r'by name (\S+)', WHAT_OPENS)
  assert name in PUBLISHED


def test_sizes_were_compared():
  assert len(SIZED) == 9


@pytest.mark.parametrize('model', sorted({e.model for e in PUBLISHED.values()}))
def test_every_model_can_be_built(model):
  assert variants.fields(model)
