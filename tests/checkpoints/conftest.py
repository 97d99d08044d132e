"""What the tests of reading, writing and fetching share."""

import pytest

from vit_jax.checkpoints.formats import archive


class _Bar:
  """What is used of a `tqdm`, with its numbers.

  Attributes:
    what: said beside it.
    total: bytes at its end.
    done: bytes so far.
  """

  def __init__(self, what, total_bytes):
    self.what, self.total, self.done = what, total_bytes, 0

  def __enter__(self):
    return self

  def __exit__(self, *args):
    pass

  def reset(self, total_bytes):
    self.total, self.done = total_bytes, 0

  def update(self, count):
    self.done += count


@pytest.fixture
def bars(monkeypatch):
  """A list that every bar shown comes to."""
  shown = []

  def progress(*args):
    shown.append(_Bar(*args))
    return shown[-1]

  monkeypatch.setattr(archive, 'progress', progress)
  return shown
