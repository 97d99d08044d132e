"""The axes of `config.sweep` and `config.tune`, and the cells they span.

`sweep_run` runs the cells, `tune` chooses between candidates for them.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.checkpoints.saving import absolute
from vit_jax.models import variants

RUNS = 'runs'

# A name, and by label the fields that a value of the axis sets.
Axis = tuple[str, tuple[tuple[str, dict[str, Any]], ...]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run of the grid.

  Attributes:
    labels: by the names of the axes.
    config: without a sweep.
    workdir: of this run alone.
    chosen: the fields that come from what is tuned.
  """

  labels: dict[str, str]
  config: ConfigDict
  workdir: epath.Path
  chosen: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return ' / '.join(self.labels.values())


def axis(config: ConfigDict, field: str, values: Iterable[str]) -> Axis:
  """Returns the axis, named after it, on which a field takes several values.

  Args:
    config: knows the field's type.
    field: dotted name, or `model` for variants.
    values: as text. 1e-3 and 0.001 give the same label, and thereby the same
      folder.

  Raises:
    ValueError: for a field or a value that there is not.
  """
  entries = []
  for text in values:
    trial = config.copy_and_resolve_references()
    config_lib.override(trial, {field: text})
    value = config_lib.flatten(trial).get(field, text)
    entries.append((f'{field.rpartition(".")[2]}={value}', {field: value}))
  return field, tuple(entries)


def add_axes(
  config: ConfigDict, sweeps: Sequence[str], tunes: Sequence[str] = ()
) -> None:
  """Adds axes given as FIELD=V1,V2,... to a config.

  Where the config has an axis of the same field already, the new values replace
  those. Where an axis of the sweep sets what is tuned, as with a grid of
  learning rates for each data set, all of these grids are changed.

  Args:
    config: gets the axes in `sweep` and `tune.axes`.
    sweeps: of `sweep`.
    tunes: of `tune.axes`.

  Raises:
    ValueError: for what is no such text, or a field or value there is not.
  """
  config.sweep = _extended(config, config.sweep, 'sweep', sweeps)
  config.tune.axes = _extended(config, config.tune.axes, 'tune', tunes)

  def with_tunes(fields: dict[str, Any]) -> dict[str, Any]:
    if 'tune.axes' not in fields:
      return fields
    axes = _extended(config, fields['tune.axes'], 'tune', tunes)
    return fields | {'tune.axes': axes}

  config.sweep = tuple(
    (name, tuple((label, with_tunes(fields)) for label, fields in values))
    for name, values in config.sweep
  )


def _extended(
  config: ConfigDict, axes: Sequence[Axis], flag: str, texts: Sequence[str]
) -> tuple[Axis, ...]:
  extended = list(axes)
  fields = []
  for text in texts:
    field, _, values = (part.strip() for part in text.partition('='))
    if not values:
      raise ValueError(
        f'--{flag}={text}: write a field and its values, as in '
        f'--{flag}=optimizer.lr=0.001,0.003.'
      )
    if field in fields:
      raise ValueError(
        f'--{flag}={field}=... is given twice: give all values at once.'
      )
    fields.append(field)
    same = (i for i, old in enumerate(extended) if sets_only(old, field))
    at = next(same, len(extended))
    new = axis(config, field, config_lib.split_commas(values))
    extended[at : at + 1] = [new]
  return tuple(extended)


def refuse_swept(config: ConfigDict, fields: Iterable[str]) -> None:
  """Refuses values for fields that the sweep sets, or the tuning chooses.

  Raises:
    ValueError: naming the first such field and how to set it.
  """
  tuned = config.tune.axes + tuple(
    tune_axis
    for _, values in config.sweep
    for _, entry in values
    for tune_axis in entry.get('tune.axes', ())
  )
  for field in fields:
    for what, flag, axes in (
      ('sweep', 'sweep', config.sweep),
      ('tuning', 'tune', tuned),
    ):
      for found in axes:
        if field in _fields(found):
          hint = 'leave it out, every run has its own'
          if sets_only(found, field):
            hint = f'choose its values with --{flag}={field}=...'
          raise ValueError(
            f'{field} is set by the axis {found[0]!r} of the {what}: {hint}'
          )


def cells(config: ConfigDict, workdir: str) -> list[Cell]:
  """Returns the runs of a config's sweep in their order.

  What is tuned is not chosen yet: `tune.entries` gives the runs of that.

  Raises:
    ValueError: for axes, labels or values that do not work.
  """
  check_axes(config.sweep)
  found: dict[epath.Path, Cell] = {}
  for combination in itertools.product(*(values for _, values in config.sweep)):
    cell_config = config.copy_and_resolve_references()
    cell_config.sweep = cell_config.sweep_skip = ()
    for _, fields in combination:
      set_fields(cell_config, fields)
    flat = config_lib.flatten(cell_config)
    if any(
      all(flat.get(k) == v for k, v in skip.items())
      for skip in config.sweep_skip
    ):
      continue
    labels = {
      name: label
      for (name, _), (label, _) in zip(config.sweep, combination, strict=True)
    }
    cell = Cell(labels, cell_config, folder(workdir, RUNS, labels))
    if cell.workdir in found:
      raise shared_folder(found[cell.workdir], cell)
    found[cell.workdir] = cell
  if not found:
    raise ValueError(
      'The sweep has no runs: an axis has no values, or sweep_skip leaves all '
      'of them out.'
    )
  return list(found.values())


def check_axes(axes: Sequence[Axis], tune_axes: Sequence[Axis] = ()) -> None:
  """Refuses axes that get in each other's way.

  Raises:
    ValueError: naming them.
  """
  owners = [(swept, f'{swept[0]!r} of the sweep') for swept in axes]
  owners += [(tuned, f'{tuned[0]!r} of the tuning') for tuned in tune_axes]
  seen: dict[str, str] = {}
  for found, owner in owners:
    for field in sorted(_fields(found)):
      if field in seen:
        raise ValueError(
          f'The axes {seen[field]} and {owner} both set {field}.'
        )
      seen[field] = owner
  names = [found[0] for found, _ in owners]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f'Two axes are named {name!r}.')


def shared_folder(first: Cell, second: Cell) -> ValueError:
  return ValueError(
    f'{first.name} and {second.name} would share the folder '
    f'{first.workdir.name}: give every value of an axis once, with its own '
    'label.'
  )


def set_fields(config: ConfigDict, fields: dict[str, Any]) -> None:
  """Sets fields to what a value of an axis has for them."""
  config_lib.override(config, {k: str(v) for k, v in fields.items()})


def folder(workdir: str, kind: str, labels: dict[str, str]) -> epath.Path:
  """Returns the workdir of a run: WORKDIR/KIND/LABEL_LABEL."""
  return absolute(workdir) / kind / '_'.join(map(slug, labels.values()))


def slug(label: str) -> str:
  """Returns a label as a part of a folder's name."""
  text = re.sub(r'[^\w.=+-]+', '-', label)
  return re.sub(r'\.(?!\d)', '', text).strip('-')


def seed_axes(config: ConfigDict) -> list[str]:
  """Returns the names of the axes that repeat runs with other seeds."""
  return [found[0] for found in config.sweep if sets_only(found, 'seed')]


def sets_only(found: Axis, field: str) -> bool:
  """Whether an axis is one of this field alone."""
  return {key for _, fields in found[1] for key in fields} == {field}


def _fields(found: Axis) -> set[str]:
  """Returns the fields that an axis sets, with those of a named model."""
  fields = set()
  for _, entry in found[1]:
    fields |= set(entry)
    if 'model' in entry:
      fields |= {f'model.{key}' for key in variants.fields(entry['model'])}
  return fields
