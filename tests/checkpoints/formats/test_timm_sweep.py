"""All ViTs that timm has names for: read and right, or refused in one message.

Each is built narrow and of one layer, so that what its name alone decides is
what is tested: which layers, tokens, norms, pooling, positions.
"""

import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest

from tests.checkpoints.formats.timm_folder import Folder
from tests.checkpoints.random_weights import relative_difference
from vit_jax.checkpoints import opening

MODULES = (
  'beit',
  'deit',
  'eva',
  'naflexvit',
  'vision_transformer',
  'vision_transformer_hybrid',
  'vision_transformer_relpos',
  'vision_transformer_sam',
)
TOLERANCE = 1e-4
NARROW = {'depth': 1, 'embed_dim': 32, 'num_heads': 2, 'num_classes': 5}
# Their stems have a norm and an epsilon of their own: test_timm.py has them.
HYBRIDS = re.compile(r'vit_\w+_r\d*_s\d+_\w+')
READ = 130


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, images):
  return model.apply({'params': params}, images)[0]


def save(timm, torch, name, folder):
  """Saves a narrow model of a name, and returns it; None if there is none."""
  torch.manual_seed(0)
  args = NARROW | {'img_size': [64, 96]}
  if 'sapiens2' in name:
    args['num_kv_heads'] = 2  # for each of more layers
  if 'patch14' in name:
    args['img_size'] = [28, 42]
  if name.endswith('_mci_224'):
    # As wide as what is before it, of images that it divides.
    args = {'depth': 1, 'num_classes': 5}
  try:
    model = timm.create_model(name, **args).eval()
  except (AssertionError, RuntimeError, TypeError, ValueError):
    return None
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape)
  timm.models.save_for_hf(model, folder, safe_serialization=True)
  return model


def outcome(timm, torch, name, folder, any_folder):
  """Returns the relative difference of logits, or None where refused.

  Infinity where arrays of something else pass for a model of that name.
  """
  model = save(timm, torch, name, folder)
  if model is None:
    # Any arrays will do to be refused by name.
    shutil.copytree(any_folder, folder)
    place = folder / 'config.json'
    config = json.loads(place.read_text()) | {'architecture': name}
    place.write_text(json.dumps(config))
  try:
    ours = opening.open_checkpoint(str(folder))
  except ValueError as e:
    assert str(folder) in str(e) and '\n' not in str(e), name
    return None
  if model is None:
    return np.inf
  images = np.random.default_rng(0).normal(size=(2, *ours.image_size, 3))
  images = images.astype(np.float32)
  with torch.inference_mode():
    channels_first = torch.from_numpy(images.transpose(0, 3, 1, 2))
    want = model(channels_first.contiguous()).numpy()
  return relative_difference(apply(ours.model, ours.params, images), want)


@pytest.mark.slow
def test_every_name_is_right_or_refused(tmp_path, timm, torch):
  names, seen = [], set()
  for name in (x for m in MODULES for x in timm.list_models(module=m)):
    # The last number is that of pixels, and decides nothing else.
    if not HYBRIDS.fullmatch(name) and re.sub(r'_\d+$', '', name) not in seen:
      seen.add(re.sub(r'_\d+$', '', name))
      names.append(name)
  any_folder = tmp_path / 'any'
  Folder(any_folder)
  found = {}
  for name in names:
    folder = tmp_path / name
    found[name] = outcome(timm, torch, name, folder, any_folder)
    shutil.rmtree(folder)
  wrong = {k: x for k, x in found.items() if x and not x < TOLERANCE}
  refused = sorted(name for name, x in found.items() if x is None)
  print(json.dumps(refused), wrong)
  print(f'{len(found) - len(refused)} read, {len(refused)} refused')
  assert not wrong
  # What was read once is not lost, whatever timm adds.
  assert len(found) - len(refused) >= READ
