"""Filters of the patch embedding (ViT paper, figure 7 left)."""

from typing import Any

import numpy as np

# Number of components in figure 7.
COMPONENTS = 28


def principal_components(kernel_PPCD: np.ndarray, count: int) -> np.ndarray:
  """Returns the leading principal components of D filters, XPPC.

  X is `count`, but at most min(D, P * P * C). Each component has length 1, and
  its entry with the largest absolute value is positive. Components are sorted
  by explained variance.
  """
  *shape, D = kernel_PPCD.shape
  filters_DF = np.asarray(kernel_PPCD, np.float64).reshape(-1, D).T
  centred_DF = filters_DF - filters_DF.mean(axis=0)
  _, _, found = np.linalg.svd(centred_DF, full_matrices=False)
  found = found[:count]
  largest = np.abs(found).argmax(axis=1)
  found *= np.sign(found[np.arange(len(found)), largest])[:, None]
  return found.reshape(-1, *shape)


def first_kernel(params: Any) -> tuple[str, Any]:
  """Returns the name and the kernel of a model's first convolution.

  Raises ValueError if the top level of `params` has neither a ResNet's first
  convolution (`conv_root`) nor a patch embedding (`embedding`).
  """
  for name in ('conv_root', 'embedding'):
    if name in params:
      return name, params[name]['kernel']
  raise ValueError(
    'This model is neither a ViT, a hybrid nor a ResNet. Filters are drawn '
    'only for these models: give a checkpoint of one of them.'
  )
