"""Fits the head to frozen features before fine-tuning (LP-FT, 2202.10054).

The gradients of an untrained head would distort the pre-trained features. A
linear probe needs one pass over the images instead of epochs of head training.
"""

import jax
import numpy as np

from vit_jax.data import sources
from vit_jax.evaluators import probe, ridge
from vit_jax.evaluators.evaluator import Parts
from vit_jax.models.model import Params
from vit_jax.training import features


def fitted(parts: Parts, params: Params, source: sources.Source) -> Params:
  """Returns parameters whose head is a linear probe of the body.

  The probe has the loss of training, softmax or sigmoid, but without class
  weights and label smoothing. DeiT's second head is not fitted.

  Raises ValueError unless images have their true classes, the head is linear,
  there are at least ten images, and all features are finite.
  """
  if parts.config.data.wrong_labels:
    raise ValueError(
      'head_first fits the head to the true labels, but data.wrong_labels '
      'changes labels. Set head_first=False.'
    )
  labels = sources.all_labels(source, parts.config.data.name)
  head = params.get('head', {})
  if set(head) != {'kernel', 'bias'} or 'pre_logits' in params:
    raise ValueError(
      f'head_first is True, but this {type(parts.objective.model).__name__} '
      'has no linear head. Set head_first=False.'
    )
  extract = parts.extractor(features.layer(parts.objective.model, 'pre_logits'))
  x_ND = extract(params, source, 'images for the head')
  if parts.config.loss.name == 'sigmoid' and labels.ndim == 1:
    labels = np.eye(len(parts.facts.class_names), dtype=np.uint8)[labels]
  ridge.check_finite('training', x_ND)
  found = probe.fit_probe(
    *(x_ND, labels, x_ND, labels),
    num_classes=len(parts.facts.class_names),
    mesh=parts.mesh,
  )
  new = {
    'kernel': np.float32(found.kernel_DC),
    'bias': np.float32(found.bias_C - found.mean_D @ found.kernel_DC),
  }
  return params | {
    'head': jax.tree.map(lambda x, y: jax.device_put(y, x.sharding), head, new)
  }
