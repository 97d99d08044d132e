"""The data sets of the paper's evaluations, each with its protocol: one table."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A data set as the paper transfers to it.

  Attributes:
    name: `data.name` of a config: 'cifar10', 'vtab/caltech101'.
    title: as the paper's tables have it.
    group: of VTAB: 'natural', 'specialised' or 'structured'; empty for others.
    num_classes: C.
    train: split of the final run.
    test: split that is reported.
    tune_train: split that a candidate of the grid is trained on.
    tune_val: split that it is chosen by.
    examples: of `train`, `test`, `tune_train` and `tune_val`.
    steps: of fine-tuning (table 4).
    learning_rates: that are tried (table 4).
    flip: whether training images are mirrored at random.
    crop: of training images: 'inception', 'resize' (BiT's: resized, then a
      random part) or 'none'.
  """

  name: str
  title: str
  group: str
  num_classes: int
  train: str
  test: str
  tune_train: str
  tune_val: str
  examples: tuple[int, int, int, int]
  steps: int
  learning_rates: tuple[float, ...]
  flip: bool = True
  crop: str = 'inception'


BENCHMARKS: dict[str, Benchmark] = {}
