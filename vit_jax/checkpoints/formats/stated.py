"""Values that a configuration states, read with distrust.

Every refusal is a ValueError that names the file, the key and the value.
"""

import math
from collections.abc import Mapping
from typing import Any

Rgb = tuple[float, float, float]

MAX_SIDE = 1 << 16


def check(
  config: Mapping[str, Any],
  place: str,
  what: str,
  wanted: Mapping[str, Any],
  under: str = '',
) -> None:
  """Refuses a key whose value, if it is there, is not the one wanted.

  Args:
    config: values by key.
    place: of the file, for messages.
    what: has the value that is wanted.
    wanted: values by key, or tuples of them where any will do.
    under: the keys that lead to `config`.
  """
  for key, values in wanted.items():
    values = values if isinstance(values, tuple) else (values,)
    if key in config and config[key] not in values:
      raise ValueError(
        f'{place}: {under}{key} is {config[key]!r}, and {what} '
        f'{" or ".join(map(repr, values))}.'
      )


def table(value: Any, key: str, place: str) -> dict[str, Any]:
  """Returns a value as values by key, without those that are null."""
  if not isinstance(value, dict):
    raise ValueError(f'{place}: {key} is {value!r} and should be an object.')
  return {key: x for key, x in value.items() if x is not None}


def choice(value: Any, key: str, place: str, names: Mapping[str, Any]) -> Any:
  """Returns what is ours by their name."""
  if not isinstance(value, str) or value not in names:
    raise ValueError(
      f'{place}: {key} is {value!r}, and there is no such model here, only '
      f'{", ".join(names)}.'
    )
  return names[value]


def positive(value: Any, key: str, place: str) -> int:
  """Returns a value as an integer above 0."""
  if type(value) is not int or value < 1:
    raise ValueError(
      f'{place}: {key} is {value!r} and should be a positive integer.'
    )
  return value


def sides(value: Any, key: str, place: str) -> tuple[int, int]:
  """Returns (H, W) in pixels; one number stands for both."""
  found = value
  if isinstance(value, dict) and value.keys() == {'height', 'width'}:
    found = [value['height'], value['width']]
  if not isinstance(found, list):
    found = [found, found]
  if len(found) != 2 or not all(
    type(x) is int and 1 <= x <= MAX_SIDE for x in found
  ):
    raise ValueError(
      f'{place}: {key} is {value!r} and should be a height and a width in '
      f'pixels, from 1 to {MAX_SIDE:,}.'
    )
  return found[0], found[1]


def rgb(value: Any, key: str, place: str) -> Rgb:
  """Returns a number for each channel; one stands for all."""
  values = value if isinstance(value, list) else [value] * 3
  if len(values) != 3 or not all(
    type(x) in (int, float) and math.isfinite(x) for x in values
  ):
    raise ValueError(
      f'{place}: {key} is {value!r} and should be three numbers, for red, '
      'green and blue.'
    )
  red, green, blue = map(float, values)
  return red, green, blue


def interpolation(
  value: Any,
  key: str,
  place: str,
  names: Mapping[str, Any],
  warnings: list[str],
) -> str:
  """Returns our name of an interpolation; warns of those not here.

  Args:
    value: what is stated.
    key: of it.
    place: of the file, for messages.
    names: theirs by ours.
    warnings: gets a sentence where images are resized otherwise here.
  """
  for ours, theirs in names.items():
    if value == theirs:
      return ours
  warnings.append(
    f'{place}: {key} is {value!r}; here images are resized bilinearly.'
  )
  return 'bilinear'
