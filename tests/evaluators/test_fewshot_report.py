"""Tables and pictures of few-shot accuracy against sums by hand."""

import random

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from vit_jax.evaluators import __main__
from vit_jax.evaluators import fewshot_report as report
from vit_jax.evaluators.shots import Result

# Not in order: 1 and 10 shots with three seeds, 5 with one.
CURVE = report.Curve(
  'mine',
  [
    Result(10, 1, 4.0, 0.8),
    Result(1, 0, 1024.0, 0.25),
    Result(1, 2, 1024.0, 0.35),
    Result(10, 0, 0.25, 0.7),
    Result(10, 2, 0.3, 0.9),
    Result(5, 0, 2.0, 0.6),
    Result(1, 1, 1024.0, 0.3),
  ],
  report.ProbeResult(0.125, 0.9875),
)

CSV = """\
shots,seed,l2,accuracy
1,0,1024.0,0.25
1,1,1024.0,0.3
1,2,1024.0,0.35
5,0,2.0,0.6
10,0,0.25,0.7
10,1,4.0,0.8
10,2,0.3,0.9
all,,0.125,0.9875
"""


def without_probe(curve=CURVE):
  return report.Curve(curve.label, curve.results)


def test_csv_has_a_line_for_each_draw_and_one_for_the_probe():
  assert report.csv_text(CURVE) == CSV
  assert report.csv_text(without_probe()) == CSV[: CSV.index('all')]


def test_csv_is_read_as_it_was_written(tmp_path):
  rng = random.Random(0)
  curve = report.Curve(
    'x',
    [Result(k, s, rng.random(), rng.random()) for k in (1, 7) for s in (0, 1)],
    report.ProbeResult(rng.random(), rng.random()),
  )
  (tmp_path / 'fewshot.csv').write_text(report.csv_text(curve))
  assert report.read_csv(str(tmp_path / 'fewshot.csv'), 'x') == curve


def test_table_has_means_and_deviations_in_percent():
  # Deviations of .25, .3, .35 and of .7, .8, .9, with n - 1.
  assert report.table(CURVE).splitlines() == [
    'shots  accuracy in %, mean ± standard deviation of 3 seeds  l2',
    '    1  30.00 ± 5.00                                         2^10',
    '    5  60.00 (seeds: 1)                                     2^1',
    '   10  80.00 ± 10.00                                        2^-2 to 2^2',
    '  all  98.75                                                2^-3 (linear '
    'probe)',
  ]


def test_table_of_one_seed_has_no_deviation():
  curve = report.Curve('', [Result(2, 0, 0.3, 0.5), Result(4, 0, 0.0, 1.0)])
  assert report.table(curve).splitlines() == [
    'shots  accuracy in %  l2',
    '    2  50.00          0.3',
    '    4  100.00         0',
  ]


def drawn(*curves):
  axes = Figure().subplots()
  report.draw(axes, curves)
  return axes


def lines_of(axes, linestyle):
  return [x for x in axes.lines if x.get_linestyle() == linestyle]


def test_the_line_is_the_mean_with_bars_of_a_deviation():
  axes = drawn(CURVE)
  (mean,) = lines_of(axes, '-')
  assert list(mean.get_xdata()) == [1, 5, 10]
  assert list(mean.get_ydata()) == pytest.approx([0.3, 0.6, 0.8])
  (bars,) = axes.collections
  ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
  np.testing.assert_allclose(ends, [(0.25, 0.35), (0.6, 0.6), (0.7, 0.9)])
  (probe,) = lines_of(axes, '--')
  assert set(probe.get_ydata()) == {0.9875}
  assert not lines_of(drawn(without_probe()), '--')


def test_the_axis_of_shots_is_logarithmic_with_ticks_at_the_shots():
  axes = drawn(CURVE)
  assert axes.get_xscale() == 'log'
  assert list(axes.get_xticks()) == [1, 5, 10]
  assert not len(axes.get_xticks(minor=True))
  assert [t.get_text() for t in axes.get_xticklabels()] == ['1', '5', '10']
  assert axes.get_xlim() == pytest.approx((1 / 1.15, 10 * 1.15))


def legend_of(*curves):
  return {*drawn(*curves).get_legend_handles_labels()[1]}


def test_the_legend_says_what_there_is_and_no_more():
  other = report.Curve('other', [Result(1, 0, 1.0, 0.1)])
  probe = 'linear probe\n(all examples)'
  assert legend_of(CURVE) == {'mean over seeds', probe}
  assert legend_of(without_probe(), other) == {'mine', 'other'}
  assert legend_of(other) == {'mean over seeds'}


def write(folder, text=CSV):
  folder.mkdir(parents=True)
  (folder / 'fewshot.csv').write_text(text)
  return str(folder / 'fewshot.csv')


def test_command_compares_checkpoints_by_their_folders(tmp_path, capsys):
  files = [write(tmp_path / name) for name in ('l16', 'b16')]
  output = tmp_path / 'new' / 'folder' / 'both.png'
  assert __main__.main([*files, f'--output={output}']) == 0
  assert matplotlib.image.imread(output).std() > 0
  out, err = capsys.readouterr()
  assert err == ''
  assert f'l16\n{report.table(CURVE)}\nb16\n{report.table(CURVE)}' in out
  assert out.endswith(f'written  {output}\n')


def test_folders_of_one_name_are_told_apart_by_their_paths(monkeypatch):
  monkeypatch.chdir('/tmp')
  labels = report.folder_labels
  assert labels(['a/x/fewshot.csv', 'y/fewshot.csv']) == ['x', 'y']
  assert labels(['a/x/fewshot.csv', 'b/x/fewshot.csv']) == ['a/x', 'b/x']
  assert labels(['fewshot.csv', '/y/fewshot.csv']) == ['tmp', 'y']
  assert labels(['fewshot.csv', 'tmp/fewshot.csv']) == ['.', 'tmp']


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('step,test/accuracy\n1,2\n', 'line 1: other columns'),
    (CSV + 'five,0,1,1\n', 'line 10: '),
    (CSV.splitlines()[0], 'line 1: no results'),
  ],
)
def test_another_file_is_refused(tmp_path, capsys, text, message):
  path = write(tmp_path / 'a', text)
  assert __main__.main([path, f'--output={tmp_path}/x.png']) == 2
  out, err = capsys.readouterr()
  assert out == ''
  assert err.startswith(
    f'error: {path} is not a fewshot.csv with the columns s'
  )
  assert message in err
  assert err.count('\n') == 1
  assert not (tmp_path / 'x.png').exists()


def test_layers_have_a_row_each_and_the_best_is_marked():
  accuracies = {'block_0': 0.89, 'block_1': 0.9, 'pre_logits': 0.89}
  found = {k: report.ProbeResult(2.0, x) for k, x in accuracies.items()}
  assert report.layers_table(found).splitlines() == [
    'block_0      89.00%',
    'block_1      90.00%  best',
    'pre_logits   89.00%',
  ]
  assert report.layers_files(found, '')['layers.csv'] == (
    'layer,l2,accuracy\nblock_0,2.0,0.89\nblock_1,2.0,0.9\npre_logits,2.0,0.89\n'
  )
