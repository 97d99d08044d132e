"""DeiT's losses from its formulas, and the teacher as it was trained to see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests.checkpoints.random_weights import random_checkpoint
from tests.objectives import test_every
from vit_jax import config as config_lib
from vit_jax.checkpoints import opening
from vit_jax.convert import orbax
from vit_jax.experiment import CheckedConfig, Experiment
from vit_jax.models import flops
from vit_jax.objectives.objective import Facts
from vit_jax.train import train

CLASSES = 10


def config_of(**changes):
  return test_every.config_of('distillation', **changes)


def objective_of(config, names=range(CLASSES)):
  facts = Facts(tuple(map(str, names)), 1437)
  return Experiment(CheckedConfig(config, jax.devices()[:1]), facts).objective


def distilled(**changes):
  """Returns the config of a student with a distillation token."""
  config = config_of()
  fields = {k: v for k, v in config.model.items() if k != 'name'}
  config.model = config_lib.ConfigDict({'name': 'deit', **fields})
  config.update_from_flattened_dict(changes)
  return config


def test_evaluation_needs_no_teacher():
  config = config_of(eval_only=True, teacher='')
  assert CheckedConfig(config, jax.devices()[:1]).objective.teacher is None


def softmax(x):
  return special.softmax(np.asarray(x, np.float64), -1)


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'token'), [('hard', True), ('soft', False)])
def test_losses_are_the_papers(kind, token):
  weight, t = 0.3, 2.5
  fields = {'kind': kind, 'weight': weight, 'temperature': t}
  changes = {f'objective.{name}': x for name, x in fields.items()}
  objective = objective_of((distilled if token else config_of)(**changes))
  rng = np.random.default_rng(0)
  fixed = objective.fixed()
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32),
    jax.eval_shape(
      lambda: objective.model.init(
        jax.random.key(0), jnp.zeros((1, 16, 16, 3))
      )['params']
    ),
  )
  batch = {
    'image': rng.normal(0, 1, (6, 16, 16, 3)).astype(np.float32),
    'label': rng.dirichlet(np.ones(CLASSES), 6).astype(np.float32),
  }
  loss, (metrics, _) = jax.jit(objective.loss_and_seen)(
    params, fixed, {}, batch, jax.random.key(0)
  )
  mean, aux = jax.jit(objective.model.apply)({'params': params}, batch['image'])
  taught = np.asarray(objective.taught(fixed, batch['image']), np.float64)
  student = aux['logits_cls'] if token else mean
  told = aux['logits_dist'] if token else mean
  if token:
    assert np.abs(student - told).max() > 0.1
    np.testing.assert_allclose(mean, (student + told) / 2, rtol=1e-5)
  labelled = np.mean(-np.sum(batch['label'] * np.log(softmax(student)), -1))
  if kind == 'hard':
    best = taught.argmax(-1)
    other = np.mean(-np.log(softmax(told)[np.arange(6), best]))
  else:
    p = softmax(taught / t)
    q = softmax(np.asarray(told, np.float64) / t)
    other = t**2 * np.mean(np.sum(p * np.log(p / q), -1))
  np.testing.assert_allclose(metrics['distilled_loss'], other, rtol=1e-5)
  np.testing.assert_allclose(
    loss, (1 - weight) * labelled + weight * other, rtol=1e-5
  )
  said = np.argmax(mean, -1)
  assert metrics['agreement'] == np.mean(said == taught.argmax(-1))
  assert metrics['accuracy'] == np.mean(said == batch['label'].argmax(-1))


@pytest.mark.slow
def test_the_teacher_sees_images_as_it_was_trained_to():
  """The augmented ones in its own size and scaling; in bfloat16 if asked."""
  objective = objective_of(config_of())
  teacher = objective.teacher
  assert teacher.image_size == (24, 24) != objective.images.size
  assert teacher.preprocessing.mean != objective.images.preprocessing.mean
  rng = np.random.default_rng(0)
  for size in ((24, 16), (16, 16)):
    small = rng.integers(0, 256, (5, *size, 3), np.uint8)
    large = jax.image.resize(
      small.astype(np.float32), (5, 24, 24, 3), 'bilinear'
    )
    want = teacher.logits(large)
    batch = objective.images.normalize(small)
    got = objective.taught(objective.fixed(), batch)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  half = objective_of(config_of(**{'objective.teacher_dtype': 'bfloat16'}))
  fixed = half.fixed()
  assert {x.dtype for x in jax.tree.leaves(fixed)} == {jnp.dtype('bfloat16')}
  got = half.taught(fixed, batch)
  assert got.dtype == np.float32
  # What it makes of the five images on the way is in bfloat16, too.
  assert ':bf16[5,' in str(jax.make_jaxpr(half.taught)(fixed, batch))
  np.testing.assert_allclose(got, want, atol=0.1 * np.abs(want).max())


def test_no_gradient_reaches_the_teacher():
  objective = objective_of(config_of(**{'objective.kind': 'soft'}))
  made = test_every.experiment_of('distillation')
  batch = objective.augment(
    test_every.batches('distillation')[0], jax.random.key(0)
  )
  params, fixed = made.new_params(), objective.fixed()
  grads = jax.jit(
    jax.grad(
      lambda fixed: objective.loss_and_seen(
        params, fixed, {}, batch, jax.random.key(0)
      )[0]
    )
  )(fixed)
  assert not any(np.any(x) for x in jax.tree.leaves(grads))


@pytest.mark.slow
def test_a_run_saves_the_student_alone_and_knows_its_teacher(tmp_path):
  config = distilled(total='2 steps')
  train(config, str(tmp_path / 'run'))
  checkpoint = opening.open_checkpoint(str(tmp_path / 'run'))
  assert checkpoint.model.kind == 'deit'
  assert {'cls', 'dist', 'head', 'head_dist'} <= checkpoint.params.keys()
  sizes = [x.size for x in jax.tree.leaves(checkpoint.params)]
  shapes = flops.param_shapes(checkpoint.model, checkpoint.image_size)
  assert sum(sizes) == sum(x.size for x in jax.tree.leaves(shapes))
  other = opening.open_checkpoint(config.teacher)
  other.params['head']['bias'] = other.params['head']['bias'] + 1
  orbax.write(other, str(tmp_path / 'other'), 'float32')
  config.teacher = str(tmp_path / 'other')
  with pytest.raises(ValueError, match=r'objective.fixed: .*\n  teacher: '):
    train(config, str(tmp_path / 'run'))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'teacher': ''}, 'teacher is empty: .*--config.teacher=PATH'),
    ({'objective.weight': 1.5}, 'objective.weight is 1.5'),
    ({'objective.temperature': 0.0}, 'objective.temperature is 0.0; '),
  ],
)
def test_what_cannot_work_is_refused_before_the_data(changes, message):
  with pytest.raises(ValueError, match=message):
    CheckedConfig(config_of(**changes))


def test_a_teacher_must_classify(tmp_path):
  small = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 20, 'heads': 2}
  headless = random_checkpoint(None, (8, 8), 0, names=False, **small)
  orbax.write(headless, f'{tmp_path}/teacher', 'float32')
  with pytest.raises(ValueError, match='teacher, which does not classify'):
    CheckedConfig(config_of(teacher=f'{tmp_path}/teacher'))


def test_a_teacher_of_other_classes_is_refused():
  with pytest.raises(ValueError, match='has 10 classes and the data have 9'):
    objective_of(config_of(), range(9)).fixed()


def test_a_teacher_may_call_its_classes_otherwise(caplog):
  """As Hugging Face's and TFDS's ImageNet do."""
  caplog.set_level('INFO')
  objective_of(config_of(), map('n0{}'.format, range(10))).fixed()
  assert "Classes match by position: 0 is 'n00', 1 is 'n01'" in caplog.text


@pytest.mark.parametrize('weight', [0.0, 1.0])
def test_either_may_have_no_say(weight):
  changes = {'objective.weight': weight, 'objective.temperature': 0.5}
  CheckedConfig(config_of(**changes))


def test_deit_has_linear_heads_on_two_tokens():
  with pytest.raises(
    ValueError, match="model.pool is 'gap', which DeiT .* Use 'cls'"
  ):
    CheckedConfig(distilled(**{'model.pool': 'gap'}))
