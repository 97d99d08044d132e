"""What is wrong in a command gets one message, and nothing is left behind.

One list for all commands, in which TINY stands for a checkpoint that opens,
TEXT for a file that is none, GONE for a path where nothing is, EMPTY for an
empty folder, PHOTO for an image, BROKEN for one that is cut off, and OUT for
where results would go.
"""

import importlib.util
import pathlib
import shlex
import sys

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT

# The config loader of ml_collections loads modules the old way.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')

DIGITS = 'train --workdir=OUT --config=configs/digits.py'
FOUND = 'train --workdir=OUT --config=configs/detr.py:digits'
WRONG = f"""
train --workdir=OUT
train --workdir=OUT --config=TEXT
train --workdir=TEXT --config=configs/digits.py
{DIGITS}:vlt
{DIGITS} --config.optimizer.milestones="('3 steps',)"
{FOUND} --config.data.name=digits
{FOUND} --config.objective.buckets=2
{DIGITS} --config.data.name=digits_canvas
{DIGITS} --config.evaluators.coco.on=True
{DIGITS} --config.model.name=detr
{DIGITS} --config.objective.name=video
{DIGITS} --config.data.name=no_such_set
{DIGITS} --config.data.split=train[:0]
{DIGITS} --config.init=TEXT
{DIGITS}:deit --config.teacher=GONE
train --workdir=OUT --config=configs/noisy_student.py:GONE/
{DIGITS} --config.tune.train="train[:50%]" --tune=optimizer.lr
predict TINY EMPTY
predict TINY PHOTO --topk=0
evaluate TINY GONE/ --output=OUT
fewshot TINY digits --layer=block_99 --output=OUT
convert GONE OUT --to=npz
convert TINY TEXT --to=npz
serve TEXT
visualize rollout TINY BROKEN --out=OUT
visualize attention TINY PHOTO --query=99,99 --out=OUT
data EMPTY
models zz99
palette digits --colours=0 --out=OUT.npy
complete TINY PHOTO --out=OUT
curves TEXT --output=OUT
bench train --variants=ti16 --set=objective.name=rotation --batch_sizes=2
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd, command):
  """Gives a function that runs a line of the list in this process."""
  (tmp_path / 'text').write_text('no checkpoint')
  (tmp_path / 'empty').mkdir()
  pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'photo.png')
  (tmp_path / 'broken.png').write_bytes(
    (tmp_path / 'photo.png').read_bytes()[:60]
  )
  names = {
    'TINY': ROOT / 'tests/golden/tiny_s7.npz',
    'TEXT': tmp_path / 'text',
    'GONE': tmp_path / 'gone',
    'EMPTY': tmp_path / 'empty',
    'PHOTO': tmp_path / 'photo.png',
    'BROKEN': tmp_path / 'broken.png',
    'OUT': tmp_path / 'out',
  }
  commands = importlib.import_module('vit_jax.__main__').COMMANDS

  def run(line):
    for name, path in names.items():
      line = line.replace(name, str(path))
    name, *args = shlex.split(line)
    if name == 'train':
      return command(*args)
    module = commands[name][0]
    # `python -m` finds the commands of cli/ and tools/ without their folder.
    place = importlib.util.find_spec(module)
    folder = pathlib.Path(place.origin).relative_to(ROOT).with_suffix('')
    if folder.name == '__init__':
      folder = folder.with_name('__main__')
    module = '.'.join(folder.parts)
    monkeypatch.setattr(sys, 'argv', [name, *args])
    capfd.readouterr()
    try:
      status = importlib.import_module(module).main()
    except SystemExit as e:
      status = e.code
    return status, *capfd.readouterr()

  return run


def files_in(folder):
  return sorted(pathlib.Path(folder).rglob('*'))


@pytest.mark.fast(
  'train --workdir=OUT --config=TEXT',
  'data EMPTY',
  'train --workdir=OUT',
  'serve TEXT',
  'convert GONE OUT --to=npz',
  'predict TINY EMPTY',
  'convert TINY TEXT --to=npz',
  'predict TINY PHOTO --topk=0',
)
@pytest.mark.parametrize('line', WRONG.strip().splitlines())
def test_it_is_one_message_and_nothing_is_left(run, tmp_path, line):
  before = files_in(tmp_path)
  status, _, err = run(line)
  for extra in ('detection', 'serve'):
    if f"-e '.[{extra}]'" in err:
      pytest.skip(f'needs the extra `{extra}`')
  assert status == 2, (status, err)
  assert 'Traceback' not in err
  # argparse shows how it is used first, in as many lines as that takes.
  _, sign, said = err.rpartition('error: ')
  assert sign and len(said.splitlines()) == 1, err
  assert files_in(tmp_path) == before
