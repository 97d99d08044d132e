"""Few-shot evaluation as a command: figures, files, refusals, processes."""

import csv
import dataclasses
import importlib
import io
import os
import re
import socket
import subprocess
import sys

import jax
import matplotlib.image
import numpy as np
import pytest
from PIL import Image
from sklearn import linear_model, preprocessing
from tqdm import tqdm

from tests.conftest import ROOT
from vit_jax.checkpoints import opening, transfer
from vit_jax.data import benchmarks, cores, sources, transforms
from vit_jax.evaluators import shots as protocol
from vit_jax.training import features

fewshot = importlib.import_module('vit_jax.fewshot')


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  """No test reads or writes the cache of the user."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
  """Runs the command in this process: status, output, messages.

  Results are in `tmp_path/out` unless said otherwise.
  """

  def unseen(*args, **kwargs):
    """A progress bar, which may or may not take long enough to appear."""
    return tqdm(*args, **(kwargs | {'file': io.StringIO()}))

  monkeypatch.setattr(cores, 'tqdm', unseen)

  def run(checkpoint, dataset, *args):
    capsys.readouterr()
    try:
      status = fewshot.main(
        [str(checkpoint), dataset, f'--output={tmp_path}/out', *args]
      )
    except SystemExit as e:
      status = e.code
    return status, *capsys.readouterr()

  return run


FEW = ('--shots=1,3', '--seeds=2')


def rows_of(folder):
  text = (folder / 'fewshot.csv').read_text()
  return list(csv.DictReader(io.StringIO(text)))


def one_by_one(checkpoint, source):
  """The pre-logits of all images, by a plain loop."""
  transform = transforms.EvalTransform(checkpoint.image_size)
  run = jax.jit(
    lambda x: checkpoint.model.apply({'params': checkpoint.params}, x)[1]
  )
  images = (transform(source[i])['image'] for i in range(len(source)))
  return np.concatenate(
    [
      run((image[None] - np.float32(127.5)) / np.float32(127.5))['pre_logits']
      for image in images
    ]
  )


def run_counts(monkeypatch):
  """Returns a list that receives how many images the model is run on."""
  counts = []
  extract = features.Extractor.__call__

  def counted(self, params, source, description=''):
    counts.append(len(source))
    return extract(self, params, source, description)

  monkeypatch.setattr(features.Extractor, '__call__', counted)
  return counts


@pytest.mark.slow
def test_figures_are_those_of_features_by_hand(
  command, workdir, tmp_path, monkeypatch
):
  """The probe is compared with scikit-learn's at the same penalty."""
  counts = run_counts(monkeypatch)
  status, out, err = command(
    workdir, 'digits', '--l2=fixed', '--shots=1,5', '--seeds=3', '--probe'
  )
  assert (status, err) == (0, '')
  assert counts == [1437, 360]
  checkpoint = opening.open_checkpoint(str(workdir))
  train, test = (sources.open_source('digits', x) for x in ('train', 'test'))
  train_ND, test_MD = (one_by_one(checkpoint, x) for x in (train, test))
  drawn = protocol.Shots(
    train.labels(),
    test.labels(),
    train.class_names,
    shots=(1, 5),
    seeds=3,
    l2='fixed',
  )
  want = drawn.evaluate(train_ND[drawn.rows_R], test_MD)
  *rows, last = rows_of(tmp_path / 'out')
  assert [(int(r['shots']), int(r['seed'])) for r in rows] == [
    (k, seed) for k in (1, 5) for seed in range(3)
  ]
  by_draw = {(r.shots, r.seed): r.accuracy for r in want}
  for row in rows:
    # The last bits of features may decide about an image in a tie.
    assert float(row['accuracy']) == pytest.approx(
      by_draw[int(row['shots']), int(row['seed'])], abs=1.5 / 360
    )
    assert float(row['l2']) == 1024
  of_5 = [100 * float(r['accuracy']) for r in rows if r['shots'] == '5']
  assert f'    5  {np.mean(of_5):.2f} ± {np.std(of_5, ddof=1):.2f}' in out
  assert np.mean(of_5) > 25  # and not the 10 of a guess

  assert (last['shots'], last['seed']) == ('all', '')
  accuracy, l2 = float(last['accuracy']), float(last['l2'])
  assert 'not converged' not in out + err
  assert f'  all  {100 * accuracy:.2f} ' in out
  scaler = preprocessing.StandardScaler().fit(train_ND)
  model = linear_model.LogisticRegression(
    C=1 / (1437 * l2), max_iter=5000, tol=1e-6
  ).fit(scaler.transform(train_ND), train.labels())
  probed = model.score(scaler.transform(test_MD), test.labels())
  # Two of 360 images may lie on a border.
  assert accuracy == pytest.approx(probed, abs=2.5 / 360)
  assert probed > max(float(r['accuracy']) for r in rows)


@pytest.mark.slow
def test_only_the_images_that_are_needed_are_run(command, workdir, monkeypatch):
  counts = run_counts(monkeypatch)
  assert command(workdir, 'digits', '--shots=3', '--seeds=1')[0] == 0
  assert counts == [30, 360]


@pytest.mark.slow
def test_splits_and_seeds_of_the_data_are_taken(command, workdir, monkeypatch):
  usual = benchmarks.Benchmark(
    *('digits', 'Digits', 10, '', '', (575, 180, 0, 0), 500),
    *('train[:40%]', 'test[:50%]', (0.1,)),
  )
  monkeypatch.setitem(benchmarks.BENCHMARKS, 'digits', usual)
  _, out, _ = command(workdir, 'digits', *FEW)
  assert '575 images of train[:40%], 180 of test[:50%]\n' in out
  _, out, _ = command(workdir, 'digits', *FEW, '--test_split=test')
  assert '575 images of train[:40%], 360 of test\n' in out


def test_images_are_brought_to_the_model_as_the_checkpoint_says(
  command, workdir, monkeypatch
):
  opened = opening.open_checkpoint

  def changed(path):
    checkpoint = opened(path)
    ways = dataclasses.replace(
      checkpoint.preprocessing,
      resize_small=10,
      interpolation='bicubic',
      mean=(0.48145466, 0.5, 0.5),
      std=(0.1, 0.2, 0.3),
    )
    return dataclasses.replace(checkpoint, preprocessing=ways)

  made = []

  class Extractor(features.Extractor):
    def __init__(self, function, images, **kwargs):
      made.append((images, kwargs))
      super().__init__(function, images, **kwargs)

  monkeypatch.setattr(opening, 'open_checkpoint', changed)
  monkeypatch.setattr(features, 'Extractor', Extractor)
  command(workdir, 'digits', *FEW, '--batch_size=12')
  ((images, kwargs),) = made
  assert images.size == (8, 8)
  assert images.preprocessing.resize_small == 10
  assert images.preprocessing.interpolation == 'bicubic'
  assert images.preprocessing.mean == (0.48145466, 0.5, 0.5)
  assert images.preprocessing.std == (0.1, 0.2, 0.3)
  assert kwargs['batch_size'] == 16  # a multiple of eight devices


def test_another_image_size_resizes_the_position_embeddings(
  command, workdir, monkeypatch
):
  found = []
  extract = features.Extractor.__call__

  def kept(*args):
    found.append(extract(*args))
    return found[-1]

  monkeypatch.setattr(features.Extractor, '__call__', kept)
  status, out, _ = command(workdir, 'digits', *FEW, '--image_size=12x16')
  assert status == 0
  assert ', 12x16 pixels, ' in out
  checkpoint = transfer.resized(opening.open_checkpoint(str(workdir)), (12, 16))
  test = sources.subset(sources.open_source('digits', 'test'), range(3))
  np.testing.assert_allclose(
    found[1][:3],
    one_by_one(checkpoint, test),
    rtol=0,
    atol=1e-5,
  )


def test_representations_that_are_not_finite_are_refused(
  command, workdir, monkeypatch
):
  opened = opening.open_checkpoint

  def diverged(path):
    checkpoint = opened(path)
    params = jax.tree.map(np.copy, checkpoint.params)
    params['cls'][:] = np.nan
    return dataclasses.replace(checkpoint, params=params)

  monkeypatch.setattr(opening, 'open_checkpoint', diverged)
  status, _, err = command(workdir, 'digits', *FEW, '--probe')
  assert status == 2
  assert err == (
    'error: The features of 1437 of 1437 training images are not finite; the '
    'first is row 0. Check whether the model diverged, or images became '
    'unreadable.\n'
  )


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--shots=0'], "'0' is not a whole number above 0"),
    (['--shots=200'], 'fewer than 200 shots'),
    (['--image_size=9'], 'an image of 9x9'),
  ],
)
def test_bad_flags_are_refused_before_the_model_runs(
  command, workdir, tmp_path, monkeypatch, args, message
):
  monkeypatch.delattr(features, 'Extractor')
  status, _, err = command(workdir, 'digits', *args)
  assert status == 2
  assert message in err
  assert 'Traceback' not in err
  assert not (tmp_path / 'out' / 'fewshot.csv').exists()


@pytest.fixture
def folder(tmp_path):
  """Images of two classes, twelve of each: dark ones and bright ones."""
  rng = np.random.default_rng(0)
  for name, brightest in (('dark', 100), ('bright', 255)):
    (tmp_path / 'data' / name).mkdir(parents=True)
    for i in range(12):
      pixels = rng.integers(brightest - 99, brightest, (8, 8, 3), np.uint8)
      Image.fromarray(pixels).save(tmp_path / 'data' / name / f'{i}.png')
  return tmp_path / 'data'


def test_a_folder_of_images(command, workdir, tmp_path, folder):
  status, out, err = command(workdir, str(folder), '--shots=4', '--seeds=2')
  assert (status, err) == (0, '')
  assert '2 classes: 20 images of train, 4 of test\n' in out
  assert [r['accuracy'] for r in rows_of(tmp_path / 'out')] == ['1.0', '1.0']


def test_an_unreadable_image_is_refused_or_left_out(
  command, workdir, folder, tmp_path
):
  (folder / 'dark' / 'broken.png').write_bytes(b'')
  status, _, err = command(workdir, str(folder), *FEW)
  assert status == 2
  assert f'{folder}/dark/broken.png' in err
  status, out, _ = command(workdir, str(folder), *FEW, '--on_bad_image=skip')
  assert status == 0
  assert len(rows_of(tmp_path / 'out')) == 4


def test_layers_are_refused_before_the_model_runs(
  command, workdir, tmp_path, monkeypatch
):
  monkeypatch.delattr(features, 'Extractor')
  flags = ('--layers=all', '--probe', '--train_split=train[:9]')
  status, _, err = command(workdir, 'digits', *flags)
  assert status == 2 and '9 training examples are too few' in err
  assert not (tmp_path / 'out').exists()


def start(*args, **variables):
  """Starts the command in a process of its own."""
  environment = {k: v for k, v in os.environ.items() if k[:4] != 'JAX_'}
  return subprocess.Popen(
    [sys.executable, '-m', 'vit_jax.fewshot', *map(str, args)],
    cwd=ROOT,
    env=environment | {'JAX_PLATFORMS': 'cpu'} | variables,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(processes):
  """Returns what each has printed, after a good end."""
  try:
    ended = [p.communicate() for p in processes]
  finally:
    for p in processes:
      p.kill()
  assert [p.returncode for p in processes] == [0] * len(processes), ended
  return [out for out, _ in ended]


def start_two(workdir, tmp_path, *args):
  """Each with a folder of its own, of which only the first's is used."""
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  return [
    start(
      *(workdir, 'digits', '--distributed', f'--output={tmp_path}/{i}', *args),
      JAX_COORDINATOR_ADDRESS=f'localhost:{port}',
      JAX_NUM_PROCESSES='2',
      JAX_PROCESS_ID=str(i),
      JAX_CPU_COLLECTIVES_IMPLEMENTATION='gloo',
      # The other flags are those of one process: features compiled otherwise
      # may differ in the last bit, which decides about an image on a border.
      XLA_FLAGS=f'{os.environ["XLA_FLAGS"]} '
      '--xla_force_host_platform_device_count=4',
    )
    for i in range(2)
  ]


# With these words its threads greet on standard output, through one another.
GLOO = '(Gloo|Rank|is|connected|to|peer|ranks|Expected|number|of|[^A-Za-z])*'


@pytest.mark.slow
def test_two_processes_measure_what_one_does(workdir, tmp_path):
  """And one of them prints and writes."""
  args = (*FEW, '--batch_size=64', '--probe')
  alone, folder = tmp_path / 'alone', tmp_path / 'both'
  finish([start(workdir, 'digits', f'--output={alone}', *args)])
  *shots, probed = rows_of(alone)
  outs = finish(start_two(workdir, folder, *args))
  assert re.fullmatch(GLOO, outs[1]), outs[1]
  assert outs[0].endswith(f'written  {folder}/0/fewshot.png\n')
  assert os.listdir(folder) == ['0']
  *shots_of_two, probed_by_two = rows_of(folder / '0')
  assert shots_of_two == shots
  # Sums in another order decide about an image on a border.
  assert float(probed_by_two['accuracy']) == pytest.approx(
    float(probed['accuracy']), abs=2.5 / 360
  )


@pytest.mark.slow
def test_probes_of_all_layers_are_those_of_each(
  command, workdir, tmp_path, figures
):
  part = ('--probe', '--train_split=train[:20%]', '--test_split=test[:20%]')
  status, out, err = command(workdir, 'digits', '--layers=all', *part)
  assert (status, err) == (0, '')
  assert 'not converged' not in out + err
  (figure,) = figures
  assert figure.axes[0].get_title() == (
    f'{workdir}\non digits: all images from train[:20%], accuracy on test[:20%]'
  )
  with open(tmp_path / 'out' / 'layers.csv', newline='') as file:
    rows = {row['layer']: row for row in csv.DictReader(file)}
  assert [*rows] == ['block_0', 'pre_logits']
  assert out.count('  best\n') == 1
  assert matplotlib.image.imread(tmp_path / 'out' / 'layers.png').ndim == 3
  assert not (tmp_path / 'out' / 'fewshot.csv').exists()
  args = (*part, '--layer=block_0', *FEW)
  assert command(workdir, 'digits', *args)[0] == 0
  with open(tmp_path / 'out' / 'fewshot.csv', newline='') as file:
    (alone,) = [r for r in csv.DictReader(file) if r['shots'] == 'all']
  assert float(rows['block_0']['accuracy']) == pytest.approx(
    float(alone['accuracy']),
    abs=0.02,  # of 72 images, one
  )


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (('--layers=all',), '--layers=all needs --probe'),
    (('--layers=all', '--probe', '--l2=fixed'), 'does not use --l2'),
  ],
)
def test_layers_without_what_they_need_are_refused(command, args, message):
  status, _, err = command('x', 'digits', *args)
  assert status == 2
  assert message in err
