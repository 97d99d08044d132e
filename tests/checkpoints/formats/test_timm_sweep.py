"""Every ViT that timm names gives its outputs here, or is refused.

Each model is built narrow and with one layer. Its name still decides the kind
of layers, tokens, norms, pooling and positions. Of the models that are then
alike, such as those of two sizes, one is read.
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


def narrow(timm, torch, name):
  """Returns a narrow model of a name with random parameters, or None."""
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
  return model


def structure(model):
  """Returns the modules of a model, their settings and the arrays' shapes."""
  settings = [
    (name, type(part), key, x)
    for name, part in model.named_modules()
    for key, x in vars(part).items()
    if isinstance(x, bool | int | float | str | tuple | None) or callable(x)
  ]
  shapes = {name: x.shape for name, x in model.state_dict().items()}
  return repr((settings, shapes))


def outcome(timm, torch, name, model, folder, any_folder):
  """Returns the relative difference of logits, or None where refused.

  Returns infinity if `model` is None and vit_jax opens the arrays anyway.
  """
  if model:
    timm.models.save_for_hf(model, folder, safe_serialization=True)
  else:
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
  found, alike = {}, {}
  for name in names:
    model = narrow(timm, torch, name)
    key = structure(model) if model else name
    if key not in alike:
      folder = tmp_path / name
      alike[key] = outcome(timm, torch, name, model, folder, any_folder)
      shutil.rmtree(folder)
    found[name] = alike[key]
  wrong = {k: x for k, x in found.items() if x and not x < TOLERANCE}
  refused = sorted(name for name, x in found.items() if x is None)
  print(json.dumps(refused), wrong)
  print(f'{len(found) - len(refused)} read, {len(refused)} refused')
  print(f'{len(alike)} of them differ')
  assert not wrong
  # Whatever timm adds, the names that vit_jax reads today stay.
  assert len(found) - len(refused) >= READ
