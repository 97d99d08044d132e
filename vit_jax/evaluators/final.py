"""The report at the end of a run: accuracy beside simple baselines."""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from vit_jax.checkpoints import opening, saving
from vit_jax.data import atomic_files, bad_images, cores, sources
from vit_jax.data import splits as splits_lib
from vit_jax.data.images import Images
from vit_jax.evaluators import build, confusion, ridge, shots
from vit_jax.evaluators.confusion import Measures, SeveralMeasures
from vit_jax.objectives import objective_type

FILE = 'report.txt'
# Maximum number of training images for the linear classifier.
_MOST_LEARNED = 5_000
# Baselines are skipped for larger training sets, because reading all labels may
# take minutes.
_MOST_LABELS = 100_000
# Side of images in pixels, and bins of a histogram, for the linear classifier.
_SIDE, _BINS = 16, 16
# With more classes than this, only the worst classes get a line.
_LINES = 20
_TRY = (
  'Train longer, start from a checkpoint (--config.init=...), add images, or '
  'check that the folders contain the right images.'
)


def report(config: ConfigDict, workdir: str) -> str:
  """Measures a finished run on its test split and writes WORKDIR/report.txt.

  Uses the split of the evaluator `test` if it is on and has the type 'mean'.
  Otherwise uses the first such evaluator that is on. Returns the text of the
  report; '' if there is no such split, if it has no labels, if the model has
  more than 1,000 classes, or if the objective does not classify images.
  """
  splits = {
    name: entry.split
    for name, entry in build.entries(config).items()
    if entry.type == 'mean'
  }
  split = splits.get('test') or next(iter(splits.values()), '')
  if not split or 'accuracy' not in objective_type(config).metrics:
    return ''
  checkpoint = opening.open_checkpoint(workdir)
  names = checkpoint.class_names
  test = sources.open_config(config.data, split)
  classifies = test.several_labels or isinstance(test, sources.LabelledSource)
  if not classifies or len(names) > 1000:
    return ''
  found = confusion.evaluate(checkpoint, config.data, split)
  if isinstance(found, SeveralMeasures):
    lines = several_lines(found)
  else:
    accuracies = baselines(config.data, config.data.split, split)
    used = splits_lib.resolved(
      split, functools.partial(sources.open_config, config.data)
    )
    lines = _lines(found, accuracies, used)
  text = '\n'.join(['', *lines]).encode(errors='backslashreplace')
  atomic_files.replace(saving.absolute(workdir) / FILE, text)
  return text.decode()


def baselines(
  data: ConfigDict, split: str, test_split: str
) -> dict[str, float]:
  """Measures two baselines on the test split.

  The first always predicts the most frequent class. The second is a linear
  classifier: ridge regression on 16x16 pixels and colour histograms, with the
  penalty of few-shot evaluation (`shots.fit`).

  Returns accuracies by name of the baseline; {} if the data lack labels or have
  more than 100,000 training images. Also returns {} with `data.wrong_labels`,
  because the baselines would see the right labels.
  """
  if data.wrong_labels:
    return {}
  train, test = (
    bad_images.open_checked(data, name) for name in (split, test_split)
  )
  if len(train) > _MOST_LABELS or not (
    isinstance(train, sources.LabelledSource)
    and isinstance(test, sources.LabelledSource)
  ):
    return {}
  names = train.class_names
  counts_C = np.bincount(train.labels(), minlength=len(names))
  most = int(counts_C.argmax())
  rows = np.linspace(0, len(train) - 1, min(len(train), _MOST_LEARNED))
  x_ND, labels_N = _features(train, rows.astype(int).tolist())
  test_MD, test_labels_M = _features(test, range(len(test)))
  _, *classifier = shots.fit(x_ND, labels_N, len(names), 'choose')
  return {
    f'always {names[most]}': float(np.mean(test.labels() == most)),
    'a linear classifier of pixels': ridge.accuracy(
      test_MD, test_labels_M, *classifier
    ),
  }


def _features(
  source: sources.LabelledSource, rows: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns features (float32 ND) and labels (N) of images."""
  transform = Images((_SIDE, _SIDE)).eval_transform()
  edges = np.linspace(0, 256, _BINS + 1)

  def features_of(i: int) -> np.ndarray:
    record = source[int(i)]
    pixels = transform.image(record['image'], record['name'])
    counts = [np.histogram(pixels[..., c], edges)[0] for c in range(3)]
    return np.concatenate(
      [pixels.ravel() / 255, np.concatenate(counts) / _SIDE**2]
    ).astype(np.float32)

  bar = cores.progress('', len(rows), 'images', shown=False)
  x_ND = np.stack(list(cores.in_threads(features_of, rows, bar)))
  return x_ND, source.labels()[np.asarray(rows, int)]


def several_lines(found: SeveralMeasures) -> list[str]:
  """Returns the report for images with several classes.

  The baseline predicts the same for every image. Its average precision for a
  class is the share of images that have the class.
  """
  m, names, count = found.measures, found.class_names, found.images
  constant = float(np.mean(m.images_C / count))
  lines = [
    f'mean AP    {m.mean_ap:.1%} over {len(names)} classes of {count:,} '
    f'images, micro AP {m.micro_ap:.1%}; mean AP of a constant '
    f'prediction {constant:.1%}',
    f'mean F1    {m.mean_f1:.1%}, micro F1 {m.micro_f1:.1%}',
  ]
  listed = np.argsort(m.ap_C, kind='stable')[:_LINES]
  if len(names) > _LINES:
    lines.append(f'The {_LINES} worst of {len(names)} classes:')
  width = max(len(names[i]) for i in listed)
  lines += [
    f'class      {names[i]:<{width}}  AP {m.ap_C[i]:6.1%}  '
    f'F1 {m.f1_C[i]:6.1%}  {m.images_C[i]:,} images'
    for i in listed
  ]
  if m.mean_ap <= constant:
    lines.append(f'The model does not beat a constant prediction. {_TRY}')
  return lines


def wilson(hits: int, count: int) -> tuple[float, float]:
  """Returns Wilson's confidence interval (95 %) of a proportion."""
  z, share = 1.96, hits / count
  spread = z * z / count
  middle = (share + spread / 2) / (1 + spread)
  root = math.sqrt(share * (1 - share) / count + spread / 4 / count)
  half = z / (1 + spread) * root
  return max(0.0, middle - half), min(1.0, middle + half)


def _lines(
  found: Measures, simple: Mapping[str, float], split: str
) -> list[str]:
  """Returns the lines of the report; `simple` has the baselines' accuracies."""
  confusion_CC, names = found.confusion_CC, found.class_names
  images_C, right_C = confusion_CC.sum(axis=1), np.diag(confusion_CC)
  count = int(images_C.sum())
  low, high = wilson(int(right_C.sum()), count)
  lines = [
    f'accuracy   {found.accuracy:.1%} of {count:,} {split} images '
    f'(95 % interval {low:.1%} to {high:.1%}), '
    f'{found.balanced:.1%} as the mean over classes',
  ]
  lines += [f'baseline   {x:.1%} {name}' for name, x in simple.items()]
  there = [i for i in range(len(names)) if images_C[i]]
  listed = there
  if len(there) > _LINES:
    listed = sorted(there, key=lambda i: right_C[i] / images_C[i])[:_LINES]
    lines.append(f'The {_LINES} worst of {len(there)} classes:')
  width = max(len(names[i]) for i in listed)
  for i in listed:
    a, b = wilson(int(right_C[i]), int(images_C[i]))
    lines.append(
      f'class      {names[i]:<{width}}  {right_C[i] / images_C[i]:6.1%} of '
      f'{images_C[i]:,} ({a:.0%} to {b:.0%})'
    )
  lines += [
    f'confused   {text}'
    for times, text in confusion.most_confused(found)
    if times > 1
  ]
  best = max(simple, key=lambda name: simple[name], default='')
  if best and simple[best] >= found.accuracy:
    lines.append(
      f"The model does not beat the baseline '{best}' ({simple[best]:.1%}). "
      f'{_TRY}'
    )
  return lines
