"""The patch embedding's filters (figure 7, left)."""

from typing import Any

import numpy as np

COMPONENTS = 28


def principal_components(kernel_PPCD: np.ndarray, count: int) -> np.ndarray:
  """Returns the leading principal components of D filters, count x PPC.

  Each has length 1; they come in the order of the variance that they explain.
  There are no more than D or P * P * C. A component and its negative are the
  same to the analysis: here the entry of largest size is positive.
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
  """Returns the name and the kernel of the filters that see the image itself.

  Those of the patches, or of a ResNet's first convolution where there is one.

  Raises:
    ValueError: if the model has neither.
  """
  for name in ('conv_root', 'embedding'):
    if name in params:
      return name, params[name]['kernel']
  raise ValueError(
    'The model has no filters of patches, and no first convolution of a ResNet.'
  )
