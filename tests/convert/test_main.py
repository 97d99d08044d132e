"""The command: whole conversions, checks, and what it refuses."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.checkpoints.random_weights import logits_of, random_checkpoint
from tests.conftest import PEERS
from vit_jax.checkpoints import opening
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.convert import __main__ as cli
from vit_jax.convert import check, orbax

VIT = {'patch_size': 8, 'width': 32, 'depth': 2, 'mlp_dim': 48, 'heads': 4}
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

SIZE = (32, 32)


@pytest.fixture
def run(capsys):
  """Gives a function that runs the command in this process."""

  def run(*args):
    capsys.readouterr()
    try:
      status = cli.main([str(arg) for arg in args])
    except SystemExit as e:
      status = e.code
    return status, *capsys.readouterr()

  return run


def workdir_of(path, **fields):
  checkpoint = random_checkpoint(None, SIZE, **VIT | fields)
  orbax.write(checkpoint, str(path), 'float32')
  return path


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  return workdir_of(tmp_path_factory.mktemp('workdirs') / 'vit')


def files_in(folder):
  return sorted(path.name for path in folder.iterdir())


def test_what_a_format_has_no_task_for_keeps_its_body(run, tmp_path):
  fields = {'name': 'masked_vit', 'num_classes': 0, 'pool': 'gap'}
  masked = workdir_of(tmp_path / 'masked', **fields)
  status, _, err = run(masked, tmp_path / 'x', '--to=npz')
  assert status == 2
  assert 'is a MaskedViT' in err and '--head=drop' in err
  assert err.count('\n') == 1
  assert files_in(tmp_path) == ['masked']
  status, _, err = run(masked, tmp_path / 'x', '--to=npz', '--head=drop')
  assert status == 0, err
  ours = opening.open_checkpoint(str(masked)).params
  body = opening.open_checkpoint(str(tmp_path / 'x'))
  assert body.model.kind == 'vit'
  assert {*ours} - {*body.params} == {'mask_embedding', 'prediction'}


@pytest.mark.fast('bigvision')
@pytest.mark.parametrize('to', ['bigvision', 'onnx', 'stablehlo', 'orbax'])
def test_a_workdir_converts_and_the_check_agrees(run, workdir, tmp_path, to):
  if to == 'onnx':
    for library in ('onnxruntime', 'onnx'):
      pytest.importorskip(library, reason=PEERS)
  target = tmp_path / ('model.onnx' if to == 'onnx' else 'model')
  status, out, err = run(workdir, target, f'--to={to}')
  assert (status, err) == (0, '')
  assert '32x32 pixels, 7 classes with names' in out
  assert f'written   {target}: {to}, float32' in out
  lost = 'class names' in out.partition('note')[2]
  assert lost == (to == 'bigvision')
  assert files_in(tmp_path) == [target.name]

  status, out, _ = run('--check', workdir, target)
  assert status == 0
  assert 'within the tolerance' in out and 'the same for 8 of 8' in out
  assert ('onnxruntime' if to == 'onnx' else 'jax') in out.lower()


@pytest.mark.fast('npz', 'hf')
@pytest.mark.parametrize('to', ['npz', 'hf', 'stablehlo'])
def test_the_loss_is_kept_or_said_to_be_lost(run, workdir, tmp_path, to):
  """Without it, softmax would be read into the logits."""
  checkpoint = opening.open_checkpoint(str(workdir))
  sigmoid = dataclasses.replace(checkpoint, loss='sigmoid')
  orbax.write(sigmoid, str(tmp_path / 'sigmoid'), 'float32')
  _, out, _ = run(tmp_path / 'sigmoid', tmp_path / 'x', f'--to={to}')
  assert ('loss was sigmoid' in out) == (to == 'npz')
  if to == 'hf':
    assert opening.open_checkpoint(str(tmp_path / 'x')).loss == 'sigmoid'
  elif to == 'stablehlo':
    meta = json.loads((tmp_path / 'x' / 'model.json').read_text())
    assert meta['loss'] == 'sigmoid'
  _, out, _ = run(workdir, tmp_path / 'y', f'--to={to}')
  assert 'written' in out and 'sigmoid' not in out


def test_the_loss_that_a_file_does_not_say_may_be_given(run, workdir, tmp_path):
  run(workdir, tmp_path / 'x.npz', '--to=npz')
  for given, loss in (([], 'softmax'), (['--loss=sigmoid'], 'sigmoid')):
    status, _, _ = run(
      tmp_path / 'x.npz', tmp_path / loss, '--to=orbax', *given
    )
    assert status == 0
    assert opening.open_checkpoint(str(tmp_path / loss)).loss == loss
  # Without a head there are no logits that it would be of.
  _, out, _ = run(
    tmp_path / 'sigmoid', tmp_path / 'body.npz', '--to=npz', '--head=drop'
  )
  assert 'written' in out and 'sigmoid:' not in out
  # One that a workdir says may be taken back.
  args = tmp_path / 'sigmoid', tmp_path / 'back', '--to=orbax'
  assert run(*args, '--loss=softmax')[0] == 0
  assert opening.open_checkpoint(str(tmp_path / 'back')).loss == 'softmax'


def test_our_own_format_changes_nothing(workdir, tmp_path):
  before = opening.open_checkpoint(str(workdir))
  before = dataclasses.replace(
    before,
    preprocessing=Preprocessing(
      40, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 'bicubic'
    ),
  )
  orbax.write(before, str(tmp_path / 'copy'), 'float32')
  after = opening.open_checkpoint(str(tmp_path / 'copy'))
  for field in ('model', 'image_size', 'preprocessing', 'class_names'):
    assert getattr(after, field) == getattr(before, field)
  place = tmp_path / 'copy/checkpoints/0/meta/metadata'
  config = json.loads(place.read_text())['meta']['config']
  assert config['data']['image_size'] == '32x32'
  assert config['model']['width'] == 32
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_a_head_of_zeros_agrees_with_any_and_is_no_check(
  run, workdir, tmp_path
):
  """As ImageNet-21k's published heads, and new ones, whatever the body."""
  checkpoint = opening.open_checkpoint(str(workdir))
  for name, shift in (('one', 0.0), ('other', 1.0)):
    params = jax.tree.map(lambda x, shift=shift: x + shift, checkpoint.params)
    params |= {'head': jax.tree.map(np.zeros_like, params['head'])}
    zeroed = dataclasses.replace(checkpoint, params=params)
    orbax.write(zeroed, str(tmp_path / name), 'float32')
  status, _, err = run('--check', tmp_path / 'one', tmp_path / 'other')
  assert status == 2
  assert 'same output for all images' in err and '--head=drop' in err


def test_a_changed_weight_fails_the_check(run, workdir, tmp_path):
  whole, changed = tmp_path / 'whole.npz', tmp_path / 'changed.npz'
  assert run(workdir, whole, '--to=npz')[0] == 0
  arrays = dict(np.load(whole))
  arrays['head/kernel'] = arrays['head/kernel'] + np.float32(0.01)
  np.savez(changed, **arrays)
  status, out, _ = run('--check', whole, changed)
  assert status == 1
  assert 'ABOVE the tolerance of 0.0001' in out
  status, out, _ = run('--check', whole, changed, '--tolerance=1')
  assert status == 0


@pytest.mark.slow
def test_a_program_as_source_keeps_its_image_size(run, workdir, tmp_path):
  program, large = tmp_path / 'program', tmp_path / 'large'
  assert run(workdir, program, '--to=stablehlo')[0] == 0
  assert run(workdir, large, '--to=orbax', '--image_size=64')[0] == 0
  status, _, err = run('--check', program, large)
  assert status == 2
  assert f'{program} takes images of 32x32' in err
  assert '--image_size=64x64' in err
  # A checkpoint as source is resized.
  assert run('--check', large, program, '--tolerance=9')[0] == 0


@pytest.mark.slow
def test_differences_are_of_the_largest_output(run, workdir, tmp_path):
  """And top-1 is of the largest logit, whatever the smallest is."""
  files = whole, near, other = [tmp_path / f'{x}.npz' for x in 'abc']
  assert run(workdir, whole, '--to=npz')[0] == 0
  arrays = dict(np.load(whole))
  for path, shift, least in zip(files, (0, 0.01, 0), (1, 1, 2), strict=True):
    bias = arrays['head/bias'] + np.float32(shift)
    bias[0] += 1000
    bias[least] -= 900
    np.savez(path, **arrays | {'head/bias': bias})
  status, out, _ = run('--check', whole, near)
  assert status == 0 and 'difference  1.0e-05 of the largest' in out
  status, out, _ = run('--check', whole, other)
  assert status == 1 and 'top-1       the same for 8 of 8' in out


@pytest.mark.parametrize(
  ('option', 'valid'), [('to', 'npz'), ('head', 'drop'), ('loss', 'sigmoid')]
)
def test_python_refuses_an_option_before_it_opens_the_checkpoint(
  tmp_path, option, valid
):
  with pytest.raises(ValueError, match=f"{option} is 'other'.*'{valid}'"):
    vit_jax.convert(tmp_path / 'missing', tmp_path / 'new', **{option: 'other'})


def test_what_cannot_be_is_refused_and_nothing_is_written(
  run, workdir, tmp_path
):
  there = tmp_path / 'there'
  there.write_text('mine')
  new = tmp_path / 'new'
  relative = workdir_of(tmp_path / 'relative', posemb='relative')
  before = files_in(tmp_path)
  for args, message in [
    ((workdir, there, '--to=npz'), f'{there} exists already: remove it'),
    ((workdir, tmp_path / 'a/b', '--to=npz'), f'the folder {tmp_path}/a is'),
    ((tmp_path / 'nowhere', new, '--to=npz'), 'No checkpoint at'),
    (
      (workdir, new, '--to=npz', '--dtype=int8'),
      '--to=npz does not support --dtype=int8',
    ),
    ((workdir, new, '--to=npz', '--rollout'), '--rollout needs --to=onnx'),
    ((workdir, new, '--to=npz', '--opset=20'), '--opset needs --to=onnx'),
    ((workdir, new, '--to=npz', '--image_size=x'), "image_size is 'x'"),
    ((workdir, new, '--to=npz', '--image_size=33'), 'do not tile an image'),
    ((workdir, new, '--to=npz', '--head=representation'), 'no representation'),
    ((relative, new, '--to=npz'), "posemb 'relative'"),
  ]:
    status, _, err = run(*args)
    assert status == 2, args
    assert err.startswith('error: ') and err.count('\n') == 1, err
    assert message in err, err
  assert files_in(tmp_path) == before
  assert there.read_text() == 'mine'


def test_the_check_computes_in_float32_what_was_trained_in_less(tmp_path):
  """A difference of bfloat16's would hide one of the conversion's."""
  path = workdir_of(tmp_path / 'half', dtype='bfloat16')
  checkpoint = opening.open_checkpoint(str(path))
  images = np.random.default_rng(0).integers(0, 256, (2, *SIZE, 3), np.uint8)
  got = check.open_peer(str(path)).run(images)
  exact = dataclasses.replace(
    checkpoint, model=checkpoint.model.clone(dtype=jnp.float32)
  )
  want = logits_of(exact, images)
  assert np.abs(want - logits_of(checkpoint, images)).max() > 1e-4
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_board_is_a_folder_that_serves(run, workdir, tmp_path):
  """Its server needs only the packages that its requirements.txt lists."""
  for name in ('onnx', 'onnxruntime', 'uvicorn', 'starlette'):
    pytest.importorskip(name, reason=PEERS)
  status, _, err = run(workdir, tmp_path / 'board', '--to=board')
  assert status == 0, err
  (model,) = (tmp_path / 'board' / 'models').glob('*.onnx')
  start = (
    'import sys; sys.path.insert(0, "")\n'
    'for name in ("etils", "flax", "jax", "clu"): sys.modules[name] = None\n'
    'import serve, vit_jax.tools.serve.decoder; print(vit_jax.__file__)'
  )
  found = subprocess.run(
    [sys.executable, '-c', start],
    cwd=tmp_path / 'board',
    capture_output=True,
    text=True,
  )
  assert found.stdout.strip() == str(tmp_path / 'board/vit_jax/__init__.py'), (
    found.stderr
  )
  status, said, err = run('--check', workdir, model)
  assert status == 0, err
  assert 'onnxruntime' in said
