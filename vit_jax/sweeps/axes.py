"""The axes of `config.sweep` and `config.tune`, and their grid of runs."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints.saving import absolute
from vit_jax.models import variants

RUNS = 'runs'

# The name of an axis, and its values. A value is a label and config fields.
Axis = tuple[str, tuple[tuple[str, dict[str, Any]], ...]]
# One value of each axis: labels by the name of the axis, and the config fields
# that the values set.
Combination = tuple[dict[str, str], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """A run or a trial of a sweep."""

  labels: dict[str, str]  # by the name of the axis
  config: ConfigDict  # without a sweep
  workdir: epath.Path
  chosen: dict[str, Any]  # values of the tuned fields, by field

  @property
  def name(self) -> str:
    return name_of(self.labels)


def axis(config: ConfigDict, field: str, values: Iterable[str]) -> Axis:
  """Returns an axis on which one field takes several values.

  `field` is a config field, or `model` or `objective` with names as values. It
  names the axis. The values get the type of the field in `config`: 1e-3 and
  0.001 are the same.

  Raises ValueError if the field is unknown or a value has the wrong type.
  """
  entries = {}
  for text in values:
    trial = config.copy_and_resolve_references()
    config_lib.override(trial, {field: text})
    value = config_lib.flatten(trial).get(field, text)
    entries[f'{field.rpartition(".")[2]}={value}'] = {field: value}
  return field, tuple(entries.items())


def add_axes(
  config: ConfigDict, sweeps: Sequence[str], tunes: Sequence[str] = ()
) -> None:
  """Adds axes given as FIELD=V1,V2,... to a config's `sweep` and `tune.axes`.

  New values replace those of an axis that sets only this field. `tunes` also
  apply to every `tune.axes` that an axis of the sweep sets, such as learning
  rates per dataset.

  Raises ValueError if a text lacks values; also the errors of `axis`.
  """
  config.sweep = _extended(config, config.sweep, 'sweep', sweeps)
  config.tune.axes = _extended(config, config.tune.axes, 'tune', tunes)
  for _, values in config.sweep:
    for _, fields in values:
      if (grid := fields.get('tune.axes')) is not None:
        fields['tune.axes'] = _extended(config, grid, 'tune', tunes)


def _extended(
  config: ConfigDict, axes: Sequence[Axis], flag: str, texts: Sequence[str]
) -> tuple[Axis, ...]:
  values: dict[str, list[str]] = {}
  for text in texts:
    field, _, listed = (part.strip() for part in text.partition('='))
    new = config_lib.split_commas(listed.removesuffix(','))
    if not any(new):
      raise ValueError(
        f'--{flag}={text} lacks values. Write a field and its values, as in '
        f'--{flag}=optimizer.lr=0.001,0.003.'
      )
    values.setdefault(field, []).extend(new)
  given = {name: axis(config, name, values[name]) for name in values}
  extended = []
  for old in axes:
    same = next((field for field in given if sets_only(old, field)), None)
    extended.append(given.pop(same) if same else old)
  return (*extended, *given.values())


def refuse_swept(config: ConfigDict, fields: Iterable[str]) -> None:
  """Raises ValueError if an axis sets one of the command line's `fields`."""
  grids = [('sweep', config.sweep), ('tune', config.tune.axes)]
  grids += [
    ('tune', entry.get('tune.axes', ()))
    for _, values in config.sweep
    for _, entry in values
  ]
  for flag, found in ((flag, found) for flag, grid in grids for found in grid):
    own = _fields(found)
    for field in sorted(own & set(fields)):
      hint = 'Leave it out: every run has its own value.'
      if sets_only(found, field):
        hint = f'Choose its values with --{flag}={field}=...'
      raise ValueError(f'{field} is set by the axis {found[0]!r}. {hint}')


def combinations(axes: Sequence[Axis]) -> Iterator[Combination]:
  """Yields all combinations of values; the last axis changes fastest."""
  for values in itertools.product(*(values for _, values in axes)):
    names = (name for name, _ in axes)
    labels = dict(zip(names, (label for label, _ in values), strict=True))
    yield labels, {k: v for _, fields in values for k, v in fields.items()}


def cells(config: ConfigDict, workdir: str) -> list[Cell]:
  """Returns the runs of a sweep in order, without tuned fields.

  Raises ValueError if a field of an axis or of `sweep_skip` is unknown, if two
  axes set a field, if a value has the wrong type, or if there are no runs.
  """
  check_axes(config.sweep)
  planned = []
  for labels, fields in combinations(config.sweep):
    cell_config = config.copy_and_resolve_references()
    cell_config.sweep = cell_config.sweep_skip = ()
    set_fields(cell_config, fields)
    cell = Cell(labels, cell_config, folder(workdir, RUNS, labels), {})
    planned.append((cell, fields | config_lib.flatten(cell_config)))
  known = set(config_lib.flatten(config)).union(*(x for _, x in planned))
  for field in (field for skip in config.sweep_skip for field in skip):
    if field not in known:
      raise ValueError(f'sweep_skip: {config_lib.unknown_field(field, known)}')
  found = [
    cell
    for cell, values in planned
    if not any(skip.items() <= values.items() for skip in config.sweep_skip)
  ]
  if not found:
    raise ValueError(
      'The sweep has no runs: an axis has no values, or sweep_skip matches '
      'every run. Add values or change sweep_skip.'
    )
  return found


def check_axes(axes: Sequence[Axis], tune_axes: Sequence[Axis] = ()) -> None:
  """Raises ValueError if two axes set the same field or share a name."""
  owners: dict[str, str] = {}
  named = [('sweep', x) for x in axes] + [('tune', x) for x in tune_axes]
  for kind, found in named:
    for field in sorted(_fields(found) | {found[0]}):
      if field in owners:
        raise ValueError(
          f'{field} belongs to two axes: {owners[field]} and {found[0]!r} of '
          f'{kind}. Remove or rename one of them.'
        )
      owners[field] = f'{found[0]!r} of {kind}'


def set_fields(config: ConfigDict, fields: dict[str, Any]) -> None:
  """Like `config.override`, but takes values of any type."""
  config_lib.override(config, {k: str(v) for k, v in fields.items()})


def folder(workdir: str, kind: str, labels: dict[str, str]) -> epath.Path:
  """Returns the folder of a run, such as WORKDIR/KIND/lr=0.001_seed=0."""
  slugs = (re.sub(r'[^\w.=+-]+', '-', label) for label in labels.values())
  slugs = (re.sub(r'\.(?!\d)', '', slug).strip('-') for slug in slugs)
  return absolute(workdir) / kind / '_'.join(slugs)


def name_of(labels: dict[str, str]) -> str:
  """Joins labels to a readable name."""
  return ' / '.join(labels.values())


def seed_axes(config: ConfigDict) -> list[str]:
  """Returns the names of the axes that only set the seed."""
  return [found[0] for found in config.sweep if sets_only(found, 'seed')]


def sets_only(found: Axis, field: str) -> bool:
  """Whether an axis sets this field and no other field."""
  return {key for _, fields in found[1] for key in fields} == {field}


@contextlib.contextmanager
def naming(what: object) -> Iterator[None]:
  """Turns ValueError and FileNotFoundError into a ValueError naming `what`."""
  try:
    yield
  except (ValueError, FileNotFoundError) as e:
    raise ValueError(f'{what}: {e}') from e


def _fields(found: Axis) -> set[str]:
  """Returns the fields that an axis sets, directly or by a name."""
  fields = set()
  for _, entry in found[1]:
    fields |= set(entry)
    if 'model' in entry:
      fields |= {f'model.{key}' for key in variants.fields(entry['model'])}
    if 'objective' in entry:
      fields.add('objective.name')
  return fields
