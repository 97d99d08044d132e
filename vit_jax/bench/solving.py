"""Few-shot classifiers.

Choosing and fitting them beside solving the normal
equations anew for every penalty.
"""

import argparse
import functools
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Sequence

import numpy as np

from vit_jax.bench import charts, race
from vit_jax.bench.output import Output
from vit_jax.evaluators import few_examples, ridge

_ROUNDS = 5


def bench(
  args: argparse.Namespace,
  output: Output,
  classes: int = 100,
  width: int = 1024,
  shots: Sequence[int] = (1, 5, 10, 25),
  seeds: int = 5,
) -> None:
  """Prints the seconds that fits of C classes at D = `width` features take.

  Ours are all fits of an evaluation, with so many `shots` a class and `seeds`
  draws, with the penalty chosen from `ridge.L2_GRID`, standardising
  features included. The other is one `numpy.linalg.solve` of the normal
  equations, of D x D, for each number of shots, seed and penalty, with nothing
  else on the clock but adding the penalty: neither the products of features nor
  the choice. Both have all cores, and measuring on a test set is left out of
  both.
  """
  del args
  features_ND, labels_N = _features(classes, width, max(shots))
  plan = few_examples.plan(labels_N, classes, shots, seeds)

  def ours() -> float:
    def fit(shots: int, seed: int) -> None:
      indices_K = plan[shots, seed]
      few_examples.FITS['choose'](
        features_ND[indices_K], labels_N[indices_K], classes
      )

    start_s = time.perf_counter()
    few_examples.in_threads(fit, plan)
    return time.perf_counter() - start_s

  def solves() -> float:
    seconds = 0.0
    for indices_K in plan.values():
      x_KD = features_ND[indices_K].astype(np.float64)
      x_KD = (x_KD - x_KD.mean(axis=0)) / x_KD.std(axis=0)
      gram_DD = x_KD.T @ x_KD
      target_DC = x_KD.T @ ridge.one_vs_rest(labels_N[indices_K], classes)
      for l2 in ridge.L2_GRID:
        start_s = time.perf_counter()
        matrix_DD = gram_DD.copy()
        matrix_DD[np.diag_indices(width)] += l2
        np.linalg.solve(matrix_DD, target_DC)
        seconds += time.perf_counter() - start_s
    return seconds

  version = importlib.metadata.version('numpy')
  print(f'Python {platform.python_version()}, numpy {version}')
  print(
    f'{classes} classes, {width} features, shots {", ".join(map(str, shots))}, '
    f'{seeds} seeds, {len(ridge.L2_GRID)} penalties'
  )
  ours()  # warms up
  found = race.rounds([ours, solves], _ROUNDS)
  rows: list[race.Row] = [
    {
      'contender': name,
      'seconds': statistics.median(seconds),
      'fastest': min(seconds),
      'slowest': max(seconds),
    }
    for name, seconds in zip(('ours', 'numpy.linalg.solve'), found, strict=True)
  ]
  print(f'seconds, median of {_ROUNDS} rounds (fastest to slowest):')
  for row in rows:
    print(
      '  {contender:20}{seconds:8.3f}  ({fastest:.3f} to {slowest:.3f})'.format(
        **row
      )
    )
  print(f'numpy.linalg.solve / ours: {race.ratio(*reversed(found)):.1f}')
  output.add(rows)
  output.finish(
    functools.partial(
      charts.bars,
      title='all fits of a few-shot evaluation',
      column='seconds',
      x_label='seconds, less is better',
    )
  )


def _features(
  classes: int, width: int, per_class: int
) -> tuple[np.ndarray, np.ndarray]:
  """Twice as many examples as are drawn, correlated as features are."""
  rng = np.random.default_rng(0)
  labels_N = np.repeat(np.arange(classes), 2 * per_class)
  centre_CD = 0.15 * rng.standard_normal((classes, width))
  latent_ND = centre_CD[labels_N] + rng.standard_normal((len(labels_N), width))
  # Variances that fall with the index, turned so that all features mix.
  latent_ND *= np.arange(1, width + 1) ** -0.5
  turn_DD = np.linalg.qr(rng.standard_normal((width, width)))[0]
  return (latent_ND @ turn_DD).astype(np.float32), labels_N
