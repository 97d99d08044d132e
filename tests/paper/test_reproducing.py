"""Running claims: a budget, going on after a kill, and the report."""

import collections
import csv
import json
import os
import re
import signal
import types

import pytest
from etils import epath

from tests.conftest import ROOT
from tests.sweeps.small_sweep import fake_training, table
from vit_jax import flags, reproduce
from vit_jax.paper import claims, evidence, full_size, reproducing
from vit_jax.sweeps import refusing
from vit_jax.training import run

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

RUNS = 6  # two variants, three seeds


@pytest.fixture
def command(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)

  def command(*args):
    folders = [f'--workdir={tmp_path}/w', f'--results={tmp_path}/r']
    return reproduce.main(['--claims=axial_gain', *folders, *args])

  return command


def accuracy(config, step):
  return 0.8 + 0.1 * config.model.axial + config.seed / 1000


def test_a_killed_command_goes_on(command, tmp_path, monkeypatch):
  """Also in another workdir, of which only the CSV file is left."""

  def killed(config, step):
    if config.model.axial and config.seed == 1:
      raise run.Preempted('Preempted: saved step 2.')
    return accuracy(config, step)

  trained = fake_training(monkeypatch, killed)
  assert command('--budget=2h') == 75
  path = tmp_path / 'r/digits/axial.csv'
  before = table(path)
  # The first seed of all variants comes before the second of any.
  assert [(x['variant'], x['seed']) for x in before] == [
    ('ViT', '0'),
    ('ViT', '1'),
    ('Axial-ViT', '0'),
  ]
  (tmp_path / 'w').rename(tmp_path / 'lost')
  trained = fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  assert len(trained) == RUNS - len(before)
  after = table(path)
  assert len(after) == RUNS
  assert all(line in after for line in before)
  assert {x['test/accuracy'] for x in after} == {
    '0.8',
    '0.801',
    '0.802',
    '0.9',
    '0.901',
    '0.902',
  }
  assert after[0]['command'] == (
    'python -m vit_jax.main --config=configs/reproduce.py:axial,digits '
    '--workdir=runs/axial --sweep=seed=0'
  )
  page = (tmp_path / 'w/report.html').read_text()
  assert page.count('supported</span>') == 2
  assert 'src="data:image/png' in page and 'http' not in page
  pages = (tmp_path / 'w/report.md').read_text()
  (picture,) = re.findall(r'\]\((.*\.png)\)', pages)
  assert (tmp_path / 'w' / picture).read_bytes().startswith(b'\x89PNG')


def test_sigterm_in_the_last_step_of_a_run_ends_the_command(
  command, tmp_path, monkeypatch
):
  def told_to_end(config, step):
    os.kill(os.getpid(), signal.SIGTERM)
    return accuracy(config, step)

  fake_training(monkeypatch, told_to_end)
  assert command('--budget=2h') == 75
  assert len(table(tmp_path / 'r/digits/axial.csv')) == 1


def test_runs_of_another_number_of_images_are_no_part_of_it(
  command, tmp_path, monkeypatch, capsys
):
  fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  path = tmp_path / 'r/digits/axial.csv'
  lines = path.read_text().splitlines(keepends=True)
  assert int(table(path)[0]['examples']) == 1437
  path.write_text(''.join(lines[:3]).replace(',1437,', ',1400,'))
  assert command('--budget=2h') == 2
  said = 'has runs of 1,400 images, and digits has 1,437: give another'
  assert said in capsys.readouterr().err


def test_data_of_like_names_have_folders_of_their_own(tmp_path):
  paths = {
    reproducing.Reproduction(
      ['posemb'], data, str(tmp_path), str(tmp_path), flags.config_named
    ).path('posemb')
    for data in ('digits', 'cifar10', './cifar10', '../cifar10', 'a-b', 'a/b')
  }
  assert len(paths) == 6
  assert tmp_path / 'digits/posemb.csv' in paths


@pytest.mark.parametrize(
  ('data', 'said'),
  [
    *(('./a', './a'), ('./a/', './a'), ('a/', './a'), ('.//b/../a', './a')),
    *(('~/a/', '~/a'), ('../a/', '../a'), ('/a/b/', '/a/b'), ('./', '.')),
    # No folders, but the last may be one.
    *((x, x) for x in ('digits', 'hf://datasets/a/b', 'vtab/dtd', 'a/b')),
  ],
)
def test_runs_of_a_folder_are_found_however_it_is_spelt(data, said):
  assert reproduce._parser().parse_args([f'--data={data}']).data == said


def test_claims_of_other_data_are_left_out(tmp_path, monkeypatch, capsys):
  for c in range(2):
    (tmp_path / f'images/train/{c}').mkdir(parents=True)
  monkeypatch.chdir(ROOT)
  data = f'--data={tmp_path}/images'
  names = reproduce._claims('', data[7:])
  assert set(claims.CLAIMS) - set(names) == {
    name for name, c in claims.CLAIMS.items() if c.study == 'detr'
  }
  assert 'Left out, as' in capsys.readouterr().out
  assert reproduce.main([data, '--claims=detr_layers', '--list']) == 2
  err = capsys.readouterr().err
  assert 'Traceback' not in err and 'measured on digits on a canvas' in err


def test_at_full_size_no_claim_is_left_out(monkeypatch):
  asked = []
  monkeypatch.setattr(
    full_size, 'commands', lambda names, *args: asked.extend(names) or []
  )
  assert reproduce.main(['--scale=tpu']) == 0
  assert asked == list(claims.CLAIMS)


@pytest.mark.parametrize(
  'flag',
  ['--data=./images', '--budget=1h', '--list', '--workdir=x', '--results=x'],
)
def test_what_full_size_has_no_use_for_is_refused(capsys, flag):
  assert reproduce.main(['--scale=tpu', flag]) == 2
  name = flag.partition('=')[0]
  out, err = capsys.readouterr()
  assert out == '' and f'has no use for {name}' in err


def test_the_report_has_the_command_that_goes_on(monkeypatch, tmp_path, capsys):
  """Of the claims that the data are of, with what is not left to a default."""
  given = []

  class Page:
    def __init__(self, names, reproduction, command):
      given.append((names, command))

    def write(self, folder):
      return [folder / 'report.html', folder / 'report.md']

    def counts(self):
      return '7 claims'

  made = types.SimpleNamespace(run=lambda budget_s: ())
  monkeypatch.setattr(reproduce, 'Reproduction', lambda *_: made)
  monkeypatch.setattr(reproduce.claims_page, 'ClaimsPage', Page)
  data = ['--data=my images/', f'--workdir={tmp_path}']
  for args in ([], data, [*data, '--claims=head', '--budget=1s']):
    assert reproduce.main(args) == 0
  again = 'python -m vit_jax.reproduce'
  assert [command for _, command in given] == [
    f'{again} --budget=2h --workdir=runs/reproduce',
    f"{again} '--data=./my images' --budget=2h --workdir={tmp_path}",
    f"{again} --claims=head '--data=./my images' --budget=2h "
    f'--workdir={tmp_path}',
  ]
  assert capsys.readouterr().out.splitlines()[-3:] == [
    f'written  {tmp_path}/report.html',
    f'written  {tmp_path}/report.md',
    '7 claims',
  ]
  every, those, one = (set(names) for names, _ in given)
  assert every == set(claims.CLAIMS) > those and one == {'head'}


def test_homes_are_those_of_their_users(command, tmp_path, monkeypatch):
  fake_training(monkeypatch, accuracy)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  monkeypatch.chdir(tmp_path)
  assert command('--workdir=~/x', '--results=~/y', '--budget=2h') == 0
  assert (tmp_path / 'home/x/report.html').exists()
  assert (tmp_path / 'home/y/digits/axial.csv').exists()
  assert not (tmp_path / '~').exists()


def test_the_report_says_what_ran_where_and_what_follows(
  command, tmp_path, monkeypatch
):
  fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  path = tmp_path / 'r/digits/axial.csv'
  lines = table(path)
  for i, line in enumerate(lines):
    line['seconds'] = str(60 * (i + 1))
    line['date'] = f'2020-01-0{i + 1}'
    line['hardware'] = 'this' if i < 5 else 'that'
    line['versions'] = 'jax 0'
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, [*lines[0]])
    writer.writeheader()
    writer.writerows(lines)
  assert command('--budget=2h') == 0
  parts = (tmp_path / 'w/report.md').read_text().split('\n\n')
  assert parts[0] == '# The paper, measured again'
  assert parts[1].startswith(
    '1 claim: 1 supported. 6 of 6 runs on digits have finished; the report is '
    'of 20'
  )
  assert 'with 3 seeds' in parts[2]
  assert parts[3:5] == [
    '5 runs on this, jax 0, 2020-01-01 to 2020-01-05: 15m in all.',
    '1 run on that, jax 0, 2020-01-06: 6m in all.',
  ]
  assert parts[5] == (
    '    python -m vit_jax.reproduce --claims=axial_gain '
    f'--results={tmp_path}/r --budget=2h --workdir={tmp_path}/w'
  )
  path.write_text(''.join(path.read_text().splitlines(keepends=True)[:-1]))
  assert command('--budget=0s') == 0
  assert '5 of 6 runs on digits' in (tmp_path / 'w/report.md').read_text()
  claim = 'Axial attention is more accurate than the ViT that it is made of.'
  of = 'ViT, D.6 and figure 13'
  assert parts[7].splitlines()[2:] == [
    f'| {claim} (`axial_gain`) | {of} | supported |'
  ]
  assert parts[8] == '## axial'
  assert parts[10] == (
    '    python -m vit_jax.main --config=configs/reproduce.py:axial,digits '
    '--workdir=runs/axial'
  )
  assert parts[11].splitlines()[2:] == [
    '| ViT | 3 | 0.801 ± 0.001 | 0.00233 ± 0 |',
    '| Axial-ViT | 3 | 0.901 ± 0.001 | 0.00436 ± 0 |',
  ]
  assert parts[12] == f'**{claim}** ({of})'
  assert '3 of 3 seeds: 0.1, 0.1, 0.1; mean 0.1' in parts[13]
  assert parts[13].endswith(': **supported**.')
  assert parts[14].endswith('](report/axial_gain.png)\n') and len(parts) == 15


def test_the_report_kept_here_is_of_the_runs_kept_here(tmp_path):
  """And the first page says what it says."""
  assert reproduce.main(['--budget=1s', f'--workdir={tmp_path}']) == 0
  verdict = re.compile(r'\(`(\w+)`\) \|.*\| (.*) \|\n')
  new, kept = (
    verdict.findall((folder / 'report.md').read_text())
    for folder in (tmp_path, ROOT / 'vit_jax/paper')
  )
  assert new == kept
  # Claims may share a picture, which is shown once.
  pictures = re.findall(
    r'\]\((.*\.png)\)', (tmp_path / 'report.md').read_text()
  )
  assert len({*pictures}) == len(pictures) < len(kept)
  cifar10 = (ROOT / 'vit_jax/paper/cifar10/report.md').read_text()
  first_page = (ROOT / 'README.md').read_text()
  for said, found in (
    ('{} claims on tiny models of digits, of which', kept),
    ('of {},', verdict.findall(cifar10)),
  ):
    count = collections.Counter(text for _, text in found)
    assert (
      f'{said.format(len(found))} {count["supported"]} hold, '
      f'{count["not supported"]} do not and '
      f'{count["not decided at this budget"]} are undecided.'
    ) in first_page


@pytest.mark.parametrize('data', ['digits', './cifar10'])
def test_the_runs_kept_here_are_those_of_todays_configs(tmp_path, data):
  """Or what they measured would no longer be what a config trains."""
  made = reproducing.Reproduction(
    reproduce._claims('', data),
    data,
    str(tmp_path),
    str(ROOT / 'vit_jax/paper/results'),
    flags.config_named,
  )
  for study in made.studies:
    kept = evidence.read(made.path(study))
    assert kept and len(made.rows(study)) == len(kept), study


def test_runs_of_another_config_do_not_count(command, tmp_path, monkeypatch):
  fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  path = tmp_path / 'r/digits/axial.csv'
  lines = table(path)
  assert len(lines) == RUNS
  checksum = lines[0]['config']  # of one variant and seed
  path.write_text(path.read_text().replace(checksum, 12 * '0'))
  (tmp_path / 'w').rename(tmp_path / 'lost')
  trained = fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  assert trained == ['ViT_seed=0']
  assert table(path)[0]['config'] == checksum


def test_no_run_is_started_that_the_budget_does_not_hold(
  command, monkeypatch, capsys
):
  trained = fake_training(monkeypatch, accuracy)
  assert command('--budget=1s') == 0
  assert trained == []
  assert '1 not decided at this budget' in capsys.readouterr().out
  assert command('--list') == 0
  assert re.search(r'axial_gain .* 0/6 ', capsys.readouterr().out)


def test_a_claim_that_is_named_twice_counts_once():
  assert reproduce._claims('head,depth,head', 'digits') == ['head', 'depth']


def test_a_run_too_long_for_the_budget_keeps_no_shorter_one_waiting(
  command, tmp_path, monkeypatch
):
  fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  path = tmp_path / 'r/digits/axial.csv'
  first = [line for line in table(path) if line['seed'] == '0']
  for line in first:
    line['seconds'] = '1' if line['variant'] == 'Axial-ViT' else '9999'
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, [*first[0]])
    writer.writeheader()
    writer.writerows(first)
  (tmp_path / 'w').rename(tmp_path / 'lost')
  trained = fake_training(monkeypatch, accuracy)
  assert command('--budget=2h') == 0
  # Each comes after one of the other variant, which would take longer.
  assert trained == ['Axial-ViT_seed=1', 'Axial-ViT_seed=2']


def test_what_is_refused(command, capsys):
  assert command('--claims=posem') == 2
  assert "No claim 'posem'" in capsys.readouterr().err
  for flag in ('--data', '--results', '--workdir'):
    assert command(f'{flag}=') == 2
    assert f'{flag} is empty' in capsys.readouterr().err
  assert command('--budget=soon') == 2
  assert '--budget=soon is no time' in capsys.readouterr().err


def test_counts_are_kept_to_the_last_image(tmp_path):
  """With which those of the data are compared when a study goes on."""
  path = epath.Path(tmp_path / 'x.csv')
  numbers = {'examples': 1_281_167, 'test/accuracy': 0.123456789, 'seconds': 9}
  texts = dict.fromkeys((*evidence.FIRST, *evidence.LAST), 'x')
  evidence.write(path, [evidence.RunRow(texts, numbers)])
  (row,) = evidence.read(path)
  assert row.numbers == {
    'examples': 1_281_167,
    'test/accuracy': 0.123457,
    'seconds': 9,
  }


@pytest.mark.parametrize(
  ('text', 'seconds'),
  [('90s', 90), ('1.5m', 90), ('2h', 7200), ('1d', 86_400), ('0s', 0)],
)
def test_budgets(text, seconds):
  assert reproduce._seconds(text) == seconds


@pytest.mark.parametrize('text', ['', '2', 'h', '-1h', '2 h', '1e3s', '2hh'])
def test_what_is_no_budget(text):
  with pytest.raises(ValueError, match='is no time: write a number and s, m,'):
    reproduce._seconds(text)


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (0.4, '0s'),
    (99, '99s'),
    (100, '2m'),
    (3569, '59m'),
    (3571, '1h 00m'),
    (3600 + 25 * 60, '1h 25m'),
    (90_000, '25h 00m'),
  ],
)
def test_times_for_people(seconds, text):
  assert reproducing.span(seconds) == text


def planned(names, tmp_path):
  return reproducing.Reproduction(
    names, 'digits', str(tmp_path), str(tmp_path), flags.config_named
  )


def test_a_run_that_nobody_has_timed_takes_what_its_compute_takes(
  tmp_path, monkeypatch
):
  """Forward and twice that back, of all images, at 20 GFLOP/s; and 20 s."""
  monkeypatch.chdir(ROOT)
  facts = {'gflops': 0.01, 'examples': 1437}
  monkeypatch.setattr(refusing.KnownData, 'of', lambda self, cell: facts)
  made = planned(['posemb', 'depth', 'resolution'], tmp_path)

  def seconds(study):
    return made.seconds(made.planned[study][0])

  # 10 epochs; 120 steps of 64; 60 steps, and a stage that may be as long.
  assert seconds('posemb') == pytest.approx(20 + 3 * 0.01 * 10 * 1437 / 20)
  assert seconds('shape') == pytest.approx(20 + 3 * 0.01 * 120 * 64 / 20)
  assert seconds('resolution') == pytest.approx(
    20 + 2 * 3 * 0.01 * 60 * 64 / 20
  )


def test_a_run_is_expected_to_take_what_others_of_its_kind_took(
  tmp_path, monkeypatch
):
  """Of its variant, or else of its study."""
  monkeypatch.chdir(ROOT)
  made = planned(['axial_gain'], tmp_path)
  vit, axial = (made.planned['axial'][i] for i in (0, 3))
  assert (vit.key, axial.key) == (('ViT', '0'), ('Axial-ViT', '0'))
  rows = [
    evidence.RunRow({'variant': variant, 'seed': '0'}, {'seconds': seconds})
    for variant, seconds in (('ViT', 10), ('ViT', 30), ('Axial-ViT', 80))
  ]
  monkeypatch.setattr(made, 'rows', lambda study: rows)
  assert (made.seconds(vit), made.seconds(axial)) == (20, 80)
  del rows[2]
  assert made.seconds(axial) == 20


def test_the_budget_is_what_is_left_of_it(tmp_path, monkeypatch):
  """Of runs of 100 s each a budget of 300 has three, and begins no fourth."""
  monkeypatch.chdir(ROOT)
  made = planned(['axial_gain'], tmp_path)
  now, ran = [5.0], []

  def run_one(run):
    ran.append(run.key)
    now[0] += 100

  clock = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(reproducing, 'time', clock)
  monkeypatch.setattr(made, 'seconds', lambda run: 100.0)
  monkeypatch.setattr(made, '_check_data', lambda run: None)
  monkeypatch.setattr(made, '_run', run_one)
  said = list(made.run(300))
  assert ran == [('ViT', '0'), ('Axial-ViT', '0'), ('ViT', '1')]
  assert [re.sub(': .*, about', ':', line) for line in said] == [
    'axial 1 of 6: 2m; 5m of the budget left',
    'axial 2 of 6: 2m; 3m of the budget left',
    'axial 3 of 6: 2m; 2m of the budget left',
  ]


def test_only_runs_of_one_variant_have_to_be_of_as_many_images(
  tmp_path, monkeypatch
):
  """Studies may have variants of few and of all, and old files no numbers."""
  monkeypatch.chdir(ROOT)
  made = planned(['axial_gain'], tmp_path)
  monkeypatch.setattr(made._facts, 'of', lambda cell: {'examples': 50})
  rows = [
    evidence.RunRow({'variant': variant, 'seed': '0'}, numbers)
    for variant, numbers in (
      ('Axial-ViT', {'examples': 70}),
      ('ViT', {'examples': 50}),
      ('ViT', {}),
    )
  ]
  monkeypatch.setattr(made, 'rows', lambda study: rows)
  vit, axial = (made.planned['axial'][i] for i in (0, 3))
  made._check_data(vit)
  with pytest.raises(ValueError, match='runs of 70 images, and digits has 50'):
    made._check_data(axial)


def test_a_run_becomes_a_line_in_the_order_of_its_plan(tmp_path, monkeypatch):
  """With what is measured afterwards, which takes its time, too."""
  monkeypatch.chdir(ROOT)
  made = planned(['positions'], tmp_path)
  first, diverged, last = (made.planned['inside'][i] for i in (0, 1, -1))
  wanted = [last, first, diverged]
  now, ran, looked = [100.0], [], []

  def run_sweep(config, folder):
    labels = [[value[0] for value in values] for _, values in config.sweep]
    ran.append((folder, labels))
    (one,) = (x for x in wanted if x.cell.labels['seed'] == labels[1][0])
    one.cell.workdir.mkdir(parents=True)
    metrics = {} if one is diverged else {'test/accuracy': 0.5}
    result = {'params': 12, 'gflops': 0.25, 'steps': 4, 'elapsed_s': 7.0}
    result |= {'metrics': metrics, 'status': 'done' if metrics else 'diverged'}
    (one.cell.workdir / 'result.json').write_text(json.dumps(result))

  def inside(checkpoint, data, split):
    looked.append((checkpoint, data, split))
    now[0] += 3
    return {'positions/nearness': 0.125}

  clock = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(reproducing, 'time', clock)
  monkeypatch.setattr(reproducing.running, 'run', run_sweep)
  monkeypatch.setattr(reproducing.opening, 'open_checkpoint', 'model {}'.format)
  monkeypatch.setattr(reproducing.measures, 'MEASURES', {'inside': inside})
  monkeypatch.setattr(made._facts, 'of', lambda cell: {'examples': 50})
  for one in wanted:
    made._run(one)
  study = f'{tmp_path}/digits/inside'
  assert ran == [
    (study, [[one.cell.labels['inside']], [one.cell.labels['seed']]])
    for one in wanted
  ]
  split = first.cell.config.evaluators.test.split
  assert looked == [
    (f'model {one.cell.workdir}', 'digits', split) for one in (last, first)
  ]
  lines = table(made.path('inside'))
  assert [(x['variant'], x['seed']) for x in lines] == [
    one.key for one in (first, diverged, last)
  ]
  assert [x['status'] for x in lines] == ['done', 'diverged', 'done']
  for name, values in {
    'test/accuracy': ['0.5', '', '0.5'],
    'positions/nearness': ['0.125', '', '0.125'],
    'params': 3 * ['12'],
    'gflops': 3 * ['0.25'],
    'steps': 3 * ['4'],
    'examples': 3 * ['50'],
    'seconds': ['10', '7', '10'],
  }.items():
    assert [x[name] for x in lines] == values
  # What a line has not it does not get from another.
  assert 'test/accuracy' not in made.rows('inside')[1].numbers


@pytest.mark.parametrize(
  ('old', 'new'),
  [
    ('variant,', 'model,'),
    (',0.5,', ',half,'),
    ('a,0,done', '"a"b,0,done'),
    (',x,x\n', ',x,x,1\n'),
    (',x,x\n', '\n'),
  ],
)
def test_what_is_no_file_of_runs_is_refused_by_name(tmp_path, old, new):
  path = epath.Path(tmp_path / 'x.csv')
  texts = dict.fromkeys(evidence.LAST, 'x')
  texts |= {'variant': 'a', 'seed': '0', 'status': 'done'}
  evidence.write(path, [evidence.RunRow(texts, {'test/accuracy': 0.5})])
  text = path.read_text()
  assert evidence.read(path)[0].texts == texts and old in text
  path.write_text(text.replace(old, new))
  with pytest.raises(
    ValueError, match='x.csv is no file of runs .*: remove it'
  ):
    evidence.read(path)


def test_the_machine_is_named(monkeypatch, tmp_path):
  monkeypatch.setattr(reproducing, 'usable_cores', lambda: 6)
  about = tmp_path / 'cpuinfo'
  monkeypatch.setattr(reproducing.epath, 'Path', lambda _: about)
  monkeypatch.setattr(reproducing.platform, 'processor', lambda: '')
  monkeypatch.setattr(reproducing.platform, 'machine', lambda: 'armv9')
  assert reproducing.hardware() == '6 cores of armv9'
  about.write_text('processor : 0\nflags: x\n')
  assert reproducing.hardware() == '6 cores of armv9'
  about.write_text('processor : 0\nmodel name\t: Z1: fast\nmodel name : no\n')
  assert reproducing.hardware() == '6 cores of Z1: fast'
  monkeypatch.setattr(reproducing, 'usable_cores', lambda: 1)
  assert reproducing.hardware() == '1 core of Z1: fast'
  device = types.SimpleNamespace(platform='tpu', device_kind='TPU v3')
  monkeypatch.setattr(reproducing.jax, 'devices', lambda: [device])
  monkeypatch.setattr(reproducing.jax, 'device_count', lambda: 8)
  assert reproducing.hardware() == '8 x TPU v3'


def test_a_checksum_is_of_what_differs_from_the_defaults():
  config = flags.config_named('digits')
  same, other = flags.config_named('digits'), flags.config_named('digits')
  other.optimizer.lr = 0.5
  found = [evidence.checksum(x) for x in (config, same, other)]
  assert found[0] == found[1] != found[2] and len(found[0]) == 12
  # Fields that another architecture shares count there even at their defaults.
  resnet = flags.config_named('digits:resnet')
  first = evidence.checksum(resnet)
  resnet.model.width = 768
  second = evidence.checksum(resnet)
  with resnet.unlocked():
    del resnet.model['width']
  assert len({first, second, evidence.checksum(resnet)}) == 3
  # In whatever order fields were added.
  with resnet.unlocked():
    resnet.model.width = 768
  assert evidence.checksum(resnet) == second


def test_seeds_are_complete_and_in_their_order():
  def row(variant, seed, status='done'):
    texts = {'variant': variant, 'seed': seed, 'status': status}
    return evidence.RunRow(texts, {'x': float(seed)})

  rows = [row('b', '10'), row('a', '10'), row('a', '9'), row('b', '9')]
  rows += [row('a', '0'), row('b', '0', 'diverged'), row('c', '9')]
  found = evidence.by_seed(rows, ['b', 'a'])
  assert list(found) == ['9', '10'] and list(found['9']) == ['b', 'a']
  assert found['10'] == {'a': {'x': 10.0}, 'b': {'x': 10.0}}
