"""What claims need of a trained model that its evaluators do not measure."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import sources
from vit_jax.visualize import distance, filters, masking, similarity

IMAGES = 200
# How far away the 3 x 3 positions of a convolution are on average, in patches.
CONVOLUTION = (4 + 4 * 2**0.5) / 9
# What rollout discards, by how heads are fused: as the paper's D.7 has it (the
# mean), and as is said to isolate objects better.
_DISCARDED = {'mean': 0.0, 'max': 0.9}


def inside(checkpoint: Checkpoint, data: str, split: str) -> dict[str, float]:
  """Looks into a ViT or a hybrid.

  Returns:
    distance/I: mean attention distance of layer I, the heads' mean, in patches;
    distance/farthest: of the head of the first layer that looks farthest;
    positions/nearness: minus the correlation of the cosine of two patches'
      position embeddings with their distance;
    filters/share: of the variance of the first filters in a quarter of their
      principal components;
    filters/random: the same of as many normally distributed filters;
    masking/FUSION: accuracy without the 30 % of pixels of the highest rollout.
  """
  source = sources.open_source(data, split)
  source = sources.subset(source, range(min(IMAGES, len(source))))
  subject, labels_N = masking.of_source(
    checkpoint, sources.labelled(source, data)
  )
  layers, _ = next(subject.at_work('distance'))
  distance_XN = distance.mean_distances(layers, 1.0)['all']
  found = {f'distance/{i}': float(x.mean()) for i, x in enumerate(distance_XN)}
  found['distance/farthest'] = float(distance_XN[0].max())
  cosine_LL = similarity.cosine(
    similarity.tables(checkpoint)[0], layers.grid
  ).reshape([np.prod(layers.grid)] * 2)
  pairs = np.triu_indices(len(cosine_LL), 1)
  between_LL = distance.between(layers.grid)
  correlation = np.corrcoef(cosine_LL[pairs], between_LL[pairs])[0, 1]
  found['positions/nearness'] = -float(correlation)
  _, kernel = filters.first_kernel(checkpoint.params)
  found['filters/share'] = leading_share(kernel)
  noise = np.random.default_rng(0).standard_normal(np.shape(kernel))
  found['filters/random'] = leading_share(noise)
  for fusion, discard in _DISCARDED.items():
    rights = masking.rights(subject, labels_N, fusion=fusion, discard=discard)
    found[f'masking/{fusion}'] = float(rights['highest'].mean())
  return found


def leading_share(kernel_PPCD: np.ndarray) -> float:
  """Returns the filters' variance in the first quarter of its components."""
  D = np.shape(kernel_PPCD)[-1]
  filters_DF = np.asarray(kernel_PPCD, np.float64).reshape(-1, D).T
  singular = np.linalg.svd(filters_DF - filters_DF.mean(0), compute_uv=False)
  variance = singular**2
  return float(variance[: -(-len(variance) // 4)].sum() / variance.sum())


def queries(checkpoint: Checkpoint, data: str, split: str) -> dict[str, float]:
  """Looks at where the queries of a DETR look.

  Returns:
    queries/spread: standard deviation over queries of the mean centre of each
      one's boxes, in sides of the image: 0 where all look everywhere alike, .29
      where their means are spread evenly over the image.
  """
  source = sources.open_source(data, f'{split}[:{IMAGES}]')
  images_BHWC = np.stack([source[i]['image'] for i in range(len(source))])
  apply = jax.jit(checkpoint.model.apply)
  _, aux = apply(
    {'params': checkpoint.on_device},
    checkpoint.normalize(jnp.asarray(images_BHWC)),
  )
  centres_BQ2 = np.asarray(aux['boxes'][-1], np.float64)[..., :2]
  return {'queries/spread': spread(centres_BQ2)}


def spread(centres_BQ2: np.ndarray) -> float:
  """Returns the standard deviation of the queries' means, both axes' mean."""
  return float(np.sqrt(centres_BQ2.mean(axis=0).var(axis=0).mean()))


MEASURES: Mapping[str, Callable[[Checkpoint, str, str], dict[str, float]]] = {
  'inside': inside,
  'queries': queries,
}
