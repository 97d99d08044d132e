"""Declares fields of models and objectives: default, meaning, valid values.

They define the config, the checks of `variants.build` and of checkpoint files,
and the output of `python -m vit_jax.models --fields`.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

# The valid values of a field: an interval such as '[0, 1)', or a tuple of all
# valid values.
Valid = str | tuple[Any, ...]
# Default of a field that must be given.
REQUIRED = dataclasses.MISSING


def field(
  default: Any,
  doc: str,
  *,
  valid: Valid = '',
  multiple: int = 1,
  unless: str = '',
  needs: str = '',
) -> Any:
  """Declares a field of a dataclass.

  Args:
    default: default value, or `REQUIRED`.
    doc: short description.
    valid: valid values; empty if all values are valid.
    multiple: number that must divide the value.
    unless: name of another field. If that field is set (not 0, False or empty),
      this field must keep its default.
    needs: name of another field. Unless that field is set, this field must keep
      its default.
  """
  metadata = dict(
    doc=doc, valid=valid, multiple=multiple, unless=unless, needs=needs
  )
  return dataclasses.field(default=default, metadata=metadata)


def check(
  declared: Iterable[dataclasses.Field[Any]], values: Mapping[str, Any]
) -> None:
  """Checks values of `config.model`; missing fields have their default.

  Raises:
    ValueError: if a value is invalid.
  """
  declared = tuple(declared)
  values = {f.name: f.default for f in declared} | dict(values)
  for f in declared:
    of, name, value = f.metadata, f'model.{f.name}', values[f.name]
    if not of or value is REQUIRED:  # a constructor reports a missing value
      continue
    if of['valid']:
      check_value(name, value, of['valid'])
    if of['multiple'] > 1 and value % of['multiple']:
      raise ValueError(
        f'{name} is {value}; it must be a multiple of {of["multiple"]}.'
      )
    if value == f.default:
      continue
    if of['unless'] and values[of['unless']]:
      raise ValueError(
        f'{name} is {value!r}, which cannot be combined with '
        f'model.{of["unless"]}: leave it at {f.default!r}.'
      )
    if of['needs'] and not values[of['needs']]:
      raise ValueError(
        f'{name} is {value!r}, which needs model.{of["needs"]}, but '
        f'model.{of["needs"]} is {values[of["needs"]]!r}: set both, or leave '
        f'{name} at {f.default!r}.'
      )


def check_value(name: str, value: Any, valid: Valid) -> None:
  """Raises ValueError if a value, or a number in a sequence, is invalid."""
  if isinstance(valid, tuple):
    if value not in valid:
      raise ValueError(
        f'{name} is {value!r}; it must be one of {", ".join(map(str, valid))}.'
      )
    return
  ends = valid[1:-1].split(', ')
  low, high = map(float, ends)
  for x in value if isinstance(value, list | tuple) else [value]:
    if not isinstance(x, int | float):
      raise ValueError(f'{name} is {value!r:.200}: {x!r} is not a number.')
    above = x > low or (x == low and valid[0] == '[')
    below = x < high or (x == high and valid[-1] == ']')
    if not (above and below):
      words = (
        f'{"at least" if valid[0] == "[" else "above"} {ends[0]}',
        f'{"at most" if valid[-1] == "]" else "below"} {ends[1]}',
      )
      said = ' and '.join(x for x in words if not x.endswith('inf')) or 'finite'
      raise ValueError(f'{name} is {value!r:.200}; it must be {said}.')


def check_only(model: Any, user: str, **valid: tuple[Any, ...]) -> None:
  """Raises ValueError if a field has an unsupported value.

  `user` is what does not support the value, such as 'a masked autoencoder'.
  """
  for name, values in valid.items():
    if (value := getattr(model, name)) not in values:
      raise ValueError(
        f'model.{name} is {value!r}, which {user} does not support. Use '
        f'{" or ".join(map(repr, values))}.'
      )


def frozen(model: Any) -> Any:
  """Returns a hashable object with the fields of a model as attributes.

  Flax modules take this object as a field. The model itself would become their
  submodule.
  """
  names = tuple(f.name for f in model.own_fields())
  return _frozen(names)(**{name: getattr(model, name) for name in names})


@functools.cache
def _frozen(names: tuple[str, ...]) -> Any:
  return dataclasses.make_dataclass('Fields', names, frozen=True)
