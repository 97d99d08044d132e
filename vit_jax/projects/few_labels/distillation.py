"""Classification with distillation from a teacher (DeiT, 2012.12877).

Let y be the labels, w the weight and t the temperature. Let Z_t be the
teacher's logits, Z_s the logits of the student's class token and Z_d the logits
of its distillation token. The losses of section 4 are

  hard: (1 - w) CE(softmax(Z_s), y) + w CE(softmax(Z_d), argmax Z_t)
  soft: (1 - w) CE(softmax(Z_s), y)
        + w t^2 KL(softmax(Z_t / t) || softmax(Z_d / t))

Without a distillation token, Z_d = Z_s. Unlike here, the published code divides
the soft term by the number of classes.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.checkpoints import classes, opening
from vit_jax.models.fields import field
from vit_jax.models.model import Batch, Metrics, Params
from vit_jax.objectives import teachers
from vit_jax.objectives.classification import Classification
from vit_jax.objectives.objective import ObjectiveState


@dataclasses.dataclass(frozen=True)
class Distillation(Classification):
  """Learns from labels and from a teacher's predictions.

  Attributes:
    teacher: a classifier of any architecture and image size. It sees the same
      augmented images, resized and normalised for it. None for
      `eval_only`, or if an earlier stage of the run has yet to train it.
  """

  one_class = True
  unused = {'loss.name': 'softmax'}

  kind: str = field(
    'hard',
    "Target: the teacher's class (hard) or probabilities (soft).",
    valid=('hard', 'soft'),
  )
  weight: float = field(0.5, 'w, weight of distillation.', valid='[0, 1]')
  temperature: float = field(
    3.0, 't, temperature for kind=soft.', valid='(0, inf)'
  )
  teacher_dtype: str = field(
    'float32', "The teacher's dtype.", valid=('float32', 'bfloat16')
  )
  teacher: opening.Checkpoint = None  # type: ignore[assignment]
  class_order: str = ''

  @classmethod
  def from_config(cls, config: ConfigDict, image_size: tuple[int, int]) -> Self:
    teacher: Any = teachers.teacher_of(config)
    made = super().from_config(config, image_size)
    return dataclasses.replace(
      made, teacher=teacher, class_order=config.data.class_order
    )

  def fixed(self) -> Params:
    """Returns the teacher's parameters as NumPy arrays in `teacher_dtype`.

    Raises:
      ValueError: if the teacher's classes cannot be matched with the data's.
    """
    classes.check_same(self.teacher, self.class_names, self.class_order)
    return jax.tree.map(
      lambda x: np.asarray(x).astype(jnp.dtype(self.teacher_dtype)),
      self.teacher.params,
    )

  def taught(self, fixed: Params, images_BHWC: jax.Array) -> jax.Array:
    """Returns the teacher's logits, float32 BC, without gradient.

    `images_BHWC` are already augmented, and normalised for the student.
    """
    given = self.images.preprocessing
    mean_C, std_C = (
      255 * jnp.asarray(x, jnp.float32)[None, None, None]
      for x in (given.mean, given.std)
    )
    images_BHWC = images_BHWC * std_C + mean_C
    size = self.teacher.image_size
    if images_BHWC.shape[1:3] != size:
      B, _, _, C = images_BHWC.shape
      images_BHWC = jax.image.resize(images_BHWC, (B, *size, C), 'bilinear')
    model = self.teacher.model.clone(dtype=jnp.dtype(self.teacher_dtype))
    logits_BC, _ = model.apply(
      {'params': fixed}, self.teacher.normalize(images_BHWC)
    )
    return jax.lax.stop_gradient(logits_BC.astype(jnp.float32))

  def loss_and_seen(
    self,
    params: Params,
    fixed: Params,
    state: ObjectiveState,
    batch: Batch,
    key: jax.Array,
  ) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Returns the mean loss of an augmented batch, and its metrics.

    `agreement` is the share of images for which student and teacher predict the
    same class.
    """
    taught_BC = self.taught(fixed, batch['image'])
    logits_BC, aux = self._outputs(params, batch['image'], key)
    told_BC = aux.get('logits_dist', logits_BC)
    labelled = jnp.mean(
      self._losses(aux.get('logits_cls', logits_BC), batch['label'])
    )
    if self.kind == 'hard':
      losses_B = optax.softmax_cross_entropy_with_integer_labels(
        told_BC, jnp.argmax(taught_BC, -1)
      )
    else:
      t = self.temperature
      losses_B = t**2 * optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(told_BC / t), jax.nn.log_softmax(taught_BC / t)
      )
    distilled = jnp.mean(losses_B)
    loss = (1 - self.weight) * labelled + self.weight * distilled
    said_B = jnp.argmax(logits_BC, -1)
    metrics = {
      'loss': loss,
      'distilled_loss': distilled,
      'accuracy': jnp.mean(said_B == jnp.argmax(batch['label'], -1)),
      'agreement': jnp.mean(said_B == jnp.argmax(taught_BC, -1)),
    }
    return loss, (metrics, {})
