"""The datasets that the ViT paper evaluates on, each with its protocol."""

import dataclasses

from vit_jax.data import vtab


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A dataset with the paper's transfer protocol."""

  name: str  # `data.name` of a config: 'cifar10', 'vtab/caltech101'
  title: str  # in the paper's tables
  num_classes: int
  tune_train: str  # the split on which tuning trains
  tune_val: str  # the split on which tuning compares the learning rates
  examples: tuple[int, int, int, int]  # of train, test, tune_train, tune_val
  steps: int  # of fine-tuning (table 4)
  train: str = 'train'  # the training split of the final run
  test: str = 'test'
  learning_rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03)  # table 4
  group: str = ''  # 'natural', 'specialised' or 'structured' in VTAB
  flip: bool = True  # whether training images are mirrored at random
  crop: str = 'inception'  # for training; or 'resize' (BiT's crop) or 'none'


# Additional learning rates for ResNets and hybrids on ImageNet.
IMAGENET_EXTRA_LEARNING_RATES = (0.06,)

# In these tasks the class depends on location, orientation, distance or count.
# A flip or a crop would change it (BiT, arXiv 1912.11370).
_NO_FLIP = ('dsprites_location', 'dsprites_orientation', 'smallnorb_azimuth')
_NO_CROP = (
  'clevr_count',
  'clevr_distance',
  'dmlab',
  'dsprites_location',
  'kitti',
)


def _vtab(key: str, task: vtab.Task) -> Benchmark:
  tune_train, tune_val, train, test = vtab.SPLITS
  return Benchmark(
    name=vtab.PREFIX + key,
    title=task.title,
    group=task.group,
    num_classes=task.num_classes,
    train=train,
    test=test,
    tune_train=tune_train,
    tune_val=tune_val,
    examples=(1_000, task.test_examples, 800, 200),
    steps=2_500,
    learning_rates=(0.01,),
    flip=key not in _NO_FLIP,
    crop='none' if key in _NO_CROP else 'resize',
  )


_TABLE_2 = (
  Benchmark(
    name='imagenet2012',
    title='ImageNet',
    num_classes=1_000,
    test='validation',
    tune_train='train[:99%]',
    tune_val='train[99%:]',
    examples=(1_281_167, 50_000, 1_268_355, 12_812),
    steps=20_000,
    learning_rates=(0.003, 0.01, 0.03),
  ),
  *(
    Benchmark(
      name=f'cifar{num_classes}',
      title=f'CIFAR-{num_classes}',
      num_classes=num_classes,
      tune_train='train[:98%]',
      tune_val='train[98%:]',
      examples=(50_000, 10_000, 49_000, 1_000),
      steps=10_000,
    )
    for num_classes in (10, 100)
  ),
  Benchmark(
    name='oxford_iiit_pet',
    title='Oxford-IIIT Pets',
    num_classes=37,
    tune_train='train[:90%]',
    tune_val='train[90%:]',
    examples=(3_680, 3_669, 3_312, 368),
    steps=500,
  ),
  Benchmark(
    name='oxford_flowers102',
    title='Oxford Flowers-102',
    num_classes=102,
    train='train+validation',
    tune_train='train[:90%]+validation[:90%]',
    tune_val='train[90%:]+validation[90%:]',
    examples=(2_040, 6_149, 1_836, 204),
    steps=500,
  ),
)
_VTAB = tuple(_vtab(key, task) for key, task in vtab.TASKS.items())

# The paper's benchmarks by name.
BENCHMARKS: dict[str, Benchmark] = {b.name: b for b in _TABLE_2 + _VTAB}

# Names of the datasets of each suite, in the paper's order.
SUITES: dict[str, tuple[str, ...]] = {
  'table2': tuple(BENCHMARKS),
  'vtab': tuple(b.name for b in _VTAB),
} | {
  group: tuple(b.name for b in _VTAB if b.group == group)
  for group in ('natural', 'specialised', 'structured')
}


def usual_splits(name: str) -> tuple[str, str]:
  """Returns the usual training and test split of a dataset."""
  usual = BENCHMARKS.get(name)
  return (usual.train, usual.test) if usual else ('train', 'test')
