"""The report on claims: its tables, its page and what its pictures show."""

import html.parser
import io
import types

import matplotlib.image
import pytest
from etils import epath

from vit_jax.paper import claims, claims_page, rules
from vit_jax.paper.evidence import RunRow
from vit_jax.training import plots

ACCURACY = claims.ACCURACY


def rows(status='done', **numbers):
  """By variant the numbers of its seeds, a mapping each."""
  return [
    RunRow(
      {
        'variant': variant,
        'seed': str(seed),
        'status': status,
        'hardware': 'this',
        'versions': 'jax <1>',
        'date': f'2020-01-0{3 - seed}',
      },
      {'seconds': 60.0} | found,
    )
    for variant, seeds in numbers.items()
    for seed, found in enumerate(seeds)
  ]


class Reproduction:
  """Stands for runs that are there."""

  data = './a&b'

  def __init__(self, **studies):
    self.studies = [name for name in claims.STUDIES if name in studies]
    self._rows = studies
    self.planned = {name: 6 * [None] for name in studies}

  def rows(self, study):
    return self._rows[study]

  def variants(self, study):
    return list(dict.fromkeys(row.key[0] for row in self._rows[study]))


@pytest.fixture
def axial():
  """Both claims on Axial-ViT, one of which shares no picture."""
  found = {
    'ViT': [{ACCURACY: 0.8 + i / 1000, 'gflops': 1.0} for i in range(3)],
    'Axial-ViT': [{ACCURACY: 0.7, 'gflops': 2.0} for i in range(3)],
  }
  return Reproduction(axial=rows(**found))


class Cells(html.parser.HTMLParser):
  """The texts of a page by the tags around them."""

  def __init__(self, text):
    super().__init__()
    self.found, self._tags = {}, []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self._tags.append(tag)

  def handle_endtag(self, tag):
    while self._tags.pop() != tag:
      pass

  def handle_data(self, data):
    if self._tags and data.strip():
      self.found.setdefault(self._tags[-1], []).append(data)


def test_the_page_is_the_report_in_html(axial, tmp_path):
  page = claims_page.ClaimsPage(
    ['axial_gain', 'axial_cost'], axial, 'again --data=a&b'
  )
  assert page.counts() == '2 claims: 1 supported, 1 not supported'
  assert sorted(page.pictures) == ['axial_cost.png', 'axial_gain.png']
  text = page.page()
  found = Cells(text).found
  assert found['th'] == ['variant', 'seeds', ACCURACY, 'gflops']
  assert found['td'] == [
    *('ViT, D.6 and figure 13', 'ViT, D.6 and figure 13'),
    *('ViT', '3', '0.801 ± 0.001', '1 ± 0'),
    *('Axial-ViT', '3', '0.7 ± 0', '2 ± 0'),
  ]
  assert found['span'] == 2 * ['not supported', 'supported']
  assert found['pre'][0] == 'again --data=a&b' and '&amp;b' in text
  assert found['h2'] == [claims.STUDIES['axial'].what]
  assert found['figcaption'] == [
    claims.CLAIMS[name].caption for name in ('axial_gain', 'axial_cost')
  ]
  assert (
    '6 runs on this, jax <1>, 2020-01-01 to 2020-01-03: 6m in all.'
    in (found['p'])
  )
  # Each verdict has a colour of its own, and each row leads to its study.
  colours = [
    part.partition('"')[0] for part in text.split('class="verdict" style="')[1:]
  ]
  assert len(set(colours)) == 2
  assert text.count('href="#axial"') == 2 and text.count('id="axial"') == 1
  paths = page.write(epath.Path(tmp_path / 'new'), 'page')
  assert [path.name for path in paths] == ['page.html', 'page.md']
  assert sorted(p.name for p in (tmp_path / 'new/page').iterdir()) == sorted(
    page.pictures
  )


def test_claims_are_listed_as_asked_for_and_shown_by_study(axial):
  """Studies in their order, each with the numbers of its own claims alone."""
  few = {ACCURACY: 0.5, 'gflops': 1.0}
  axial.studies.append('data')
  axial.planned['data'] = 4 * [None]
  axial._rows['data'] = rows(
    **{f'{model}, few': [few] for model in ('ViT', 'ResNet')},
    **{f'{model}, all': [few] for model in ('ViT', 'ResNet')},
  )
  names = ['more_data', 'axial_gain', 'little_data']
  page = claims_page.ClaimsPage(names, axial, 'x')
  sentences = [claims.CLAIMS[name].sentence for name in names]
  found = Cells(page.page()).found
  assert found['a'] == sentences
  assert found['h3'] == [sentences[i] for i in (1, 0, 2)]
  assert found['h2'] == [claims.STUDIES[x].what for x in ('axial', 'data')]
  assert '10 of 10 runs on' in found['p'][0]
  heads, _ = page._numbers('data')
  assert heads == ['variant', 'seeds', ACCURACY]
  text = page.markdown('report')
  shown = [text.index(f'**{sentences[i]}**') for i in (1, 0, 2)]
  assert shown == sorted(shown)
  assert text.index('## axial') < shown[0] < text.index('## data') < shown[1]


def test_claims_of_one_picture_have_it_once(axial):
  found = {
    variant: [{ACCURACY: 0.8, 'gflops': 1.0}]
    for variant in ('small', 'depth', 'width', 'MLP', 'patch')
  }
  page = claims_page.ClaimsPage(
    ['depth', 'width', 'patch'], Reproduction(shape=rows(**found)), 'x'
  )
  assert list(page.pictures) == ['depth.png']
  assert page.counts() == f'3 claims: 3 {rules.UNDECIDED}'


def test_what_diverged_is_in_no_picture_and_no_number():
  found = rows('diverged', ViT=[{'gflops': 1.0}])
  page = claims_page.ClaimsPage(['axial_cost'], Reproduction(axial=found), 'x')
  assert not page.pictures
  assert page.counts() == f'1 claim: 1 {rules.UNDECIDED}'
  heads, lines = page._numbers('axial')
  assert (heads, lines) == (['variant', 'seeds', 'gflops'], [['ViT', '0', '']])


def lines_of(axes):
  return {
    line.get_label(): [list(map(float, x)) for x in line.get_data()]
    for line in axes.get_lines()
  }


def test_layers_are_drawn_in_their_order(figures):
  """The mean of the seeds, of as many layers as there are."""
  found = {
    'a': [{f'distance/{i}': i + seed for i in range(3)} for seed in (0, 1)],
    'b': [{'distance/0': 5.0, 'distance/1': 4.0}],
  }
  png = claims_page.draw(claims.CLAIMS['distance'], rows(**found))
  picture = matplotlib.image.imread(io.BytesIO(png))
  assert picture.shape[:2] == (3 * 80, 5.5 * 80)
  (axes,) = figures[0].axes
  assert lines_of(axes) == {
    'a': [[0, 1, 2], [0.5, 1.5, 2.5]],
    'b': [[0, 1], [5, 4]],
  }
  assert (axes.get_xlabel(), axes.get_ylabel()) == ('layer', 'distance')
  assert all(x.is_integer() for x in axes.get_xticks())
  assert axes.get_legend() is not None
  claims_page.draw(
    claims.CLAIMS['igpt_layers'],
    rows(a=[{'layer0/10shot_accuracy': 0.1, 'layer1/10shot_accuracy': 0.2}]),
  )
  (axes,) = figures[1].axes
  assert axes.get_ylabel() == '10shot_accuracy'
  assert lines_of(axes) == {'a': [[0, 1], [0.1, 0.2]]}


@pytest.mark.parametrize(
  ('name', 'last', 'scale'),
  [
    ('axial_gain', 3.5, 'log'),
    ('axial_gain', 2.5, 'linear'),
    ('fewshot', 3.5, 'linear'),
    ('igpt_likelihood', 3.5, 'linear'),
  ],
)
def test_a_measure_is_drawn_against_another(figures, name, last, scale):
  claim = claims.CLAIMS[name]
  (shown,) = claim.shown
  found = {
    'a': [{shown: 0.5, claim.against: 1.0}, {shown: 0.6, claim.against: 2.0}],
    'b': [{shown: 0.7, claim.against: last}],
  }
  claims_page.draw(claim, rows(**found))
  (axes,) = figures[0].axes
  assert lines_of(axes) == {'a': [[1, 2], [0.5, 0.6]], 'b': [[last], [0.7]]}
  assert (axes.get_xlabel(), axes.get_ylabel()) == (claim.against, shown)
  assert axes.get_xscale() == scale
  assert {line.get_linestyle() for line in axes.get_lines()} == {'None'}
  texts = figures[0].legends[0].get_texts()
  assert [text.get_text() for text in texts] == ['a', 'b']
  assert axes.get_lines()[0].get_color() == plots.style(0)['color']


def test_values_of_seeds_are_dots_around_their_mean(figures):
  found = {
    'a': [{'filters/share': 0.2, 'filters/random': 0.5}] * 1,
    'b': [{'filters/share': x} for x in (0.25, 0.5, 0.75)],
  }
  claims_page.draw(claims.CLAIMS['filters'], rows(**found))
  (axes,) = figures[0].axes
  assert [text.get_text() for text in axes.get_yticklabels()] == [
    f'{variant}, filters/{what}'
    for variant in 'ab'
    for what in ('share', 'random')
  ]
  dots = [x.get_xydata().tolist() for x in axes.lines if x.get_marker() == 'o']
  assert dots == [
    [[0.2, 0]],
    [[0.5, 1]],
    [[0.25, 2], [0.5, 2], [0.75, 2]],
    [],
  ]
  (bar,) = axes.containers  # of a single value there is no deviation
  assert (bar.lines[0].get_marker(), bar.lines[0].get_color()) == ('|', 'black')
  assert bar.lines[0].get_xydata().tolist() == [[0.5, 2]]
  assert bar.lines[2][0].get_segments()[0][:, 0].tolist() == [0.25, 0.75]
  assert axes.get_ylim() == (3.5, -0.5) and axes.get_xlabel() == 'filters'
  claims_page.draw(
    claims.CLAIMS['positions'], rows(a=[{'positions/nearness': 0.5}])
  )
  (axes,) = figures[1].axes
  assert [text.get_text() for text in axes.get_yticklabels()] == ['a']
  assert axes.get_xlabel() == 'positions/nearness'


def test_the_list_says_what_is_left(axial):
  """Two claims share runs, of which two of six are left, and one of others."""
  axial.left = lambda: [
    types.SimpleNamespace(study=study, seconds=s)
    for study, s in (('axial', 100), ('data', 180), ('axial', 140))
  ]
  axial.seconds = lambda run: run.seconds
  text = claims_page.listed(['axial_gain', 'axial_cost'], axial)
  source = 'ViT, D.6 and figure 13'
  assert text.splitlines()[2:] == [
    f'| axial_gain | {source} | axial | 4/6 | 4m |',
    f'| axial_cost | {source} | axial | 4/6 | 4m |',
    '',
    '3 runs are left, about 7m; claims of the same runs share them.',
  ]
  axial.left = lambda: []
  assert f'| axial_gain | {source} | axial | 6/6 | - |' in (
    claims_page.listed(['axial_gain'], axial)
  )
