"""Principal components of patch tokens as colours, as in DINOv2."""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.training import features
from vit_jax.visualize import sections
from vit_jax.visualize.photos import Subject

# Share of the patches to clip at each end of a component's range.
_SATURATED = 0.01


def section(subject: Subject) -> sections.Section:
  """Principal components of patches as colours, one basis for all images.

  Arrays: `colours` (image, h, w, RGB), from 0 to 1; `files`.

  Raises:
    ValueError: if the model is not a ViT or a hybrid.
  """
  checkpoint = subject.checkpoint
  model = checkpoint.model
  if model.attention not in ('all', 'axial'):
    raise ValueError(
      f'This model is a {type(model).__name__}. Components are computed from '
      'the patch tokens of a ViT. Use a ViT or a hybrid.'
    )
  encode = jax.jit(features.layer(model, 'pre_logits', patches=True))
  tokens = []
  for photograph in subject.photographs:
    images_1HWC = checkpoint.normalize(jnp.asarray(photograph.seen_HWC)[None])
    tokens += [*encode(checkpoint.on_device, images_1HWC)]
  colours_Bhw3 = colours(np.stack(tokens))

  def line(i: int) -> dict[str, np.ndarray]:
    shown_HWC = subject.photographs[i].shown()
    height, width, _ = shown_HWC.shape
    _, h, w, _ = colours_Bhw3.shape
    rows = np.arange(height) * h // height
    columns = np.arange(width) * w // width
    painted_HWC = colours_Bhw3[i][rows[:, None], columns[None]]
    return {
      'image': shown_HWC,
      'components': (255 * painted_HWC).astype(np.uint8),
    }

  return sections.Section(
    'Principal components of the patches',
    'Red, green and blue are the first three components of the encoded patches '
    'of all images together. Similar features have similar colours.',
    {'colours': colours_Bhw3, 'files': subject.files},
    sections.sheets(
      'pca', 'principal components of the patches', subject.photographs, line
    ),
  )


def colours(tokens_BhwD: np.ndarray) -> np.ndarray:
  """Returns the first three principal components of the patches, Bhw3.

  All images share one basis, so a colour means the same in every photograph.
  Values are from 0 to 1. The sign of each component is chosen so that its
  loading of largest magnitude is positive.
  """
  B, h, w, D = tokens_BhwD.shape
  x_LD = tokens_BhwD.reshape(-1, D).astype(np.float64)
  x_LD = x_LD - x_LD.mean(axis=0)
  _, basis_ID = np.linalg.eigh(x_LD.T @ x_LD)
  basis_D3 = basis_ID[:, ::-1][:, :3]
  largest_3 = np.abs(basis_D3).argmax(axis=0)
  found_L3 = x_LD @ (basis_D3 * np.sign(basis_D3[largest_3, range(3)]))
  low_3, high_3 = np.quantile(found_L3, (_SATURATED, 1 - _SATURATED), axis=0)
  spread_3 = np.where(high_3 > low_3, high_3 - low_3, 1)
  return np.clip((found_L3 - low_3) / spread_3, 0, 1).reshape(B, h, w, 3)
