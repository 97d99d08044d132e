"""Trains big_vision's ViT on CIFAR-10 with a recipe that vit_jax supports too.

  export PYTHONPATH=big_vision
  python docs/results/like_big_vision.py ./cifar10 --seed=0

`big_vision` is a clone of google-research/big_vision. Its code computes the
preprocessing, the model, mixup, the loss, gradient clipping, the optimizer and
the schedule. It also needs tensorflow and ml_collections. The weight average is
vit_jax's formula, because big_vision has none. There is no RandAugment:
big_vision's moves images by up to 30 of their 32 pixels.
docs/results/training.md has the command for vit_jax, and the accuracies.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import ml_collections
import optax
import tensorflow as tf
from big_vision import optax as bv_optax
from big_vision import utils
from big_vision.models import vit
from big_vision.pp import builder, ops_general, ops_image  # noqa: F401

BATCH = 128
SMOOTH = f'onehot(10, on={0.9 + 0.1 / 10}, off={0.1 / 10})'
TRAIN = (
  'decode(precise=True)|resize(40)|random_crop(32)|flip_lr'
  f'|value_range(-1, 1)|{SMOOTH}'
)
TEST = 'decode(precise=True)|value_range(-1, 1)|onehot(10)'


def batches(folder, preprocessing, seed=None):
  """Yields images and labels of a split; a seed shuffles and repeats them."""
  files, labels = [], []
  for label, name in enumerate(sorted(folder.iterdir())):
    for path in sorted(name.iterdir()):
      files.append(path.read_bytes())
      labels.append(label)
  data = tf.data.Dataset.from_tensor_slices({'image': files, 'labels': labels})
  if seed is not None:
    tf.random.set_seed(seed)
    data = data.shuffle(len(files), seed=seed).repeat()
  prepare = builder.get_preprocess_fn(preprocessing, log_data=False)
  data = data.map(prepare, num_parallel_calls=2)
  data = data.batch(BATCH, drop_remainder=seed is not None).prefetch(2)
  for batch in data.as_numpy_iterator():
    yield batch['image'], batch['labels']


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', help='has sub-folders train and test')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--epochs', type=int, default=3)
  parser.add_argument(
    '--posemb_std', type=float, default=128**-0.5, help='at the start'
  )
  flags = parser.parse_args()
  folder = pathlib.Path(flags.folder)
  examples = sum(1 for _ in folder.glob('train/*/*'))
  steps = flags.epochs * examples // BATCH
  model = vit.Model(
    10, patch_size=(8, 8), width=128, depth=4, mlp_dim=256, num_heads=4
  )
  config = ml_collections.ConfigDict(
    {
      'lr': 2e-3,
      # big_vision multiplies wd by the schedule, not by lr.
      'wd': 0.05 * 2e-3,
      'grad_clip_norm': 1.0,
      'optax_name': 'scale_by_adam',
      'schedule': {'decay_type': 'cosine', 'warmup_steps': steps // 20},
    }
  )
  key = jax.random.key(flags.seed)
  params = model.init(key, jnp.zeros((1, 32, 32, 3)))['params']
  params['pos_embedding'] *= flags.posemb_std * 128**0.5
  optimizer, _ = bv_optax.make(
    config, params, sched_kw={'total_steps': steps, 'batch_size': BATCH}
  )

  @jax.jit
  def update(params, average, state, step, images, labels):
    rng = jax.random.fold_in(key, step)
    _, (images, labels), _ = utils.get_mixup(rng, 0.2)(images, labels)

    def loss_of(params):
      logits, _ = model.apply({'params': params}, images, train=True)
      return utils.softmax_xent(logits=logits, labels=labels)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    decay = jnp.minimum(0.998, (1 + step) / (10 + step))
    average = optax.incremental_update(params, average, 1 - decay)
    return params, average, state, loss

  @jax.jit
  def hits(params, images, labels):
    logits, _ = model.apply({'params': params}, images)
    return jnp.sum(logits.argmax(1) == labels.argmax(1))

  average, state = params, optimizer.init(params)
  data = batches(folder / 'train', TRAIN, flags.seed)
  started_s = time.monotonic()
  for step in range(steps):
    params, average, state, loss = update(
      params, average, state, step, *next(data)
    )
    if (step + 1) % 50 == 0:
      rate = (step + 1) * BATCH / (time.monotonic() - started_s)
      print(f'step {step + 1}/{steps} loss {loss:.4f} {rate:.0f} images/s')
  took_s = time.monotonic() - started_s
  right, total = 0, 0
  for images, labels in batches(folder / 'test', TEST):
    right += int(hits(average, images, labels))
    total += len(labels)
  count = sum(x.size for x in jax.tree.leaves(params))
  print(
    f'accuracy {right / total:.4f}, {count:,} parameters, '
    f'{steps * BATCH / took_s:.0f} images/s'
  )


if __name__ == '__main__':
  main()
