"""What is wrong in a command gets one message, and nothing is left behind.

One list for all commands, in which TINY stands for a checkpoint that opens,
TEXT for a file that is none, GONE for a path where nothing is, EMPTY for an
empty folder, PHOTO for an image, BROKEN for one that is cut off, and OUT for
where results would go.
"""

import importlib
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
train
train --config=configs/digits.py
train --workdir=OUT
train --workdir=OUT --config=GONE
train --workdir=OUT --config=TEXT
train --workdir=OUT --config=EMPTY
train --workdir=TEXT --config=configs/digits.py
{DIGITS}:vlt
{DIGITS}:vit,lr=1
{DIGITS} --config.learning_rate=1
{DIGITS} --config.optimizer.lr=fast
{DIGITS} --config.optimizer.lr=nan
{DIGITS} --config.optimizer.momentum_dtype=float8
{DIGITS} --config.optimizer.name=lion
{DIGITS} --config.optimizer.decay=steps
{DIGITS} --config.optimizer.decay=staircase
{DIGITS} --config.optimizer.milestones="('3 steps',)"
{DIGITS} --config.optimizer.warmup="9000 steps"
{DIGITS} --config.optimizer.warmup=soon
{DIGITS}:resnet --config.optimizer.layer_decay=0.5
{DIGITS} --config.optimizer.frozen="('nowhere',)"
{DIGITS} --config.optimizer.frozen="('(',)"
{DIGITS} --config.optimizer.lr_scales="(('nowhere',2.0),)"
{FOUND} --config.objective.max_objects=11
{FOUND} --config.objective.max_objects=2
{FOUND} --config.objective.l1=-1
{FOUND} --config.data.name=digits
{FOUND} --config.model.masks=True
{FOUND} --config.evaluators.coco.masks=True
{FOUND} --config.objective.buckets=2
{FOUND} --config.data.balance=1
{DIGITS} --config.data.name=digits_canvas
{DIGITS} --config.evaluators.coco.on=True
{DIGITS} --config.total="0 steps"
{DIGITS} --config.total="many steps"
{DIGITS} --config.total="10 weeks"
{DIGITS} --config.batch_size=1.5
{DIGITS} --config.accum_steps=7
{DIGITS} --config.seed=99999999999
{DIGITS} --config.best_metric=test/beauty
{DIGITS} --config.log_every=often
{DIGITS} --config.eval_every="0 steps"
{DIGITS} --config.log_every=0
{DIGITS} --config.checkpoint_every=0.0%
{DIGITS} --config.mesh.data=3
{DIGITS} --config.mesh.fsdp=0
{DIGITS} --config.mesh.tensor=7
{DIGITS} --config.gather=never
{DIGITS} --config.model.depth=5000
{DIGITS} --config.model.width=97
{DIGITS} --config.model.patch_size=5
{DIGITS} --config.model.pool=max
{DIGITS} --config.model.posemb=rotary
{DIGITS} --config.model.posemb_at=output
{DIGITS} --config.model.gelu=relu
{DIGITS} --config.model.norm=batch
{DIGITS} --config.model.rope=100 --config.model.heads=48
{DIGITS} --config.model.rope_registers=100
{DIGITS}:vit,model.rope=100,model.registers=3 --config.model.rope_registers=9
{DIGITS}:axial --config.model.registers=2
{DIGITS}:axial --config.model.pool=cls
{DIGITS} --config.model.dtype=float16
{DIGITS} --config.model.remat=sometimes
{DIGITS} --config.model.stem_layers="(1,2)"
{DIGITS} --config.model.name=vgg
{DIGITS} --config.model.name=resnet
{DIGITS} --config.model.name=detr
{DIGITS} --config.loss.name=hinge
{DIGITS} --config.objective.name=guess
{DIGITS} --config.objective.name=masked
{DIGITS} --config.objective.name=video
{DIGITS} --config.data.name=GONE
{DIGITS} --config.data.name=EMPTY/
{DIGITS} --config.data.name=GONE.csv
{DIGITS} --config.data.name=no_such_set
{DIGITS} --config.data.name=vtab/knitting
{DIGITS} --config.data.split=training
{DIGITS} --config.data.split=train[:0]
{DIGITS} --config.data.image_size=0
{DIGITS} --config.data.image_size=big
{DIGITS} --config.data.image_size=16x
{DIGITS} --config.data.augment=blur
{DIGITS} --config.data.augment="randaugment(0,9)"
{DIGITS} --config.data.augment="randaugment(2,99)"
{DIGITS} --config.data.on_bad_image=cry
{DIGITS} --config.data.mean="(0.5,)"
{DIGITS} --config.data.std="(0.,0.,0.)"
{DIGITS} --config.data.interpolation=nearest
{DIGITS} --config.init=GONE
{DIGITS} --config.init=TEXT
{DIGITS} --config.init=TINY
{DIGITS}:deit
{DIGITS}:deit --config.teacher=GONE
train --workdir=OUT --config=configs/noisy_student.py:digits,compete
train --workdir=OUT --config=configs/noisy_student.py:GONE/
train --workdir=OUT --config=configs/noisy_student.py --config.extend=True
{DIGITS} --config.evaluators.fewshot.on=True
{DIGITS} --config.tune.train="train[:50%]" --tune=optimizer.lr
{DIGITS} --sweep=optimizer.lr
{DIGITS} --sweep=optimizer.speed=1,2
{DIGITS} --sweep=optimizer.lr=1,x
{DIGITS} --timeout_s=0
{DIGITS} --no_such_flag=1
predict
predict TINY
predict GONE PHOTO
predict TEXT PHOTO
predict EMPTY PHOTO
predict TINY GONE
predict TINY EMPTY
predict TINY PHOTO --topk=0
predict TINY PHOTO --topk=x
predict TINY PHOTO --threshold=2
predict TINY PHOTO --out=found
predict TINY PHOTO --format=xml
evaluate TINY
evaluate GONE digits --output=OUT
evaluate TINY GONE/ --output=OUT
evaluate TINY digits --split=exam --output=OUT
evaluate TINY digits --on_bad_image=cry --output=OUT
fewshot TINY
fewshot GONE digits --output=OUT
fewshot TINY GONE/ --output=OUT
fewshot TINY digits --shots=0 --output=OUT
fewshot TINY digits --shots=many --output=OUT
fewshot TINY digits --shots=9999 --output=OUT
fewshot TINY digits --layer=block_99 --output=OUT
fewshot TINY digits --layers=few --probe --output=OUT
fewshot TINY digits --layers=all --probe --train_split=train[:3] --output=OUT
fewshot TINY digits --probe --shots=1 --train_split=train[:3] --output=OUT
fewshot TINY digits --image_size=5 --output=OUT
fewshot TINY digits --train_split=exam --output=OUT
convert TINY
convert TINY OUT
convert TINY OUT --to=tape
convert GONE OUT --to=npz
convert TEXT OUT --to=npz
convert TINY TEXT --to=npz
convert TINY OUT --to=onnx --dtype=int3
convert TINY OUT --to=hf --head=half
convert TINY OUT --to=npz --image_size=5
convert --check TINY
convert TEXT OUT --to=board
convert TINY OUT --to=board --dtype=float16
serve
serve GONE
serve TEXT
serve TINY --port=99999
visualize
visualize rollout TINY
visualize rollout GONE PHOTO --out=OUT
visualize rollout TINY GONE --out=OUT
visualize rollout TINY BROKEN --out=OUT
visualize rollout TINY PHOTO --discard=2 --out=OUT
visualize rollout TINY PHOTO --class=zebra --out=OUT
visualize rollout TINY PHOTO --fusion=median --out=OUT
visualize rollout TINY PHOTO --image_size=5 --out=OUT
visualize attention TINY PHOTO --query=99,99 --out=OUT
visualize attention TINY PHOTO --query=left --out=OUT
visualize distance TINY --out=OUT
visualize filters TEXT --out=OUT
visualize posemb GONE --out=OUT
visualize report TINY BROKEN --out=OUT
visualize masked TINY PHOTO --out=OUT
visualize masked TINY PHOTO --rate=2 --out=OUT
visualize detr TINY PHOTO --out=OUT
visualize detr TINY PHOTO --threshold=2 --out=OUT
visualize portrait TINY PHOTO --out=OUT
data
data GONE
data EMPTY
models zz99
models b16 --image_size=5
models b16 --format=xml
palette
palette GONE/ --out=OUT.npy
palette digits --colours=0 --out=OUT.npy
palette digits --colours=9999 --image_size=8 --out=OUT.npy
palette digits --out=OUT
complete TINY PHOTO --out=OUT
complete GONE PHOTO --out=OUT
curves
curves GONE --output=OUT
curves TEXT --output=OUT
bench
bench sleep
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
    if (ROOT / module.replace('.', '/')).is_dir():
      module += '.__main__'
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


@pytest.mark.parametrize('line', WRONG.strip().splitlines())
def test_it_is_one_message_and_nothing_is_left(run, tmp_path, line):
  before = files_in(tmp_path)
  status, _, err = run(line)
  if 'needs pycocotools, which is not installed' in err:
    pytest.skip('needs the extra `detection`')
  assert status == 2, (status, err)
  assert 'Traceback' not in err
  # argparse shows how it is used first, in as many lines as that takes.
  _, sign, said = err.rpartition('error: ')
  assert sign and len(said.splitlines()) == 1, err
  assert files_in(tmp_path) == before
