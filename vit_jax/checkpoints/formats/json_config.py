"""Reads and writes the JSON configurations of other libraries.

`JsonConfig.fields` and `to_config` use tables that map keys to `Key`s.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from vit_jax.data.preprocessing import MAX_SIDE, Preprocessing


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
  """Drops null values, which mean the same as missing keys."""
  return {key: x for key, x in values.items() if x is not None}


class JsonConfig(dict[str, Any]):
  """An object of a JSON file, with methods that check its values.

  Checks raise a ValueError that names the file, the key and the value; errors
  of `preprocessing` name our field instead of the key.
  `prefix` is the path of the object inside the file, such as 'a.b.'.
  """

  def __init__(self, values: Mapping[str, Any], path: str, prefix: str = ''):
    super().__init__(values)
    self.path = path
    self.prefix = prefix
    # Sentences about assumptions and differences from the other library.
    self.warnings: list[str] = []

  def replace(self, values: Mapping[str, Any]) -> 'JsonConfig':
    """Returns an object with new values; keeps path, prefix and warnings."""
    found = JsonConfig(values, self.path, self.prefix)
    found.warnings = self.warnings
    return found

  def refuse(self, key: str, why: str) -> NoReturn:
    """Raises a ValueError about the value of a key."""
    raise ValueError(
      f'{self.path}: {self.prefix}{key} is {self.get(key)!r}{why}'
    )

  def warn(self, sentence: str) -> None:
    """Adds a warning."""
    self.warnings.append(f'{self.path}: {sentence}')

  def part(self, key: str) -> 'JsonConfig':
    """Returns the object under a key, or {}; drops its null values."""
    part = self.get(key) or {}
    if not isinstance(part, dict):
      self.refuse(key, '; it must be an object.')
    found = self.replace(without_nulls(part))
    found.prefix = f'{self.prefix}{key}.'
    return found

  def fields(
    self, keys: Mapping[str, 'Key'], arrays: Mapping[str, Any], name: str
  ) -> dict[str, Any]:
    """Returns the model's fields that only the configuration determines.

    Raises ValueError if values are invalid, not supported, or contradict
    `arrays`: the fields that the arrays determine. `name` is for messages.
    """
    full = self.replace(
      {key: row.default for key, row in keys.items()} | without_nulls(self)
    )
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for key, (field, kind, _, only) in keys.items():
      if full[key] is None or not (field or only):
        continue
      value = full[key] if only else kind.read(full, key)
      wanted = only or (arrays.get(field),)
      if not only and field not in arrays:
        found[field] = value
      elif value not in wanted:
        by_default = '' if key in self else ' by default'
        wrong.append(
          f'{self.prefix}{key} is {full[key]!r}{by_default}, and '
          f'{"vit_jax supports only" if only else "the arrays have"} '
          f'{kind.write(wanted[0])!r:.100}'
        )
    if wrong:
      raise ValueError(f'{self.path} ({name}): {"; ".join(wrong)}.')
    return found

  def choice(self, key: str, names: Mapping[str, Any]) -> Any:
    """Translates the name under a key to our value."""
    value = self[key]
    if not isinstance(value, str) or value not in names:
      self.refuse(key, f'; vit_jax supports only {", ".join(names)}.')
    return names[value]

  def positive(self, key: str) -> int:
    """Returns the value of a key, which must be an integer above 0."""
    if type(self[key]) is not int or self[key] < 1:
      self.refuse(key, '; it must be a positive integer.')
    return self[key]

  def above_zero(self, key: str, most: int) -> float:
    """Returns the value of a key, which must be above 0 and at most `most`."""
    value = self[key]
    if type(value) not in (int, float) or not 0 < value <= most:
      self.refuse(key, f'; it must be above 0 and at most {most:,}.')
    return float(value)

  def sides(self, key: str, value: Any = None) -> tuple[int, int]:
    """Reads `value`, by default the value of `key`, as (H, W) in pixels."""
    found = self.get(key) if value is None else value
    if isinstance(found, dict) and found.keys() == {'height', 'width'}:
      found = [found['height'], found['width']]
    # A single number means a square.
    pair: list[Any] = found if isinstance(found, list) else [found, found]
    if [type(x) for x in pair] != [int, int] or not (
      1 <= min(pair) <= max(pair) <= MAX_SIDE
    ):
      self.refuse(
        key, f'; it must be height and width, from 1 to {MAX_SIDE:,} pixels.'
      )
    return pair[0], pair[1]

  def whole_patches(
    self, sides: tuple[int, int], patch: int
  ) -> tuple[int, int]:
    """Rounds (H, W) down to whole patches, as other libraries do.

    Warns if a side changes. A side smaller than a patch stays unchanged.
    """
    height, width = (side // patch * patch or side for side in sides)
    if (height, width) != sides:
      self.warn(
        f'images have {sides[0]}x{sides[1]} pixels, which patches of {patch} '
        f'do not tile; vit_jax uses {height}x{width}.'
      )
    return height, width

  def rgb(self, key: str) -> tuple[float, float, float]:
    """Returns three numbers, one per channel; a single number is repeated."""
    value = self[key] if isinstance(self[key], list) else [self[key]]
    values = value * 3 if len(value) == 1 else value
    if len(values) != 3 or not all(
      # A JSON integer may be too large for a float.
      type(x) in (int, float) and abs(x) <= sys.float_info.max
      for x in values
    ):
      self.refuse(key, '; it must be three numbers, for red, green and blue.')
    red, green, blue = map(float, values)
    return red, green, blue

  def interpolation(self, key: str, names: Mapping[str, Any]) -> str:
    """Returns our name of an interpolation.

    `names` maps our names to the other library's values. For other values,
    warns and returns 'bilinear'.
    """
    for ours, theirs in names.items():
      if self[key] == theirs:
        return ours
    self.warn(f'{key} is {self[key]!r}; vit_jax resizes bilinearly.')
    return 'bilinear'

  def preprocessing(self, **fields: Any) -> Preprocessing:
    """Returns a `Preprocessing`; ValueErrors name the file."""
    try:
      return Preprocessing(**fields)
    except ValueError as e:
      raise ValueError(f'{self.path}: {e}') from e


class Kind(NamedTuple):
  """Functions that convert a value between a file and our models.

  `read` maps a `JsonConfig` and a key to our value, and may raise ValueError.
  `write` maps our value to the value in the file.
  """

  read: Callable[[JsonConfig, str], Any] = lambda config, key: config[key]
  write: Callable[[Any], Any] = lambda value: value


class Key(NamedTuple):
  """How a key of a configuration corresponds to a field of our models."""

  # The field that the key is compared with; '' if it is not compared.
  field: str = ''
  kind: Kind = Kind()
  default: Any = None  # assumed if the key is missing; None: no check then
  only: tuple[Any, ...] = ()  # the supported values, for a key without a field


def choices(names: Mapping[str, Any]) -> Kind:
  """Returns the `Kind` of a key whose value must be one of `names`.

  `names` maps the other library's names to our values. If several names have
  the same value, the first of them is written.
  """
  ours = {value: theirs for theirs, value in reversed([*names.items()])}
  return Kind(lambda config, key: config.choice(key, names), ours.__getitem__)


def only(values: Mapping[str, Any]) -> dict[str, Key]:
  """Returns table rows for keys that must have the given values."""
  return {key: Key(only=(value,)) for key, value in values.items()}


def to_config(
  keys: Mapping[str, Key], fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns each key's first value in `only`, or else its field's value."""
  return {
    key: row.only[0] if row.only else row.kind.write(fields[row.field])
    for key, row in keys.items()
    if row.only or row.field in fields
  }


def _square(config: JsonConfig, key: str) -> Any:
  value = config[key]
  is_pair = isinstance(value, list) and len(value) == 2
  return value[0] if is_pair and value[0] == value[1] else value


POSITIVE = Kind(JsonConfig.positive)
EPSILON = Kind(lambda config, key: config.above_zero(key, 1))
LARGE = Kind(lambda config, key: config.above_zero(key, 10**9))
SQUARE = Kind(_square)
SIDES = Kind(JsonConfig.sides, lambda hw: hw[0] if hw[0] == hw[1] else [*hw])
