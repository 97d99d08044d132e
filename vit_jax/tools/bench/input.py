"""Measures images/s of the input pipeline."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.resources
import itertools
import os
import time
from collections.abc import Callable, Iterator

from vit_jax.data import loader, sources, transforms
from vit_jax.data.source import Source
from vit_jax.tools.bench import race
from vit_jax.tools.bench.race import Contender

_IMAGE_SIZE = (224, 224)
_BATCH_SIZE = 64
_BATCHES = 8


def bench(args: argparse.Namespace) -> None:
  """Input pipeline on one core.

  The pipeline decodes photographs of 640x427 pixels, or the images of the
  datasets of --data, and resizes random crops to 224x224. With --vs, tf.data
  does the same with the photographs.
  """
  # Restrict this process to one core. This comes first, because TensorFlow and
  # OpenCV count the cores when they create their threads.
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  photos = _Photos()
  named: dict[str, Source] = {'ours': photos}
  if args.data:
    named = {name: sources.open_source(name, 'train') for name in args.data}
  turns = {name: _our_batches(source) for name, source in named.items()}
  packages = ['numpy', 'simplejpeg', 'opencv-python-headless', 'grain']
  if args.vs:
    turns |= {
      f'tf.data, antialias={x}': _tf_data(photos, x) for x in (False, True)
    }
    # The installed package may be tensorflow or tensorflow-cpu.
    packages += importlib.metadata.packages_distributions()['tensorflow'][:1]
  print(race.machine(packages))
  what = 'images' if args.data else 'photographs of 640x427 pixels'
  print(f'one core, {what} to {_IMAGE_SIZE}')
  makers = [functools.partial(Contender, *pair) for pair in turns.items()]
  print(*race.race(makers), sep='\n')


def _rate(batches: Iterator) -> float:
  start_s = time.perf_counter()
  for _ in range(_BATCHES):
    next(batches)
  return _BATCHES * _BATCH_SIZE / (time.perf_counter() - start_s)


class _Photos(Source):
  """A source that alternates between scikit-learn's two photographs."""

  class_names: tuple[str, ...] = ('china', 'flower')

  def __init__(self):
    folder = importlib.resources.files('sklearn.datasets.images')
    self._photos = [
      (folder / f'{name}.jpg').read_bytes() for name in self.class_names
    ]

  def __len__(self) -> int:
    # The size of ImageNet, because Grain shuffles small sources more slowly.
    return 1_281_167

  def __getitem__(self, index: int) -> dict:
    return {
      'image': self._photos[index % 2],
      'label': index % 2,
      'name': self.class_names[index % 2],
    }


def _our_batches(source: Source) -> Callable[[], float]:
  seeds = itertools.count()

  def run() -> float:
    batches = loader.train_batches(
      source,
      transforms.TrainTransform(_IMAGE_SIZE),
      batch_size=_BATCH_SIZE,
      seed=next(seeds),
    )
    with contextlib.closing(batches):
      return _rate(batches)

  return run


def _tf_data(photos: _Photos, antialias: bool) -> Callable[[], float]:
  """Returns a function that measures tf.data, which decodes only crops."""
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

  data = [photos[i]['image'] for i in range(2)]
  dataset = tf.data.Dataset.from_tensor_slices((data, [0, 1])).repeat()
  # On one core, more parallel calls would only add context switches.
  dataset = dataset.map(transform, num_parallel_calls=1).batch(_BATCH_SIZE)
  dataset = dataset.prefetch(1)
  return lambda: _rate(dataset.as_numpy_iterator())
