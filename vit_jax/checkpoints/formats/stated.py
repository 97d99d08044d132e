"""What a configuration states, read with distrust."""

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from vit_jax.data.preprocessing import MAX_SIDE, Preprocessing

Rgb = tuple[float, float, float]


def given(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns values but for nulls, which stand for what is left out."""
  return {key: x for key, x in values.items() if x is not None}


class Stated(dict[str, Any]):
  """Values by key.

  Every refusal is a ValueError that names the file, the key and the value.

  Attributes:
    place: of the file.
    under: the keys that lead to the values.
    warnings: a sentence on each thing that cannot be done alike here.
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

  def check(self, what: str, wanted: Mapping[str, Any]) -> None:
    """Refuses a value that is there and not the one wanted.

    Args:
      what: has the values that are wanted.
      wanted: by key; tuples where any of them will do.
    """
    for key, values in wanted.items():
      values = values if isinstance(values, tuple) else (values,)
      if key in self and self[key] not in values:
        self.refuse(key, f', and {what} {" or ".join(map(repr, values))}.')

  def choice(self, key: str, names: Mapping[str, Any]) -> Any:
    """Returns what is ours by their name."""
    value = self[key]
    if not isinstance(value, str) or value not in names:
      valid = ', '.join(names)
      self.refuse(key, f', and there is no such model here, only {valid}.')
    return names[value]

  def positive(self, key: str) -> int:
    """Returns an integer above 0."""
    value = self[key]
    if type(value) is not int or value < 1:
      self.refuse(key, ' and should be a positive integer.')
    return value

  def above_zero(self, key: str, most: int) -> float:
    """Returns a number above 0 and at most `most`."""
    value = self[key]
    if type(value) not in (int, float) or not 0 < value <= most:
      self.refuse(key, f' and should be above 0 and at most {most:,}.')
    return float(value)

  def sides(self, key: str, value: Any = None) -> tuple[int, int]:
    """Returns (H, W) in pixels; one number stands for both.

    Args:
      key: of it.
      value: that stands for what is stated; None for that itself.
    """
    found = self.get(key) if value is None else value
    if isinstance(found, dict) and found.keys() == {'height', 'width'}:
      found = [found['height'], found['width']]
    if not isinstance(found, list):
      found = [found, found]
    if len(found) != 2 or not all(
      type(x) is int and 1 <= x <= MAX_SIDE for x in found
    ):
      self.refuse(
        key,
        ' and should be a height and a width in pixels, from 1 to '
        f'{MAX_SIDE:,}.',
      )
    return found[0], found[1]

  def tiled(self, sides: tuple[int, int], patch: int) -> tuple[int, int]:
    """Returns (H, W) in pixels without what whole patches leave over.

    Others drop it unseen, as a convolution does: SigLIP sees 378 of its 384
    pixels, and timm has it as a model of 378 too. A warning says so.
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
    value = self[key]
    values = value if isinstance(value, list) else [value] * 3
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
