"""The interface of sources."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

Record = dict[str, Any]


class Source(Protocol):
  """Base class of sources: records that the loader and the image check read.

  Attributes:
    class_names: a name for each label; empty if records have no labels.
    several_labels: whether a record may have any number of classes, even 0.
    skips_unreadable: whether the source gives the next image in place of an
      image that can no longer be read.
  """

  class_names: tuple[str, ...] = ()
  several_labels: bool = False
  skips_unreadable: bool = False

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Record: ...

  def fingerprint(self) -> str | None:
    """Returns a text that changes when images change; None to skip checks."""
    return None

  def identity(self) -> str | None:
    """Returns a hash of the data that stays the same if the folder moves.

    None means that `data.name` identifies the data.
    """
    return None

  def states(self, indices: Sequence[int]) -> Iterable[str] | None:
    """Returns a text for each record, which changes when the record changes.

    The image check repeats for records whose text is new, and skips all if the
    result is None. By default the text is the fingerprint and the index.
    """
    whole = self.fingerprint()
    return None if whole is None else (f'{whole} {i}' for i in indices)


@runtime_checkable
class LabelledSource(Source, Protocol):
  """A source whose records have a class."""

  def labels(self) -> np.ndarray:
    """Returns the classes of all records, int32 [N]; decodes no image."""
    ...


@runtime_checkable
class BoxedSource(Source, Protocol):
  """A source whose records have objects, each with a class and a box."""

  def objects(self, index: int) -> Mapping[str, Any]:
    """Returns the objects of an image, without decoding the image.

    Returns:
      boxes: float32 [N, 4], (x0, y0, x1, y1) in pixels.
      labels: int32 [N].
      crowd: bool [N], true for a box around many objects of a class.
      area: float [N], in pixels.
      size: the image's (height, width).
      masks: optional; for each object None or an argument of `segments.mask`.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Label:
  """The rule that gives a record of TFDS its class.

  Attributes:
    class_names: a name for each class.
    fields: maps each field to read to its inner fields to read, if it is a list
      of objects; () reads all inner fields.
    classify: takes these fields of a record, returns the class; picklable.
  """

  class_names: tuple[str, ...]
  fields: Mapping[str, tuple[str, ...]]
  classify: Callable[[Mapping[str, Any]], int]
