"""transformers' ImageGPT: theirs here, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoints.random_weights import random_checkpoint
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats import hf, npz, timm
from vit_jax.projects.igpt import model as igpt

SIZE = (4, 6)
FIELDS = {
  'name': 'igpt',
  'width': 16,
  'depth': 2,
  'mlp_dim': 24,
  'heads': 4,
  'palette': igpt.even_palette(2),
}
ONE = np.ones(1, np.float32)
# Of the largest output, float32 on both sides.
TOLERANCE = 1e-5


def make(size=SIZE, **fields):
  fields = {'num_classes': 0, 'names': False} | FIELDS | fields
  return random_checkpoint(None, size, **fields)


def images(size=SIZE):
  rng = np.random.default_rng(0)
  return rng.integers(0, 256, (3, *size, 3), np.uint8)


def assert_close(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert got.shape == want.shape
  assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


def write(checkpoint, folder):
  hf.write(checkpoint.weights(), str(folder), 'float32')


@pytest.mark.parametrize('bias', [False, True])
def test_a_directory_has_every_array_of_the_model(tmp_path, bias):
  checkpoint = make(bias=bias)
  write(checkpoint, tmp_path / 'x')
  back = opening.open_checkpoint(str(tmp_path / 'x'))
  assert back.model == checkpoint.model
  want, got = checkpoint.weights().arrays, back.weights().arrays
  assert got.keys() == want.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(got[key], x, err_msg=key)


def test_theirs_gives_its_numbers_here(tmp_path, torch, transformers):
  """All biases included, and a processor with a palette of its own."""
  config = transformers.ImageGPTConfig(
    vocab_size=12, n_positions=25, n_embd=16, n_layer=2, n_head=2, n_inner=40
  )
  torch.manual_seed(0)
  model = transformers.ImageGPTForCausalImageModeling(config).eval()
  with torch.no_grad():
    for x in model.parameters():
      x.add_(0.2 * torch.randn_like(x))
  model.save_pretrained(tmp_path)
  rng = np.random.default_rng(1)
  processor = transformers.ImageGPTImageProcessor(
    clusters=rng.uniform(-1, 1, (11, 3)), size={'height': 5, 'width': 5}
  )
  processor.save_pretrained(tmp_path)
  checkpoint = opening.open_checkpoint(str(tmp_path))
  assert checkpoint.image_size == (5, 5)
  pixels = images((5, 5))
  found = processor(list(pixels), do_resize=False, return_tensors='pt')
  colours = found['input_ids']
  normal = checkpoint.normalize(pixels)
  np.testing.assert_array_equal(checkpoint.model.quantised(normal), colours)
  start = torch.full((3, 1), 11)
  with torch.inference_mode():
    want = model(torch.cat([start, colours[:, :-1]], 1)).logits
  _, aux = checkpoint.model.apply(
    {'params': checkpoint.params}, normal, capture=('pixels',)
  )
  assert_close(aux['pixels'], want)


def test_transformers_runs_what_is_written(tmp_path, torch, transformers):
  checkpoint = make((5, 5))
  write(checkpoint, tmp_path / 'x')
  path = str(tmp_path / 'x')
  model, report = transformers.ImageGPTForCausalImageModeling.from_pretrained(
    path, output_loading_info=True
  )
  assert not any(report.values())
  processor = transformers.AutoImageProcessor.from_pretrained(path)
  pixels = images((5, 5))
  colours = processor(list(pixels), do_resize=False, return_tensors='pt')
  start = torch.full((3, 1), len(checkpoint.model.colours_KC))
  tokens = torch.cat([start, colours['input_ids'][:, :-1]], 1)
  with torch.inference_mode():
    want = model.eval()(tokens).logits
  _, aux = checkpoint.model.apply(
    {'params': checkpoint.params},
    checkpoint.normalize(pixels),
    capture=('pixels',),
  )
  assert_close(aux['pixels'], want)


@pytest.fixture
def folder(tmp_path):
  write(make(), tmp_path / 'x')
  return tmp_path / 'x'


@pytest.mark.edge
@pytest.mark.parametrize(
  ('file', 'change', 'message'),
  [
    (
      'preprocessor_config.json',
      {'clusters': [[0, 0, 0]] * 5},
      r'of 8 colours, and it has the shape \(5, 3\)',
    ),
    ('preprocessor_config.json', {'clusters': None}, 'has no valid palette'),
    ('config.json', {'activation_function': 'gelu'}, 'quick_gelu'),
  ],
)
def test_what_is_no_model_here_is_refused(folder, file, change, message):
  config = json.loads((folder / file).read_text())
  (folder / file).write_text(json.dumps(config | change))
  with pytest.raises(ValueError, match=message):
    opening.open_checkpoint(str(folder))


@pytest.mark.parametrize(
  ('prefix', 'dtype', 'is_torch'),
  [('transformer.', np.uint8, False), ('', bool, True)],
)
def test_masks_that_older_versions_saved_are_passed_over(
  folder, prefix, dtype, is_torch, request
):
  """Nor need there be the number of heads, eight then, or a prefix."""
  want = make().weights().arrays
  place = folder / 'config.json'
  config = json.loads(place.read_text())
  del config['n_head']
  place.write_text(json.dumps(config))
  place = folder / 'model.safetensors'
  stored = load_file(place)
  arrays = {k.replace('transformer.', prefix): x for k, x in stored.items()}
  masks = {'bias': np.ones((1, 1, 24, 24), dtype), 'masked_bias': -1e4 * ONE}
  arrays |= {f'{prefix}h.1.attn.{name}': x for name, x in masks.items()}
  if is_torch:
    torch = request.getfixturevalue('torch')
    place.unlink()
    tensors = {key: torch.from_numpy(x) for key, x in arrays.items()}
    torch.save(tensors, folder / 'pytorch_model.bin')
  else:
    save_file(arrays, place)
  found = opening.open_checkpoint(str(folder))
  assert found.model.heads == 8
  got = found.weights().arrays
  assert got.keys() == want.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(got[key].ravel(), x.ravel(), err_msg=key)


@pytest.mark.parametrize(
  ('stated', 'size'),
  [
    ({'height': 2, 'width': 8}, (2, 8)),
    ({'height': 4, 'width': 6}, (4, 4)),
    ({'shortest_edge': 16}, (4, 4)),
  ],
)
def test_the_size_is_that_of_the_processor_where_it_fits(
  tmp_path, stated, size, caplog
):
  write(make((4, 4)), tmp_path / 'x')
  place = tmp_path / 'x/preprocessor_config.json'
  images = json.loads(place.read_text()) | {'size': stated}
  place.write_text(json.dumps(images))
  assert opening.open_checkpoint(str(tmp_path / 'x')).image_size == size
  assert ('the model takes (4, 4)' in caplog.text) == (size == (4, 4))


@pytest.mark.edge
@pytest.mark.parametrize('module', [npz, timm])
def test_other_formats_have_no_igpt(module, tmp_path):
  with pytest.raises(ValueError, match="name 'igpt'"):
    module.write(make().weights(), str(tmp_path / 'x.npz'), 'float32')
