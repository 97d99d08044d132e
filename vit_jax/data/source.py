"""Interfaces of sources: datasets with random access."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

Record = dict[str, Any]


class Source(Protocol):
  """Base class of sources, whose records the loader and the image check read.

  Attributes:
    class_names: a name for each class; empty if records have no classes.
    several_labels: whether a record may have several classes, or no class.
    skips_unreadable: whether the loader replaces an unreadable image with the
      next image, instead of raising an error.
  """

  class_names: tuple[str, ...] = ()
  several_labels: bool = False
  skips_unreadable: bool = False

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Record: ...

  def identity(self) -> str | None:
    """Returns a hash of the data that stays the same if the folder moves.

    None means that `data.name` identifies the data.
    """
    return None

  def states(self, indices: Sequence[int]) -> Iterable[str] | None:
    """Returns a string for each record, which changes when the record changes.

    The image check reads the records whose string is new. None means that the
    images need no check.
    """
    return None


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
    """Returns the objects of an image as a dict, without decoding the image.

    boxes: float32 [N, 4], (x0, y0, x1, y1) in pixels.
    labels: the classes, int32 [N].
    crowd: bool [N], true for a box around many objects of a class.
    area: float [N], in pixels.
    size: the image's (height, width).
    masks: optional; for each object None or a segmentation, as
      `projects.detr.segments.mask` takes it.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Label:
  """The rule that computes the class of a TFDS record.

  Attributes:
    fields: the fields that the rule needs.
    classify: a picklable function from these fields to the class.
  """

  class_names: tuple[str, ...]
  fields: tuple[str, ...]
  classify: Callable[[Mapping[str, Any]], int]
