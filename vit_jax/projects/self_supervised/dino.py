"""DINO: self-distillation without labels (2104.14294).

The teacher's parameters are a moving average of the student's. The teacher sees
two large views of an image; the student sees these and several small views.
From each view, the student predicts the teacher's output for every other large
view. Centring and sharpening keep the teacher's outputs from collapsing to a
constant.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.checkpoints import transfer
from vit_jax.data.images import size_of
from vit_jax.data.transforms import TrainTransform
from vit_jax.models import flops
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params, run
from vit_jax.objectives.objective import (
  OF_CLASSES,
  Facts,
  Objective,
  ObjectiveState,
  sums,
)
from vit_jax.projects.self_supervised.dino_model import DINOViT
from vit_jax.projects.self_supervised.views import Distortion, Views
from vit_jax.training.durations import durations_of, steps_of


@dataclasses.dataclass(frozen=True)
class DINO(Objective):
  """Learns to predict the teacher's output for other views of an image.

  `data.crop_min_area` is the smallest share of an image that a large view
  covers.

  Attributes:
    steps: number of steps of the run; set by `on_data`.
    warmup_steps: `temperature_warmup` in steps.
    freeze_steps: `freeze_last` in steps.
  """

  unused = {
    **OF_CLASSES,
    'data.augment': '',
    'data.crop_resize': 0.0,
  }
  trained = DINOViT
  result = 'teacher'

  model: DINOViT
  small_views: int = field(8, 'Number of small views.', valid='[0, 64]')
  small_size: str = field('96', 'Image size of small views in pixels.')
  small_area: tuple[float, float] = field(
    (0.05, 0.4),
    'Range of the share of an image that a small view covers.',
    valid='(0, 1]',
  )
  momentum: float = field(
    0.996,
    "The teacher's momentum at first; a cosine raises it to 1.",
    valid='[0, 1]',
  )
  temperature: float = field(0.1, 'Student temperature.', valid='(0, inf)')
  teacher_temperature: float = field(
    0.07, "The teacher's temperature after the warm-up.", valid='(0, inf)'
  )
  first_temperature: float = field(
    0.04, "The teacher's temperature at the start.", valid='(0, inf)'
  )
  temperature_warmup: str = field(
    '30 epochs', "How long the teacher's temperature rises linearly."
  )
  center_momentum: float = field(0.9, 'Momentum of the centre.', valid='[0, 1]')
  freeze_last: str = field(
    '1 epochs', 'How long the last layer of the projection is frozen.'
  )
  steps: int = 1
  warmup_steps: int = 0
  freeze_steps: int = 0

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    o = config.objective
    if len(o.small_area) != 2 or o.small_area[0] > o.small_area[1]:
      raise ValueError(
        f'objective.small_area is {o.small_area}. Give the smallest and the '
        'largest share of an image, as in (0.05, 0.4).'
      )
    made = super().from_config(config, image_size)
    size = size_of(o.small_size, 'objective.small_size')
    try:
      made.model.check(size)
    except ValueError as e:
      raise ValueError(f'objective.small_size is {o.small_size!r}: {e}') from e
    return made

  def on_data(self, config: ConfigDict, facts: Facts) -> Self:
    """Returns the objective with its durations in steps.

    Raises ValueError for an invalid duration.
    """
    total = durations_of(config, facts.examples).total

    def steps(name: str) -> int:
      try:
        return steps_of(
          getattr(self, name),
          batch_size=config.batch_size,
          examples=facts.examples,
          total_steps=total,
        )
      except ValueError as e:
        raise ValueError(f'objective.{name}: {e}') from e

    return dataclasses.replace(
      self,
      steps=total,
      warmup_steps=steps('temperature_warmup'),
      freeze_steps=steps('freeze_last'),
    )

  @property
  def _small_hw(self) -> tuple[int, int]:
    return size_of(self.small_size)

  def train_transform(self) -> Views:
    """Returns the views with the distortions of DINO's original code.

    Blur scales with the image size, and has the original radius at 224.
    """
    size, least = self.images.size, self.images.crop_min_area
    radius = 2.0 * max(size) / 224
    first, second, small = (
      Distortion(blurred, solarized, radius)
      for blurred, solarized in ((1.0, 0.0), (0.1, 0.2), (0.5, 0.0))
    )
    least_small, most_small = self.small_area
    return Views(
      (
        TrainTransform(size, least, augmentation=first),
        TrainTransform(size, least, augmentation=second),
      ),
      TrainTransform(self._small_hw, least_small, None, small, most_small),
      self.small_views,
    )

  def batch_shapes(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {'image': (size, 2, *self.images.size, 3)}
    if self.small_views:
      shapes['small'] = (size, self.small_views, *self._small_hw, 3)
    return {
      name: jax.ShapeDtypeStruct(shape, np.uint8)
      for name, shape in shapes.items()
    }

  @property
  def images_seen(self) -> float:
    """Cost of all views of an image, in units of training on one large view.

    A small view counts by its FLOPs. A view of the teacher counts 1/3, for the
    forward pass.
    """
    small, large = (
      flops.forward_flops(self.model, size)
      for size in (self._small_hw, self.images.size)
    )
    return 2 + self.small_views * small / large + 2 / 3

  def new_state(self, params: Params) -> ObjectiveState:
    """Returns the teacher, the centre of its outputs and the steps taken."""
    return {
      'center': jnp.zeros((self.model.prototypes,)),
      'steps': jnp.zeros((), jnp.int32),
      # A copy, because the step donates the parameters.
      'teacher': jax.tree.map(jnp.copy, params),
    }

  def augment(self, batch: Batch, key: jax.Array) -> Batch:
    """Normalises views to float32; with `data.flip`, flips them at random."""
    keys = jax.random.split(key)
    found = {}
    for (name, views), key in zip(sorted(batch.items()), keys, strict=False):
      images_NHWC = views.reshape(-1, *views.shape[2:])
      images_NHWC = self.images.flipped(images_NHWC, key)
      found[name] = self.images.normalize(images_NHWC).reshape(views.shape)
    return found

  def loss_and_seen(
    self,
    params: Params,
    fixed: Params,
    state: ObjectiveState,
    batch: Batch,
    key: jax.Array,
  ) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns the loss, metrics, and `center` [K]; K is `model.prototypes`.

    `center` is the mean of the teacher's outputs over images and views. The
    loss is the mean cross-entropy over pairs of a view of the teacher and
    another view of the student. `teacher_entropy` is the mean entropy of the
    teacher's probabilities in nats, from 0 (one-hot) to log K (uniform).
    """
    step = state['steps']
    teacher_B2K = self._outputs(state['teacher'], batch['image'], None)
    p_B2K = jax.nn.softmax(
      (teacher_B2K - state['center'][None, None]) / self.temperature_at(step)
    )
    logits_BVK = self._student(self._frozen(params, step), batch, key)
    log_p_BVK = jax.nn.log_softmax(logits_BVK / self.temperature)
    B, V, _ = log_p_BVK.shape
    cross_2V = -jnp.einsum(
      'BTK,BVK->TV', p_B2K, log_p_BVK, precision=jax.lax.Precision.HIGHEST
    )
    pairs_2V = 1 - jnp.eye(2, V)
    loss = jnp.sum(cross_2V * pairs_2V) / (B * 2 * (V - 1))
    entropy = -jnp.sum(jax.scipy.special.xlogy(p_B2K, p_B2K)) / (2 * B)
    metrics = {'loss': loss, 'teacher_entropy': entropy}
    return loss, (metrics, {'center': jnp.mean(teacher_B2K, axis=(0, 1))})

  def next_state(
    self, state: ObjectiveState, params: Params, seen: Any
  ) -> ObjectiveState:
    m, c = self.momentum_at(state['steps']), self.center_momentum
    return {
      'center': c * state['center'] + (1 - c) * seen['center'],
      'steps': state['steps'] + 1,
      'teacher': jax.tree.map(
        lambda t, s: m * t + (1 - m) * s, state['teacher'], params
      ),
    }

  def evaluate(self, params: Params, batch: Batch) -> Metrics:
    """Returns sums over the images whose `mask` is 1.

    The loss is the cross-entropy between the outputs for an image and for its
    mirror image. It shows whether training is stable, not how good the
    representations are.
    """
    x_BHWC = self.images.normalize(batch['image'])
    views = jnp.stack([x_BHWC, x_BHWC[:, :, ::-1]], axis=1)
    logits_B2K = self._outputs(params, views, None)
    p_B2K = jax.nn.softmax(logits_B2K / self.teacher_temperature)
    log_p_B2K = jax.nn.log_softmax(logits_B2K / self.temperature)
    losses_B = -jnp.sum(p_B2K * log_p_B2K[:, ::-1], axis=(1, 2)) / 2
    return sums(batch['mask'], {'loss': losses_B})

  def temperature_at(self, step: jax.Array) -> jax.Array:
    """Returns the teacher's temperature at a step, counted from 0."""
    warmup = self.warmup_steps
    part = jnp.minimum(step / warmup, 1) if warmup else jnp.ones(())
    first = self.first_temperature
    return first + (self.teacher_temperature - first) * part

  def momentum_at(self, step: jax.Array) -> jax.Array:
    """Returns the teacher's momentum at a step, counted from 0."""
    part = (1 + jnp.cos(jnp.pi * step / self.steps)) / 2
    return 1 - (1 - self.momentum) * part

  def _frozen(self, params: Params, step: jax.Array) -> Params:
    """Stops gradients of the last layer during the first `freeze_steps`.

    Weight decay still scales the layer's vectors. The layer normalises these
    vectors, so weight decay does not change the outputs.
    """
    projection = params['projection']
    last = {
      name: jnp.where(step < self.freeze_steps, jax.lax.stop_gradient(x), x)
      for name, x in projection.items()
      if name in ('kernel', 'scale')
    }
    return params | {'projection': projection | last}

  def _student(self, params: Params, batch: Batch, key: jax.Array) -> jax.Array:
    """Returns the logits of all views, BVK; the large views come first."""
    keys = jax.random.split(key)
    logits = [self._outputs(params, batch['image'], keys[0])]
    if self.small_views:
      sized = transfer.at_size(
        self.model, params, self.images.size, self._small_hw
      )
      logits.append(self._outputs(sized, batch['small'], keys[1]))
    return jnp.concatenate(logits, axis=1)

  def _outputs(
    self, params: Params, views: jax.Array, key: jax.Array | None
  ) -> jax.Array:
    """Returns the logits BVK of views [B, V, H, W, C].

    With a key, dropout and stochastic depth are applied.
    """
    B, V, *rest = views.shape
    views_NHWC = views.reshape(B * V, *rest)
    _, aux = run(self.model, params, views_NHWC, key, capture=('projected',))
    return aux['projected'].reshape(B, V, -1)
