"""The command that lists models."""

import csv
import io

import pytest

from vit_jax.checkpoints import catalogue
from vit_jax.models import __main__ as table
from vit_jax.models import variants


def test_without_names_all_published_models_are_listed(capsys, monkeypatch):
  sources = {name: variants.PUBLISHED[name] for name in ('s32', 'ti16')}
  monkeypatch.setattr(variants, 'PUBLISHED', sources)
  assert table.main([]) == 0
  _, *lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == ['s32', 'ti16']


def test_parameters_of_a_model_add_up(capsys):
  assert table.main(['ti16', '--params']) == 0
  out = capsys.readouterr().out
  rows = [line.split('|')[1:5] for line in out.splitlines() if '|' in line]
  shapes = {name.strip(): shape.strip() for name, shape, *_ in rows[1:]}
  assert shapes['embedding/kernel'] == '(16, 16, 3, 192)'
  # DeiT's table 1 (2012.12877): 5.7 million, of 12 layers.
  counts = [int(count.replace(',', '')) for *_, count in rows[1:]]
  assert sum(counts) == 5_717_416
  assert '5,717,416' in out.splitlines()[-1]


def test_fields_of_a_model_are_those_of_its_config(capsys):
  for models, name in (([], 'vit'), (['r50x1'], 'resnet')):
    assert table.main(['--fields', *models, '--format=csv']) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    listed = {row['field'].removeprefix('model.'): row for row in rows}
    assert listed.keys() >= variants.defaults(name).keys() - {'name', 'dtype'}
    assert listed['width']['values'] == '[1, inf)'
    assert listed['remat']['values'].startswith('none, cheap, ')
    assert all(row['meaning'] for row in rows)


def test_a_table_of_some_models(capsys):
  """Numbers end where their titles do; a ResNet has no tokens."""
  assert table.main(['ti16', 'r50x1', '--num_classes=0']) == 0
  title, *lines = capsys.readouterr().out.splitlines()
  assert title.split() == ['model', 'parameters', 'GFLOPs', 'tokens', 'source']
  vit, resnet = lines
  # 1,000 classes less than are published.
  assert vit.split()[:2] == ['ti16', '5,524,416']
  assert resnet.split()[:2] == ['r50x1', '23,500,352']
  ends = [title.index(x) + len(x) for x in ('parameters', 'GFLOPs', 'tokens')]
  assert vit[ends[0] : ends[1] + 1].split() == [f'{vit.split()[2]}']
  assert all(vit[end - 1].isdigit() and vit[end] == ' ' for end in ends)
  assert not resnet[ends[1] : ends[2]].strip()
  source = title.index('source')
  assert vit[source:] == variants.PUBLISHED['ti16']
  assert resnet[source:] == variants.PUBLISHED['r50x1']


def test_head_and_image_size_count(capsys):
  def row(*args):
    assert table.main(['ti16', '--format=csv', *args]) == 0
    out = capsys.readouterr().out
    assert '\r' not in out
    return next(csv.DictReader(io.StringIO(out)))

  plain, small = row(), row('--num_classes=10', '--image_size=32x48')
  # 990 classes of 192 weights and a bias, and 190 positions of 192.
  fewer = int(plain['parameters']) - int(small['parameters'])
  assert fewer == 990 * 193 + 190 * 192
  assert small['tokens'] == '7'


def test_models_that_do_not_fit_the_image_size_are_named(capsys):
  assert table.main(['--image_size=384', '--format=csv']) == 0
  out, err = capsys.readouterr()
  lines = err.splitlines()
  assert len(lines) == 3 and 'h14 is left out: Patches of 14x14' in err
  names = {row['model'] for row in csv.DictReader(io.StringIO(out))}
  assert names == set(variants.PUBLISHED) - {x.split()[0] for x in lines}


def test_a_bad_name_ends_in_one_message(capsys):
  assert table.main(['l16', 'r50y1']) == 2
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith("error: Unknown model variant 'r50y1'.")
  assert err.count('\n') == 1


@pytest.mark.parametrize(
  ('args', 'name'),
  [
    (['b16', '--num_classes=-1'], 'num_classes is -1'),
    (['b16', '--image_size=-16'], "image_size is '-16'"),
    (['--fields', '--num_classes=0'], '--fields takes no --num_classes'),
    (['--pretrained', '--image_size=1'], '--pretrained takes no --image_size'),
    (['ti16', '--params', '--format=csv'], '--params takes no --format'),
  ],
)
def test_flags_that_mean_nothing_are_refused(capsys, args, name):
  try:
    status = table.main(args)
  except SystemExit as e:
    status = e.code
  assert status == 2
  out, err = capsys.readouterr()
  assert out == ''
  assert name in err


def test_published_checkpoints_are_listed(capsys):
  assert table.main(['--pretrained']) == 0
  title, *lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == list(catalogue.PUBLISHED)
  for name, column in [('top-1', 'accuracy'), ('MiB', 'size_mib')]:
    end = title.index(name) + len(name)
    for line, entry in zip(lines, catalogue.PUBLISHED.values(), strict=True):
      value = getattr(entry, column)
      expected = '' if value is None else f'{value:,g}'
      assert (line[:end].split('  ')[-1].strip()) == expected


def test_published_checkpoints_of_a_model(capsys):
  assert table.main(['--pretrained', 'b8', '--format=csv']) == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  assert [row['name'] for row in rows] == ['augreg/b8', 'augreg/b8-224']
  assert rows[0]['address'].startswith('gs://vit_models/augreg/B_8-i21k-')
