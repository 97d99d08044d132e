"""Benchmarks.

  python -m vit_jax.bench input [--vs=tf.data]

`input` measures one CPU core: decoding photographs of 640x427 pixels, cutting a
random part of each ("inception crop") and resizing it to 224x224. With --vs it
runs tf.data doing the same, in turns with ours, which takes an environment that
has TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.resources
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

_IMAGE_SIZE = (224, 224)
_BATCH_SIZE = 64
_BATCHES = 8
_ROUNDS = 9

# A contender makes `_BATCHES` batches and returns the seconds this took.
Contender = Callable[[], float]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(required=True)
  input_parser = commands.add_parser('input', help='the input pipeline')
  input_parser.add_argument(
    '--vs', choices=['tf.data'], help='also measure this, in turns with ours'
  )
  input_parser.set_defaults(run=lambda args: bench_input(args.vs))
  args = parser.parse_args()
  args.run(args)


def bench_input(versus: str | None) -> None:
  """Prints images per second and core, and the ratio to tf.data's faster form.

  Args:
    versus: 'tf.data' or None.
  """
  # Before TensorFlow and OpenCV count the cores for their thread pools.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  photos = _Photos()
  contenders = {
    'ours, transform alone': _our_transform(photos),
    'ours, batches': _our_batches(photos),
  }
  packages = ['numpy', 'simplejpeg', 'opencv-python-headless', 'grain']
  if versus:
    contenders |= {
      'tf.data, antialias=False': _tf_data(photos, antialias=False),
      'tf.data, antialias=True': _tf_data(photos, antialias=True),
    }
    packages.append('tensorflow-cpu')
  print(f'Python {platform.python_version()},', _versions(packages))
  print(f'one core, photographs of 640x427 pixels to {_IMAGE_SIZE}')
  rates: dict[str, list[float]] = {name: [] for name in contenders}
  # In turns, so that whatever else the machine does hits all of them alike.
  # The first round warms up and does not count.
  for round_number in range(_ROUNDS + 1):
    for name, contender in contenders.items():
      seconds = contender()
      if round_number:
        rates[name].append(_BATCHES * _BATCH_SIZE / seconds)
  print(f'images/s, median of {_ROUNDS} rounds (slowest to fastest):')
  for name, values in rates.items():
    print(
      f'  {name:26}{statistics.median(values):7.0f}'
      f'  ({min(values):.0f} to {max(values):.0f})'
    )
  if versus:
    _print_ratios(rates)


def _print_ratios(rates: dict[str, list[float]]) -> None:
  # Per round, because both sides of a round saw the same machine.
  for name in ('tf.data, antialias=False', 'tf.data, antialias=True'):
    ratios = [
      ours / theirs
      for ours, theirs in zip(rates['ours, batches'], rates[name], strict=True)
    ]
    print(f'ours, batches / {name}: {statistics.median(ratios):.2f}')


class _Photos:
  """The two photographs that come with scikit-learn, in turns, as a source."""

  class_names: tuple[str, ...] = ('china', 'flower')

  def __init__(self):
    folder = importlib.resources.files('sklearn.datasets.images')
    self._photos = [
      (folder / f'{name}.jpg').read_bytes() for name in self.class_names
    ]

  def __len__(self) -> int:
    # As ImageNet. Grain shuffles a few hundred examples slower than a million.
    return 1_281_167

  def __getitem__(self, index: int) -> dict:
    return {
      'image': self._photos[index % 2],
      'label': index % 2,
      'name': self.class_names[index % 2],
    }

  def fingerprint(self) -> None:
    return None


def _our_transform(photos: _Photos) -> Contender:
  from vit_jax.data import transforms

  transform = transforms.TrainTransform(_IMAGE_SIZE)
  rng = np.random.default_rng(0)

  def run() -> float:
    start_s = time.perf_counter()
    for i in range(_BATCHES * _BATCH_SIZE):
      transform(photos[i], rng)
    return time.perf_counter() - start_s

  return run


def _our_batches(photos: _Photos) -> Contender:
  from vit_jax.data import loader, transforms

  seeds = itertools.count()

  def run() -> float:
    batches = loader.train_batches(
      photos,
      transforms.TrainTransform(_IMAGE_SIZE),
      batch_size=_BATCH_SIZE,
      seed=next(seeds),
    )
    with contextlib.closing(batches):
      return _time_batches(batches)

  return run


def _tf_data(photos: _Photos, antialias: bool) -> Contender:
  """The usual recipe, with the decoder that skips what the crop leaves out."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  def transform(data, label):
    box_start, box_size, _ = tf.image.sample_distorted_bounding_box(
      tf.image.extract_jpeg_shape(data),
      tf.zeros([0, 0, 4]),
      area_range=(0.05, 1.0),
      aspect_ratio_range=(3 / 4, 4 / 3),
      min_object_covered=0,
      use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([box_start[:2], box_size[:2]], 0)
    image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
    image = tf.image.resize(image, _IMAGE_SIZE, antialias=antialias)
    return {'image': tf.cast(image, tf.uint8), 'label': label}

  records = [photos[i] for i in range(2)]
  data = [record['image'] for record in records]
  labels = [record['label'] for record in records]
  dataset = tf.data.Dataset.from_tensor_slices((data, labels)).repeat()
  # One core: more parallel calls only add switching.
  dataset = dataset.map(transform, num_parallel_calls=1).batch(_BATCH_SIZE)
  dataset = dataset.prefetch(1)
  return lambda: _time_batches(dataset.as_numpy_iterator())


def _time_batches(batches: Iterator) -> float:
  start_s = time.perf_counter()
  for _ in range(_BATCHES):
    next(batches)
  return time.perf_counter() - start_s


def _versions(packages: list[str]) -> str:
  return ', '.join(f'{p} {importlib.metadata.version(p)}' for p in packages)


if __name__ == '__main__':
  main()
