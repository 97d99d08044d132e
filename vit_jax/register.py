"""Classes and modules by name, imported on first use.

  OBJECTIVES['mine'] = 'my_package.objective:Mine'

adds an objective from outside this package; a config can then name it.
"""

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class Register(dict[str, str]):
  """Maps names to 'module:Name' or 'module', which `load` imports."""

  def __init__(self, field: str, places: dict[str, str]):
    """Registers `places`; error messages of `load` begin with `field`."""
    super().__init__(places)
    self.field = field

  def load(self, name: str) -> Any:
    """Imports and returns the object of a name.

    Raises:
      ValueError: for an unknown name. The message lists similar or all names.
    """
    if name not in self:
      raise ValueError(f'{self.field} is {name!r}. {nearest(name, self)}')
    module, _, attribute = self[name].partition(':')
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def nearest(name: str, valid: Iterable[str]) -> str:
  """Returns 'Did you mean ...?' with similar valid names, or lists all."""
  valid = sorted(valid)
  # A config field may be given without its group, such as lr for optimizer.lr.
  close = [
    x for x in valid if x.endswith(f'.{name}')
  ] or difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
  if close:
    return f'Did you mean {" or ".join(close)}?'
  return f'Valid: {", ".join(valid)}.'
