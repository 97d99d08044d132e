"""Losses, metrics and augmentation against closed forms in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import sklearn.metrics
import sklearn.utils.class_weight

from configs import digits
from tests.objectives import test_every
from vit_jax import config as config_lib
from vit_jax.data.images import Images
from vit_jax.experiment import CheckedConfig
from vit_jax.models import variants
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import Facts

CLASSES = 7


@dataclasses.dataclass(frozen=True)
class Linear:
  """A linear model with dropout of logits in training."""

  num_classes: int = CLASSES
  dropout: float = 0.0

  def apply(self, variables, images_BHWC, train=False, rngs=None):
    B = images_BHWC.shape[0]
    logits = images_BHWC.reshape(B, -1) @ variables['params']['w']
    if train:
      keep = 1 - self.dropout
      logits *= jax.random.bernoulli(rngs['dropout'], keep, logits.shape)
    return logits, {}


KEY = jax.random.key(0)


def make(name='softmax', flip=False, **fields):
  images = Images((4, 4), flip=flip)
  return Classification(Linear(), images, loss_name=name, **fields)


def classified(config, facts, size=(16, 16)):
  return Classification.from_config(config, size).on_data(config, facts)


def params():
  rng = np.random.default_rng(0)
  return {'w': rng.standard_normal((48, CLASSES)).astype(np.float32)}


def raw_batch(n=12):
  rng = np.random.default_rng(1)
  return {
    'image': rng.integers(0, 256, (n, 4, 4, 3), np.uint8),
    'label': rng.integers(0, CLASSES, n, np.int32),
  }


def logits_of(batch):
  x = (batch['image'].astype(np.float64) - 127.5) / 127.5
  return x.reshape(len(x), -1) @ params()['w']


def smoothed(labels, smoothing):
  return np.eye(CLASSES)[labels] * (1 - smoothing) + smoothing / CLASSES


def losses_in_numpy(name, logits, targets):
  if name == 'softmax':
    return -(targets * scipy.special.log_softmax(logits, -1)).sum(-1)
  log_p = scipy.special.log_expit(logits)
  log_not_p = scipy.special.log_expit(-logits)
  return -(targets * log_p + (1 - targets) * log_not_p).sum(-1)


@pytest.mark.parametrize(
  ('name', 'smoothing'), [('softmax', 0.1), ('sigmoid', 0.0)]
)
def test_loss_and_accuracy_are_the_closed_forms(name, smoothing):
  objective = make(name, label_smoothing=smoothing)
  batch = raw_batch()
  augmented = objective.augment(batch, jax.random.key(0))
  np.testing.assert_allclose(
    augmented['label'], smoothed(batch['label'], smoothing), atol=1e-7
  )
  loss, metrics = objective.loss(params(), augmented, jax.random.key(0))
  logits = logits_of(batch)
  want = losses_in_numpy(name, logits, smoothed(batch['label'], smoothing))
  # float32 sums of 48 products of numbers around 1.
  np.testing.assert_allclose(loss, want.mean(), rtol=1e-5)
  assert metrics.keys() == {'loss', 'accuracy'}
  assert metrics['loss'] == loss
  accuracy = (logits.argmax(-1) == batch['label']).mean()
  assert 0 < accuracy < 1
  np.testing.assert_allclose(metrics['accuracy'], accuracy, rtol=1e-6)


def test_dropout_is_for_training_and_by_its_key():
  objective = dataclasses.replace(make(), model=Linear(dropout=0.5))
  augmented = objective.augment(raw_batch(), jax.random.key(0))

  def loss(seed):
    key = jax.random.key(seed)
    return float(objective.loss(params(), augmented, key)[0])

  assert loss(0) == loss(0) != loss(1)


@pytest.mark.fast('cutmix')
@pytest.mark.parametrize('name', ['mixup', 'cutmix'])
def test_an_image_is_mixed_as_its_label_is(name):
  """Images of class 0 are white, the others black."""
  batch = raw_batch(64)
  batch['image'][:] = 255 * (batch['label'] == 0)[:, None, None, None]
  mixed = make(**{name: 1.0}).augment(batch, jax.random.key(2))
  white = (np.asarray(mixed['image']) + 1) / 2
  share_B = np.asarray(mixed['label'][:, 0])
  np.testing.assert_allclose(white.mean((1, 2, 3)), share_B, atol=1e-6)
  assert len({*share_B.round(3)} - {0, 1}) > 1
  # MixUp blends whole images, CutMix pastes a rectangle.
  assert (np.ptp(white, axis=(1, 2, 3)) > 0.5).any() == (name == 'cutmix')


def test_flips_do_not_change_the_mixing():
  batch, key = raw_batch(64), jax.random.key(5)
  only_mixed = make(mixup=0.5).augment(batch, key)
  both = make(mixup=0.5, flip=True).augment(batch, key)
  np.testing.assert_array_equal(only_mixed['label'], both['label'])
  assert not np.allclose(only_mixed['image'], both['image'])


def test_evaluation_sums_over_unmasked_examples():
  """Neither smoothed nor mixed, whatever training does."""
  objective = make(flip=True, label_smoothing=0.3, mixup=0.5)
  batch = raw_batch()
  mask = np.arange(12) < 9
  got = objective.evaluate(params(), batch | {'mask': mask.astype(np.float32)})
  logits = logits_of(batch)
  losses = losses_in_numpy('softmax', logits, np.eye(CLASSES)[batch['label']])
  assert got.keys() == {'examples', 'accuracy', 'loss'}
  assert got['examples'] == mask.sum()
  assert got['accuracy'] == (logits.argmax(-1) == batch['label'])[mask].sum()
  np.testing.assert_allclose(got['loss'], losses[mask].sum(), rtol=1e-5)


def test_padding_that_is_not_finite_does_not_leak():
  """A padded row may have any value, and 0 times infinity is NaN."""

  class LastIsNaN(Linear):
    def apply(self, *args, **kwargs):
      logits, aux = super().apply(*args, **kwargs)
      return jnp.asarray(logits).at[-1].set(jnp.nan), aux

  mask = np.array([1.0, 1.0, 0.0], np.float32)
  batch = raw_batch(3) | {'mask': mask}
  objective = Classification(LastIsNaN(), Images((4, 4)))
  got = objective.evaluate(params(), batch)
  want = make().evaluate(params(), batch)
  assert jax.device_get(got) == jax.device_get(want)
  assert np.isfinite(got['loss'])


@pytest.mark.parametrize(
  ('names', 'message'),
  [
    ((), 'train has no labels, but .*=cla'),
    (('cat',), "has one class, 'cat', but .* column label of a CSV"),
  ],
)
def test_fewer_than_two_classes_are_refused(names, message):
  config = digits.get_config()
  with pytest.raises(ValueError, match=message):
    classified(config, Facts(names, 9))


def several(**fields):
  return dataclasses.replace(make('sigmoid'), several_labels=True, **fields)


def test_several_classes_an_image():
  """Compares with NumPy, for images with no, one or several classes."""
  batch = raw_batch(12) | {'mask': np.ones(12, np.float32)}
  rng = np.random.default_rng(3)
  labels_BC = rng.integers(0, 2, (12, CLASSES)).astype(np.uint8)
  labels_BC[0] = 0
  batch['label'] = labels_BC
  logits_BC = logits_of(batch)
  losses = losses_in_numpy('sigmoid', logits_BC, labels_BC)
  got = several().evaluate(params(), batch)
  assert 'accuracy' not in got  # a constant answer may score 94 %
  np.testing.assert_allclose(got['loss'], losses.sum(), rtol=1e-5)

  objective = several(label_smoothing=0.1)
  smooth_BC = labels_BC * 0.9 + 0.1 / CLASSES
  augmented = objective.augment(batch, KEY)
  np.testing.assert_allclose(augmented['label'], smooth_BC, rtol=1e-5)
  loss, metrics = objective.loss(params(), augmented, KEY)
  want = losses_in_numpy('sigmoid', logits_BC, smooth_BC).mean()
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  assert metrics.keys() == {'loss'}
  rows = jax.device_get(got['rows'])
  assert rows.pop('mask').sum() == 12
  np.testing.assert_array_equal(rows['labels'], labels_BC)
  ap = sklearn.metrics.average_precision_score(labels_BC, logits_BC)
  f1 = sklearn.metrics.f1_score(labels_BC, logits_BC > 0, average='macro')
  found = objective.measure_rows(rows)
  assert found == pytest.approx({'map': ap, 'f1': f1})


def test_several_classes_want_the_sigmoid_loss():
  config = digits.get_config()
  facts = Facts(('cat', 'dog'), 9, several_labels=True)
  with pytest.raises(ValueError, match='loss.name=.sigmoid'):
    classified(config, facts)
  config.loss.name = 'sigmoid'
  made = classified(config, facts)
  shape = made.batch_shapes(5)['label']
  assert (shape.shape, shape.dtype) == ((5, 2), np.uint8)
  config.data.wrong_labels = 0.1
  with pytest.raises(ValueError, match='several classes .*wrong_labels is 0.1'):
    classified(config, facts)


def test_wrong_labels_are_those_of_training_alone():
  made = dataclasses.replace(make(), wrong_labels=1.0, class_names=('a', 'b'))
  record = {'image': np.zeros((8, 8, 3), np.uint8), 'label': 1, 'name': 'a'}
  rng = np.random.default_rng(0)
  assert made.train_transform()(record, rng)['label'] != 1
  assert made.eval_transform()(record)['label'] == 1


def test_detr_gives_no_class_to_an_image():
  config = test_every.config_of('classification')
  config_lib.choose_model(config, 'detr_r50')
  with pytest.raises(
    ValueError, match="model.name is 'detr', which predicts obj"
  ):
    CheckedConfig(config)


def test_the_fields_of_a_config_are_those_of_the_objective():
  config = digits.get_config()
  config.loss.update(name='sigmoid', label_smoothing=0.1, mixup=0.2, cutmix=0.3)
  config.data.wrong_labels = 0.4
  made = classified(config, Facts(('a', 'b'), 9), (16, 24))
  assert (made.loss_name, made.label_smoothing) == ('sigmoid', 0.1)
  assert (made.mixup, made.cutmix, made.wrong_labels) == (0.2, 0.3, 0.4)
  assert (made.class_names, made.images.size) == (('a', 'b'), (16, 24))
  assert made.model.num_classes == 2 and not made.several_labels
  shapes = made.batch_shapes(5)
  assert shapes['image'].shape == (5, 16, 24, 3)
  assert (shapes['label'].shape, shapes['label'].dtype) == ((5,), np.int32)


def test_balanced_weights_are_scikit_learns():
  """The loss is the mean of the losses times the weights of their classes."""
  labels = np.array([0] * 6 + [1] * 2 + [2])
  config = digits.get_config()
  config.loss.class_weights = 'balanced'
  facts = Facts(('a', 'b', 'c'), 9, class_counts=(6, 2, 1))
  made = classified(config, facts)
  want = sklearn.utils.class_weight.compute_class_weight(
    'balanced', classes=np.arange(3), y=labels
  )
  np.testing.assert_allclose(made.class_weights, want)
  config.data.balance = 1.0  # draws each class equally often
  drawn = classified(config, facts).class_weights
  np.testing.assert_allclose(drawn, np.ones(3))
  batch = raw_batch(12)
  weights = np.linspace(0.5, 2, CLASSES)
  weighted = dataclasses.replace(make(), class_weights=tuple(weights))
  augmented = weighted.augment(batch, KEY)
  loss, _ = weighted.loss(params(), augmented, KEY)
  losses = losses_in_numpy(
    'softmax', logits_of(batch), np.asarray(augmented['label'])
  )
  want = np.mean(losses * weights[batch['label']])
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  several = dataclasses.replace(facts, several_labels=True)
  config.loss.name = 'sigmoid'
  with pytest.raises(ValueError, match='class_weights is .* needs one class'):
    classified(config, several)


@pytest.mark.slow
def test_training_images_may_be_smaller_than_those_of_evaluation():
  """Interpolation keeps every second position exactly."""
  config = digits.get_config()
  config.data.update(image_size='20', train_size='12', augment='')
  config.model.update(width=16, depth=1, mlp_dim=32, heads=2, patch_size=4)
  facts = Facts(tuple('0123456789'), 10)
  objective = classified(config, facts, (20, 20))
  shape = objective.batch_shapes(2)['image'].shape
  assert shape == (2, 12, 12, 3)
  record = {'image': np.zeros((20, 20, 3), np.uint8), 'label': 1, 'name': 'a'}
  rng = np.random.default_rng(0)
  assert objective.train_transform()(record, rng)['image'].shape == (12, 12, 3)
  assert objective.eval_transform()(record)['image'].shape == (20, 20, 3)

  large = variants.init(objective.model, KEY, (20, 20))
  table_1LD = large['Transformer']['posembed_input']['pos_embedding']
  grid_55D = table_1LD[0, 1:].reshape(5, 5, 16)
  inner_LD = grid_55D[::2, ::2].reshape(9, 16)
  positions_1LD = jnp.concatenate([table_1LD[0, :1], inner_LD])[None]
  encoder = large['Transformer'] | {
    'posembed_input': {'pos_embedding': positions_1LD}
  }
  small = large | {'Transformer': encoder}
  batch = {
    'image': jax.random.normal(KEY, (2, 12, 12, 3)),
    'label': jax.nn.one_hot(jnp.array([3, 7]), 10),
  }
  plain = dataclasses.replace(
    objective, images=dataclasses.replace(objective.images, train_size=None)
  )
  np.testing.assert_allclose(
    objective.loss(large, batch, KEY)[0],
    plain.loss(small, batch, KEY)[0],
    rtol=1e-6,
  )
  config.data.train_size = '14'
  with pytest.raises(ValueError, match='14'):
    classified(config, facts, (20, 20))
