"""Fields of models, each declared once.

The config, the checks of `variants.build`, the list of `python -m
vit_jax.models --fields` and the limits of foreign formats come from that
declaration.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

# An interval, as in '[0, 1)', or all values.
Valid = str | tuple[Any, ...]
# Instead of a default: the field has to be given.
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
    default: its default, or `REQUIRED`.
    doc: what it does, in a sentence.
    valid: its values, as `check_value` takes them; empty for any.
    multiple: the number it is a multiple of.
    unless: another field; where that is set, this one stays at its default.
    needs: another field; where that is 0, this one stays at its default.
  """
  metadata = dict(
    doc=doc, valid=valid, multiple=multiple, unless=unless, needs=needs
  )
  return dataclasses.field(default=default, metadata=metadata)


def check(
  declared: Iterable[dataclasses.Field[Any]],
  values: Mapping[str, Any],
  prefix: str = 'model.',
) -> None:
  """Checks values against their declarations.

  Args:
    declared: fields by `field`.
    values: by field, without those that keep their default.
    prefix: of names in messages.

  Raises:
    ValueError: naming field, value and way out.
  """
  declared = tuple(declared)
  values = {f.name: f.default for f in declared} | dict(values)
  for f in declared:
    of, name, value = f.metadata, prefix + f.name, values[f.name]
    if not of or value is REQUIRED:  # the constructor asks for it
      continue
    if of['valid']:
      check_value(name, value, of['valid'])
    if of['multiple'] > 1 and value % of['multiple']:
      raise ValueError(
        f'{name} is {value}: it has to be a multiple of {of["multiple"]}.'
      )
    if value == f.default:
      continue
    if of['unless'] and values[of['unless']]:
      raise ValueError(
        f'{name} is {value!r}, which {prefix}{of["unless"]} excludes: leave it '
        f'at {f.default!r}.'
      )
    if of['needs'] and not values[of['needs']]:
      raise ValueError(
        f'{name} is {value!r} and needs {prefix}{of["needs"]}, which is '
        f'{values[of["needs"]]!r}: set that too, or leave {name} at '
        f'{f.default!r}.'
      )


def check_value(name: str, value: Any, valid: Valid) -> None:
  """Checks a value, or each number of a tuple where `valid` is an interval.

  Raises:
    ValueError: naming the field, its value and the valid ones.
  """
  if isinstance(valid, tuple):
    if value not in valid:
      raise ValueError(
        f'{name} is {value!r}: use one of {", ".join(map(str, valid))}.'
      )
    return
  low, high = map(float, valid[1:-1].split(', '))
  for x in value if isinstance(value, list | tuple) else [value]:
    if not isinstance(x, int | float):
      raise ValueError(f'{name} is {value!r}, and {x!r} is not a number.')
    above = x > low or (x == low and valid[0] == '[')
    below = x < high or (x == high and valid[-1] == ']')
    if not (above and below):
      raise ValueError(
        f'{name} is {x}: it has to lie in {valid}'
        ' (a round bracket leaves out the end itself).'
      )


def frozen(model: Any) -> Any:
  """Returns the fields of a model as a hashable value with those attributes.

  Modules take it as a field, which they cannot do with another module.
  """
  names = tuple(f.name for f in model.own_fields())
  return _frozen(names)(**{name: getattr(model, name) for name in names})


@functools.cache
def _frozen(names: tuple[str, ...]) -> Any:
  return dataclasses.make_dataclass('Fields', names, frozen=True)
