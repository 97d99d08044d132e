"""The contract of sources."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

Record = dict[str, Any]


class Source(Protocol):
  """Records that the loader and the image check read; sources derive from it.

  Attributes:
    class_names: a name for each label; empty if records have no labels.
    several_labels: whether a record may have several classes, or none.
    skips_unreadable: whether the next image replaces one that became
      unreadable.
  """

  class_names: tuple[str, ...] = ()
  several_labels: bool = False
  skips_unreadable: bool = False

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Record: ...

  def fingerprint(self) -> str | None:
    """Changes whenever the images may have; None if they need no check."""
    ...

  def identity(self) -> str | None:
    """Is the same wherever the data lie; None if only their name says it."""
    return None

  def states(self, indices: Sequence[int]) -> Iterable[str] | None:
    """Returns a text for each record, which changes as the fingerprint does.

    The check is repeated for records whose text is new.
    """
    whole = self.fingerprint()
    return None if whole is None else (f'{whole} {i}' for i in indices)


@runtime_checkable
class LabelledSource(Source, Protocol):
  """A source whose records have a class."""

  def labels(self) -> np.ndarray:
    """The classes of all records, int32 [N], without decoding an image."""
    ...


@runtime_checkable
class BoxedSource(Source, Protocol):
  """A source whose records have objects, each with a class and a box."""

  def objects(self, index: int) -> Mapping[str, Any]:
    """The objects of an image, without decoding it.

    `boxes` float32 N4, (x0, y0, x1, y1) in pixels; `labels` int32 N; `crowd`
    bool N, true for a box around many objects of a class; `area` float N, in
    pixels; `size`, the image's (height, width); and `masks`, if there are any,
    an argument of `segments.mask` or None for each object.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Label:
  """How a record of TFDS gets its class.

  Attributes:
    class_names: a name for each class.
    fields: the names of the fields that are read. For a list, the names of its
      own fields; () is all of them.
    classify: these fields of a record -> the class; picklable.
  """

  class_names: tuple[str, ...]
  fields: Mapping[str, tuple[str, ...]]
  classify: Callable[[Mapping[str, Any]], int]
