"""Filters of the patch embedding (figure 7, left)."""

from typing import Any

import numpy as np

COMPONENTS = 28


def principal_components(kernel_PPCD: np.ndarray, count: int) -> np.ndarray:
  """Returns the leading principal components of D filters, count x PPC.

  Each has length 1. They are sorted by explained variance, and there are at
  most min(D, P * P * C). The sign is chosen such that the largest entry is
  positive.
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
  """Returns the name and the kernel of the first filters of a model.

  They are the first convolution of a ResNet or hybrid, else the patch
  embedding.

  Raises:
    ValueError: if the model lacks both.
  """
  for name in ('conv_root', 'embedding'):
    if name in params:
      return name, params[name]['kernel']
  raise ValueError(
    'The model has neither a patch embedding nor the first convolution of a '
    'ResNet. Use a ViT, a hybrid or a ResNet.'
  )
