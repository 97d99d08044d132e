"""Reads and writes configurations of other libraries with one table each.

A table maps each name in a config.json to a `Key`. `Stated.fields` uses it for
reading, `written` for writing.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from vit_jax.data.preprocessing import MAX_SIDE, Preprocessing

Rgb = tuple[float, float, float]


def given(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values without nulls, which mean missing values."""
  return {key: x for key, x in values.items() if x is not None}


class Stated(dict[str, Any]):
  """Values by key.

  Every refusal is a ValueError that names the file, the key and the value.

  Attributes:
    place: path of the file.
    under: the keys that lead to the values.
    warnings: one sentence for each difference from the other library.
  """

  def __init__(self, values: Mapping[str, Any], place: str, under: str = ''):
    """Holds the values; the other arguments are the attributes."""
    super().__init__(values)
    self.place = place
    self.under = under
    self.warnings: list[str] = []

  def with_values(self, values: Mapping[str, Any], under: str = '') -> 'Stated':
    """Returns other values of the same file."""
    found = Stated(values, self.place, under or self.under)
    found.warnings = self.warnings
    return found

  def refuse(self, key: str, why: str) -> NoReturn:
    """Raises a ValueError."""
    raise ValueError(
      f'{self.place}: {self.under}{key} is {self.get(key)!r}{why}'
    )

  def warn(self, sentence: str) -> None:
    """Takes a warning."""
    self.warnings.append(f'{self.place}: {sentence}')

  def part(self, key: str) -> 'Stated':
    """Returns the values that are `given` under a key, if any."""
    part = self.get(key) or {}
    if not isinstance(part, dict):
      self.refuse(key, ' and should be an object.')
    return self.with_values(given(part), f'{self.under}{key}.')

  def fields(
    self, keys: Mapping[str, 'Key'], arrays: Mapping[str, Any], name: str
  ) -> dict[str, Any]:
    """Returns the fields that only the configuration knows.

    Args:
      keys: the table of the format.
      arrays: the fields that the arrays show; what is stated must agree.
      name: of the architecture, for messages.

    Raises:
      ValueError: for an invalid value, or with all keys that contradict the
        arrays or the models here.
    """
    stated = self.with_values(
      {key: row.default for key, row in keys.items()} | given(self)
    )
    facts: dict[str, Any] = {}
    wrong: list[str] = []
    for key, (field, kind, _, only) in keys.items():
      if stated[key] is None or not (field or only):
        continue
      value = stated[key] if only else kind.read(stated, key)
      wanted = only or (arrays.get(field),)
      if not only and field not in arrays:
        facts[field] = value
      elif value not in wanted:
        by_default = '' if key in self else ' by default'
        wrong.append(
          f'{self.under}{key} is {stated[key]!r}{by_default}, and '
          f'{"models here" if only else "the arrays"} have '
          f'{kind.write(wanted[0])!r:.100}'
        )
    if wrong:
      raise ValueError(f'{self.place} ({name}): {"; ".join(wrong)}.')
    return facts

  def choice(self, key: str, names: Mapping[str, Any]) -> Any:
    """Returns our value by its name there."""
    value = self[key]
    if not isinstance(value, str) or value not in names:
      valid = ', '.join(names)
      self.refuse(key, f', and there is no such model here, only {valid}.')
    return names[value]

  def positive(self, key: str) -> int:
    """Returns an integer above 0."""
    if type(self[key]) is not int or self[key] < 1:
      self.refuse(key, ' and should be a positive integer.')
    return self[key]

  def above_zero(self, key: str, most: int) -> float:
    """Returns a number above 0 and at most `most`."""
    value = self[key]
    if type(value) not in (int, float) or not 0 < value <= most:
      self.refuse(key, f' and should be above 0 and at most {most:,}.')
    return float(value)

  def sides(self, key: str, value: Any = None) -> tuple[int, int]:
    """Returns (H, W) in pixels of a value, by default of the key's.

    One number stands for both.
    """
    found = self.get(key) if value is None else value
    if isinstance(found, dict) and found.keys() == {'height', 'width'}:
      found = [found['height'], found['width']]
    pair: list[Any] = found if isinstance(found, list) else [found, found]
    if [type(x) for x in pair] != [int, int] or not (
      1 <= min(pair) <= max(pair) <= MAX_SIDE
    ):
      self.refuse(
        key,
        ' and should be a height and a width in pixels, from 1 to '
        f'{MAX_SIDE:,}.',
      )
    return pair[0], pair[1]

  def tiled(self, sides: tuple[int, int], patch: int) -> tuple[int, int]:
    """Returns (H, W) in pixels without the rest that whole patches leave.

    Other libraries drop it silently: SigLIP sees 378 of its 384 pixels, and
    timm has it as a model of 378, too.
    """
    height, width = (side // patch * patch or side for side in sides)
    if (height, width) != sides:
      self.warn(
        f'images are of {sides[0]}x{sides[1]} pixels, which patches of {patch} '
        f'do not tile; here they are of {height}x{width}.'
      )
    return height, width

  def rgb(self, key: str) -> Rgb:
    """Returns a number for each channel; one stands for all."""
    value = self[key] if isinstance(self[key], list) else [self[key]]
    values = value * 3 if len(value) == 1 else value
    if len(values) != 3 or not all(
      # Integers may be larger than any of these.
      type(x) in (int, float) and abs(x) <= sys.float_info.max
      for x in values
    ):
      self.refuse(key, ' and should be three numbers, for red, green and blue.')
    red, green, blue = map(float, values)
    return red, green, blue

  def interpolation(self, key: str, names: Mapping[str, Any]) -> str:
    """Returns our name of it, given theirs by ours; warns of others."""
    for ours, theirs in names.items():
      if self[key] == theirs:
        return ours
    self.warn(f'{key} is {self[key]!r}; here images are resized bilinearly.')
    return 'bilinear'

  def preprocessing(self, **fields: Any) -> Preprocessing:
    """Returns how images are prepared, from what was read of this."""
    try:
      return Preprocessing(**fields)
    except ValueError as e:
      raise ValueError(f'{self.place}: {e}') from e


class Kind(NamedTuple):
  """Functions that read our value from a key (and may raise) and write it."""

  read: Callable[[Stated, str], Any] = lambda stated, key: stated[key]
  write: Callable[[Any], Any] = lambda value: value


class Key(NamedTuple):
  """How a key of a configuration and a field of ours state each other.

  Attributes:
    field: our name for it; empty if we have no such field.
    kind: how its value is read and written.
    default: value of a key that a file leaves out; None if that says nothing.
    only: instead of a field, the values that models here have.
  """

  field: str = ''
  kind: Kind = Kind()
  default: Any = None
  only: tuple[Any, ...] = ()


def named(names: Mapping[str, Any]) -> Kind:
  """Returns the kind of a value that has a name; writes the first of several.

  Args:
    names: our values by their names.
  """
  ours = {value: theirs for theirs, value in reversed([*names.items()])}
  return Kind(lambda stated, key: stated.choice(key, names), ours.__getitem__)


def only(values: Mapping[str, Any]) -> dict[str, Key]:
  """Returns the keys that have one value in all models here."""
  return {key: Key(only=(value,)) for key, value in values.items()}


def written(
  keys: Mapping[str, Key], fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the configuration of `fields`, those with a key among them."""
  return {
    key: row.only[0] if row.only else row.kind.write(fields[row.field])
    for key, row in keys.items()
    if row.only or row.field in fields
  }


def _square(stated: Stated, key: str) -> Any:
  value = stated[key]
  is_pair = isinstance(value, list) and len(value) == 2
  return value[0] if is_pair and value[0] == value[1] else value


POSITIVE = Kind(Stated.positive)
EPSILON = Kind(lambda stated, key: stated.above_zero(key, 1))
LARGE = Kind(lambda stated, key: stated.above_zero(key, 10**9))
SQUARE = Kind(_square)
SIDES = Kind(Stated.sides, lambda hw: hw[0] if hw[0] == hw[1] else [*hw])
