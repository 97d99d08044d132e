"""Benchmarks.

  python -m vit_jax.bench input [--vs=tf.data]
  python -m vit_jax.bench train [--vs=flax] [--variant=ti16] [--batch_size=16]
  python -m vit_jax.bench inference [--vs=onnx,torch] [--variant=b16]
  python -m vit_jax.bench fewshot

`input` measures one CPU core: decoding photographs of 640x427 pixels, cutting a
random part of each ("inception crop") and resizing it to 224x224. With --vs it
runs tf.data doing the same, in turns with ours, which takes an environment that
has TensorFlow.

`train` measures training steps on whatever device JAX finds, at 224 pixels in
float32. With --vs it runs, in turns with ours, the same architecture written
plainly with Flax's own layers.

`inference` measures the way from uint8 images to logits, at 224 pixels in
float32. With --vs it runs, in turns with ours and with as many threads on the
CPU, the same weights as `convert` writes them: as an ONNX file in onnxruntime
and as timm's model in PyTorch.

`fewshot` measures choosing and fitting the classifiers of a few-shot evaluation
beside solving the normal equations anew for every penalty.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.resources
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
  train_parser = commands.add_parser('train', help='training steps')
  train_parser.add_argument(
    '--vs', choices=['flax'], help='also measure this, in turns with ours'
  )
  train_parser.add_argument('--variant', default='ti16', help='default: ti16')
  train_parser.add_argument(
    '--batch_size', type=int, default=16, help='images a step; default: 16'
  )
  train_parser.set_defaults(
    run=lambda args: bench_train(args.variant, args.batch_size, args.vs)
  )
  inference_parser = commands.add_parser('inference', help='images to logits')
  inference_parser.add_argument(
    '--vs',
    type=lambda text: text.split(','),
    default=[],
    help='also measure these, in turns with ours: onnx, torch or onnx,torch',
  )
  inference_parser.add_argument('--variant', default='b16', help='default: b16')
  inference_parser.add_argument(
    '--batch_sizes',
    type=lambda text: [int(size) for size in text.split(',')],
    default=[1, 8],
    help='images at once, each of which is measured; default: 1,8',
  )
  inference_parser.set_defaults(
    run=lambda args: bench_inference(args.variant, args.batch_sizes, args.vs)
  )
  fewshot_parser = commands.add_parser('fewshot', help='few-shot classifiers')
  fewshot_parser.set_defaults(run=lambda args: _bench_fewshot())
  args = parser.parse_args()
  try:
    args.run(args)
  except (ImportError, ValueError) as e:
    parser.error(str(e))


def _bench_fewshot() -> None:
  from vit_jax import bench_fewshot

  bench_fewshot.bench_fewshot()


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
  _race(contenders, _BATCHES * _BATCH_SIZE, 'ours, batches')


def bench_train(variant: str, batch_size: int, versus: str | None) -> None:
  """Prints images per second of training, and the ratio to plain Flax.

  Args:
    variant: Name of a model, as in `ti16`.
    batch_size: Images a step.
    versus: 'flax' or None.
  """
  import jax

  from vit_jax.models import variants

  fields = variants.fields(variant)
  model = variants.build(num_classes=1000, image_size=_IMAGE_SIZE, **fields)
  params = variants.init(model, jax.random.key(0), _IMAGE_SIZE)
  contenders = {
    'ours': _training_step(
      lambda p, x: model.apply({'params': p}, x)[0], params, batch_size
    )
  }
  if versus:
    if fields['name'] != 'vit' or {'stem_width', 'axial'} & fields.keys():
      raise ValueError(
        f'--vs=flax has only plain ViTs to compare with, and {variant} is none.'
      )
    contenders['plain Flax'] = _plain_flax_step(fields, batch_size)
  packages = ['jax', 'flax', 'optax']
  print(f'Python {platform.python_version()},', _versions(packages))
  device = jax.devices()[0].device_kind
  print(f'{device}, {variant} at {_IMAGE_SIZE}, batch {batch_size}, float32')
  _race(contenders, batch_size, 'ours')


def _training_step(apply: Callable, params: Any, batch_size: int) -> Contender:
  """One step of AdamW on random images, compiled."""
  import jax
  import optax

  images = jax.random.normal(jax.random.key(1), (batch_size, *_IMAGE_SIZE, 3))
  labels = jax.numpy.arange(batch_size)
  optimizer = optax.adamw(1e-3)

  def loss(params: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(
      apply(params, images), labels
    )
    return losses.mean()

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Any, state: Any) -> Any:
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  current = (params, optimizer.init(params))

  def run() -> float:
    nonlocal current
    start_s = time.perf_counter()
    current = jax.block_until_ready(step(*current))
    return time.perf_counter() - start_s

  return run


def _plain_flax_step(fields: dict, batch_size: int) -> Contender:
  """The same ViT as one would write it down with Flax's layers."""
  import flax.linen as nn
  import jax
  import jax.numpy as jnp

  D, P = fields['width'], fields['patch_size']

  class PlainViT(nn.Module):
    @nn.compact
    def __call__(self, images):
      x = nn.Conv(D, (P, P), strides=P, padding='VALID')(images)
      x = x.reshape(len(x), -1, D)
      cls = self.param('cls', nn.initializers.zeros, (1, 1, D))
      x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
      x += self.param('pos', nn.initializers.normal(0.02), (1, *x.shape[1:]))
      for _ in range(fields['depth']):
        x += nn.MultiHeadDotProductAttention(fields['heads'])(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(fields['mlp_dim'])(nn.LayerNorm()(x)))
        x += nn.Dense(D)(y)
      return nn.Dense(1000)(nn.LayerNorm()(x)[:, 0])

  model = PlainViT()
  params = model.init(jax.random.key(0), jnp.zeros((1, *_IMAGE_SIZE, 3)))
  return _training_step(model.apply, params, batch_size)


def bench_inference(
  variant: str, batch_sizes: Sequence[int], versus: Sequence[str]
) -> None:
  """Prints images per second of inference, and the ratios to others.

  Args:
    variant: Name of a model, as in `b16`.
    batch_sizes: Images at once.
    versus: Of 'onnx' and 'torch'.

  Raises:
    ImportError: If one of them is not installed.
    ValueError: If there is another name, or a framework has no such model.
  """
  import jax

  from vit_jax import reader
  from vit_jax.models import variants

  for name in versus:
    if name not in _PEERS:
      raise ValueError(f'--vs={name} is none of {", ".join(_PEERS)}.')
  if min(batch_sizes) < 1:
    raise ValueError(f'--batch_sizes has {min(batch_sizes)}: at least 1 image.')
  fields = variants.fields(variant)
  model = variants.build(num_classes=1000, image_size=_IMAGE_SIZE, **fields)
  params = variants.init(model, jax.random.key(0), _IMAGE_SIZE)
  checkpoint = reader.Checkpoint(
    variant, model, jax.tree.map(np.asarray, params), _IMAGE_SIZE
  )
  peers = {'ours': _our_inference(checkpoint)}
  threads = len(os.sched_getaffinity(0))
  with tempfile.TemporaryDirectory() as folder:
    for name in versus:
      peer = _PEERS[name](checkpoint, os.path.join(folder, name), threads)
      peers[peer.framework] = peer.run
  packages = ['jax', 'flax'] + ['torch'] * ('torch' in versus)
  print(f'Python {platform.python_version()},', _versions(packages))
  device = jax.devices()[0].device_kind
  print(f'{device}, {threads} threads, {variant} at {_IMAGE_SIZE}, float32')
  rng = np.random.default_rng(0)
  for batch_size in batch_sizes:
    images = rng.integers(0, 256, (batch_size, *_IMAGE_SIZE, 3), np.uint8)
    print(f'batch {batch_size}')
    contenders = {
      name: _timed(functools.partial(run, images))
      for name, run in peers.items()
    }
    _race(contenders, batch_size, 'ours')


def _our_inference(checkpoint: Any) -> Callable[[np.ndarray], np.ndarray]:
  import jax

  from vit_jax.data import augment

  model, preprocessing = checkpoint.model, checkpoint.preprocessing
  params = jax.device_put(checkpoint.params)

  @jax.jit
  def apply(params: Any, images_BHWC: Any) -> Any:
    images_BHWC = augment.normalize(
      images_BHWC, preprocessing.mean, preprocessing.std
    )
    return model.apply({'params': params}, images_BHWC)[0]

  return lambda images_BHWC: np.asarray(apply(params, images_BHWC))


def _onnx_peer(checkpoint: Any, path: str, threads: int) -> Any:
  from vit_jax.convert import onnx

  onnx.write(checkpoint, path, 'float32')
  return onnx.open_peer(path, threads)


def _torch_peer(checkpoint: Any, path: str, threads: int) -> Any:
  from vit_jax.convert import timm

  timm.write(checkpoint.weights(), path, 'float32')
  peer = timm.open_peer(path)
  import torch

  torch.set_num_threads(threads)
  return peer


# What `inference` can be compared with.
_PEERS = {'onnx': _onnx_peer, 'torch': _torch_peer}


def _timed(run: Callable[[], Any]) -> Contender:
  def contender() -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s

  return contender


def _race(contenders: dict[str, Contender], images: int, ours: str) -> None:
  """Runs contenders in turns; prints their images/s and the ratios of ours.

  Args:
    contenders: By name.
    images: How many a run of a contender takes.
    ours: The name that the others are compared with.
  """
  rates: dict[str, list[float]] = {name: [] for name in contenders}
  # In turns, so that whatever else the machine does hits all of them alike.
  # The first round warms up and does not count.
  for round_number in range(_ROUNDS + 1):
    for name, contender in contenders.items():
      seconds = contender()
      if round_number:
        rates[name].append(images / seconds)
  print(f'images/s, median of {_ROUNDS} rounds (slowest to fastest):')
  for name, values in rates.items():
    print(
      f'  {name:26}{statistics.median(values):7.1f}'
      f'  ({min(values):.1f} to {max(values):.1f})'
    )
  for name in contenders:
    if name.startswith('ours'):
      continue
    # Per round, because both sides of a round saw the same machine.
    ratios = [a / b for a, b in zip(rates[ours], rates[name], strict=True)]
    print(f'{ours} / {name}: {statistics.median(ratios):.2f}')


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

  def labels(self) -> np.ndarray:
    return np.arange(len(self), dtype=np.int32) % 2

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
