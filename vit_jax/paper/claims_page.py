"""The report on the claims: one page that holds its pictures, and Markdown."""

import collections
import datetime
import html
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.data import whole
from vit_jax.paper import findings, rules
from vit_jax.paper.claims import CLAIMS, STUDIES, Claim
from vit_jax.paper.evidence import RunRow
from vit_jax.paper.findings import Finding
from vit_jax.paper.reproducing import Reproduction, command_of, span
from vit_jax.sweeps import grid
from vit_jax.training import plots
from vit_jax.visualize import page

_LAYER = re.compile(r'^layer\d+/|/\d+$')
_COLORS = {
  rules.SUPPORTED: '#00704f',
  rules.NOT_SUPPORTED: '#b04a00',
  rules.UNDECIDED: '#555555',
}
_STYLE = """\
  table { border-collapse: collapse; margin: 1rem 0; }
  th, td { padding: 0.2rem 1rem 0.2rem 0; text-align: left;
    vertical-align: top; font-variant-numeric: tabular-nums; }
  tr + tr { border-top: 1px solid #eee; }
  .wide { overflow-x: auto; }
  .verdict { font-weight: 600; white-space: nowrap; }
  code, pre { font-size: 0.85rem; overflow-wrap: anywhere;
    white-space: pre-wrap; }
  figure { margin: 1rem 0; }
  figure img { max-width: 100%; height: auto; }
  figcaption, .rule { font-size: 0.9rem; color: #555; }
"""
TITLE = 'The paper, measured again'


class ClaimsPage:
  """The report on some claims.

  Attributes:
    found: what the runs say of each.
    pictures: PNG files by name: of each claim with runs, but for those that an
      earlier one has drawn.
  """

  def __init__(
    self, names: Sequence[str], reproduction: Reproduction, command: str
  ):
    """Reads the runs that there are, and draws.

    Args:
      names: of `claims.CLAIMS`.
      reproduction: of these.
      command: that writes the report again.
    """
    self._reproduction, self._command = reproduction, command
    self._rows = {s: reproduction.rows(s) for s in reproduction.studies}
    self.found = [
      findings.find(
        name,
        self._rows[CLAIMS[name].study],
        reproduction.variants(CLAIMS[name].study),
      )
      for name in names
    ]
    self.pictures: dict[str, bytes] = {}
    drawn = set()
    for finding in self.found:
      claim = finding.claim
      rows = [r for r in self._rows[claim.study] if r.texts['status'] == 'done']
      key = claim.study, claim.shown, claim.against
      if rows and key not in drawn:
        drawn.add(key)
        self.pictures[f'{finding.name}.png'] = draw(claim, rows)

  def write(self, folder: epath.Path, stem: str = 'report') -> list[epath.Path]:
    """Writes STEM.html, STEM.md and STEM/*.png; returns the two pages."""
    folder.mkdir(parents=True, exist_ok=True)
    if self.pictures:
      (folder / stem).mkdir(exist_ok=True)
    for name, png in self.pictures.items():
      whole.replace(folder / stem / name, png)
    pages = {
      f'{stem}.html': self.page(),
      f'{stem}.md': self.markdown(stem),
    }
    for name, text in pages.items():
      whole.replace(folder / name, text.encode())
    return [folder / name for name in pages]

  def counts(self) -> str:
    """Returns how many claims there are, and how many have which verdict."""
    count = collections.Counter(finding.verdict for finding in self.found)
    verdicts = ', '.join(
      f'{count[verdict]} {verdict}' for verdict in _COLORS if count[verdict]
    )
    plural = 's' * (len(self.found) != 1)
    return f'{len(self.found)} claim{plural}: {verdicts}'

  def _about(self) -> list[str]:
    """Returns paragraphs on what was run, where and when."""
    rows = [row for found in self._rows.values() for row in found]
    planned = sum(map(len, self._reproduction.planned.values()))
    lines = [
      f'{self.counts()}. {len(rows)} of {planned} runs on '
      f'{self._reproduction.data} have finished; the report is of '
      f'{datetime.date.today().isoformat()}.',
      'Each claim is judged by a rule that was fixed before the runs: of a '
      'quantity the mean over the seeds has to lie within bounds, by a '
      "Student's t interval that leaves 5 % on either side, with "
      f'{rules.MIN_SEEDS} seeds. What reaches over a bound is not decided. '
      'The models are tiny and the data small: "supported" is said of these, '
      'and not of the paper at its size.',
    ]
    by_place: dict[tuple[str, str], list[RunRow]] = {}
    for row in rows:
      place = row.texts['hardware'], row.texts['versions']
      by_place.setdefault(place, []).append(row)
    for (hardware, versions), same in by_place.items():
      dates = sorted(row.texts['date'] for row in same)
      days = ' to '.join(dict.fromkeys((dates[0], dates[-1])))
      taken = sum(row.numbers['seconds'] for row in same)
      lines.append(
        f'{len(same)} run{"s" * (len(same) != 1)} on {hardware}, {versions}, '
        f'{days}: {span(taken)} in all.'
      )
    return lines

  def _numbers(self, study: str) -> tuple[list[str], list[list[str]]]:
    """Returns heads and rows of the table of a study's numbers."""
    metrics = dict.fromkeys(
      metric
      for finding in self.found
      if finding.claim.study == study
      for metric in (*finding.claim.shown, finding.claim.against)
      if metric
    )
    lines = []
    for variant in self._reproduction.variants(study):
      rows = [
        row
        for row in self._rows[study]
        if row.key[0] == variant and row.texts['status'] == 'done'
      ]
      cells = [variant, str(len(rows))]
      for metric in metrics:
        values = [r.numbers[metric] for r in rows if metric in r.numbers]
        cells.append(
          grid.mean_text(values, len(values), 0, '{:.3g}'.format)
          if values
          else ''
        )
      lines.append(cells)
    return ['variant', 'seeds', *metrics], lines

  def markdown(self, stem: str) -> str:
    """Returns the report with links to the pictures in the folder STEM."""
    rows = [
      [f'{f.claim.sentence} (`{f.name}`)', f.claim.source, f.verdict]
      for f in self.found
    ]
    parts = [
      f'# {TITLE}',
      *self._about(),
      f'    {self._command}',
      'writes it again, after the runs that are left.',
      grid.table(['claim', 'of', 'verdict'], rows, left=3).rstrip(),
    ]
    for study, found in self._by_study().items():
      heads, lines = self._numbers(study)
      parts += [
        f'## {study}',
        STUDIES[study].what,
        f'    {command_of(study, self._reproduction.data)}',
        grid.table(heads, lines).rstrip(),
      ]
      for finding in found:
        parts.append(
          f'**{finding.claim.sentence}** ({finding.claim.source})\n\n'
          f'Rule: {finding.claim.rule.text}. {finding.reason}: '
          f'**{finding.verdict}**.'
        )
        if (picture := f'{finding.name}.png') in self.pictures:
          parts.append(f'![{finding.claim.caption}]({stem}/{picture})')
    return '\n\n'.join(parts) + '\n'

  def page(self) -> str:
    """Returns the report as a page that needs no other file."""
    escape = html.escape
    body = [f'<p>{escape(text)}</p>' for text in self._about()]
    body.append(
      f'<pre>{escape(self._command)}</pre>'
      '<p>writes it again, after the runs that are left.</p>'
    )
    rows = [
      f'<tr><td><a href="#{f.claim.study}">{escape(f.claim.sentence)}</a></td>'
      f'<td>{escape(f.claim.source)}</td><td>{_verdict(f)}</td></tr>'
      for f in self.found
    ]
    body.append(f'<div class="wide"><table>{"".join(rows)}</table></div>')
    for study, found in self._by_study().items():
      heads, lines = self._numbers(study)
      cells = [f'<tr>{"".join(f"<th>{escape(x)}</th>" for x in heads)}</tr>']
      cells += [
        f'<tr>{"".join(f"<td>{escape(x)}</td>" for x in line)}</tr>'
        for line in lines
      ]
      body += [
        f'<h2 id="{study}">{escape(STUDIES[study].what)}</h2>',
        f'<pre>{escape(command_of(study, self._reproduction.data))}</pre>',
        f'<div class="wide"><table>{"".join(cells)}</table></div>',
      ]
      for finding in found:
        body.append(
          f'<h3>{escape(finding.claim.sentence)}</h3>'
          f'<p>{escape(finding.claim.source)}. {_verdict(finding)}</p>'
          f'<p class="rule">Rule: {escape(finding.claim.rule.text)}. '
          f'{escape(finding.reason)}.</p>'
        )
        if png := self.pictures.get(f'{finding.name}.png'):
          body.append(page.figure(png, finding.claim.caption))
    return page.document(TITLE, _STYLE, '\n'.join(body))

  def _by_study(self) -> dict[str, list[Finding]]:
    return {
      study: [f for f in self.found if f.claim.study == study]
      for study in self._reproduction.studies
    }


def _verdict(finding: Finding) -> str:
  color = _COLORS[finding.verdict]
  return (
    f'<span class="verdict" style="color: {color}">{finding.verdict}</span>'
  )


def draw(claim: Claim, rows: Sequence[RunRow]) -> bytes:
  """Returns a claim's picture of runs that have finished, a PNG."""
  figure = plots.figure(5.5, 3)
  axes = figure.subplots()
  groups: dict[str, list[Mapping[str, float]]] = {}
  for row in rows:
    groups.setdefault(row.key[0], []).append(row.numbers)
  if claim.against:
    for i, (variant, runs) in enumerate(groups.items()):
      style = plots.style(i) | {'linestyle': '', 'label': variant}
      axes.plot(
        [run[claim.against] for run in runs],
        [run[claim.shown[0]] for run in runs],
        **style,
      )
    axes.set_xlabel(claim.against)
    axes.set_ylabel(claim.shown[0])
    of_all = [row.numbers[claim.against] for row in rows]
    # Within less than that a logarithmic axis names every tenth, one over the
    # other.
    if claim.against == 'gflops' and max(of_all) > 3 * min(of_all):
      axes.set_xscale('log')
    plots.legend(figure, axes.get_legend_handles_labels()[0], 'right center')
  elif all(map(_LAYER.search, claim.shown)):
    for i, (variant, runs) in enumerate(groups.items()):
      of_layers = [[run[m] for run in runs if m in run] for m in claim.shown]
      heights = [statistics.mean(values) for values in of_layers if values]
      axes.plot(range(len(heights)), heights, label=variant, **plots.style(i))
    axes.set_xlabel('layer')
    axes.set_ylabel(_LAYER.sub('', claim.shown[0]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize='small')
  else:
    _draw_values(axes, claim.shown, groups)
  plots.tidy(axes)
  return plots.png(figure, dots_per_inch=80)


def _draw_values(
  axes: Any,
  shown: Sequence[str],
  groups: Mapping[str, Sequence[Mapping[str, float]]],
) -> None:
  """Draws a line of dots, the seeds, for each variant and each metric."""
  lines = [(v, metric) for v in groups for metric in shown]
  names = [v if len(shown) == 1 else f'{v}, {metric}' for v, metric in lines]
  for y, (variant, metric) in enumerate(lines):
    values = [run[metric] for run in groups[variant] if metric in run]
    axes.plot(values, [y] * len(values), 'o', alpha=0.6, color='#0072B2')
    if len(values) > 1:
      mean, deviation = grid.moments(values)
      axes.errorbar(
        mean, y, xerr=deviation, color='black', capsize=4, marker='|'
      )
  axes.set_yticks(range(len(names)), names)
  axes.set_ylim(len(names) - 0.5, -0.5)
  axes.margins(x=0.1)
  axes.set_xlabel(shown[0] if len(shown) == 1 else shown[0].partition('/')[0])


def listed(names: Sequence[str], reproduction: Reproduction) -> str:
  """Returns a table of the claims: runs that are left and their time."""
  left = reproduction.left()
  lines = []
  for name in names:
    source, study = CLAIMS[name].source, CLAIMS[name].study
    runs = [run for run in left if run.study == study]
    count = len(reproduction.planned[study])
    done = f'{count - len(runs)}/{count}'
    taken = span(sum(map(reproduction.seconds, runs))) if runs else '-'
    lines.append([name, source, study, done, taken])
  total = span(sum(map(reproduction.seconds, left)))
  text = grid.table(['claim', 'of', 'runs', 'done', 'time left'], lines, left=3)
  return (
    f'{text}\n{len(left)} runs are left, about {total}; claims of the same '
    'runs share them.'
  )
