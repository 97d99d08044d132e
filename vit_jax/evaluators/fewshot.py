"""Few-shot accuracy, linear probes and k-NN on frozen features."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.checkpoints import opening, transfer
from vit_jax.data import bad_images, benchmarks, sources
from vit_jax.data.sources import LabelledSource, Source
from vit_jax.evaluators import knn as knn_lib
from vit_jax.evaluators import probe as probe_lib
from vit_jax.evaluators import ridge
from vit_jax.evaluators.evaluator import Evaluator, Parts
from vit_jax.evaluators.fewshot_report import Curve, ProbeResult
from vit_jax.evaluators.shots import Shots
from vit_jax.objectives.objective import Best, Objective
from vit_jax.training import features as features_lib
from vit_jax.training import sharding

_log = logging.getLogger(__name__)

SHOTS, SEEDS = (1, 5, 10, 25), 5
# Small enough for the memory of most devices that can train the model.
BATCH_PER_DEVICE = 64


def fewshot(
  checkpoint: opening.Checkpoint | str,
  data: str | Mapping[str, Any],
  *,
  shots: Sequence[int] = SHOTS,
  seeds: int = SEEDS,
  layer: str = 'pre_logits',
  l2: str = 'choose',
  probe: bool = False,
  knn: bool = False,
  **options: Any,
) -> Curve:
  """Measures few-shot accuracy on frozen features.

  All processes must call it together, and must see the same files.

  Args:
    checkpoint: an open checkpoint, or an argument of `open_checkpoint`.
    data: see `sources.data_config`.
    shots: numbers of examples per class.
    seeds: number of times the shots are drawn.
    layer: see `features.layer`.
    l2: 'choose' or 'fixed', see `Shots`.
    probe: whether to also fit a logistic regression to all training examples.
    knn: whether to also measure k-NN on all training examples.
    **options: `train_split` and `test_split`, by default `train` and `test` or
      the splits that a benchmark such as `vtab/dtd` defines; `image_size`, an
      (H, W) to which position embeddings are interpolated, by default the
      checkpoint's; `batch_size`, by default 64 per device, which is rounded up
      to a multiple of the devices.

  Raises:
    OSError, ImportError: if the checkpoint, the data or a library is missing.
    ValueError: if an argument or image is invalid (before the model runs), or
      if features are not finite.
  """
  frozen = _FrozenModel(checkpoint, data, **options)
  train, test = frozen.splits
  function = features_lib.layer(frozen.checkpoint.model, layer)
  labels_N = train.labels()
  drawn = Shots(
    labels_N,
    test.labels(),
    train.class_names,
    shots=shots,
    seeds=seeds,
    l2=l2,
  )
  if probe:
    probe_lib.hold_out(labels_N)  # raises ValueError if there are too few
  takes_all = probe or knn
  some = train if takes_all else sources.subset(train, drawn.rows_R.tolist())
  train_XD, test_MD = frozen.extract(function, (some, test))
  shots_RD = train_XD[drawn.rows_R] if takes_all else train_XD
  results = drawn.evaluate(shots_RD, test_MD)
  probed = None
  if probe:
    probed = frozen.probe('all training images', train_XD, test_MD)
  voted = frozen.knn(train_XD, test_MD) if knn else None
  return Curve(frozen.checkpoint.path, results, probed, voted)


def probe_layers(
  checkpoint: opening.Checkpoint | str,
  data: str | Mapping[str, Any],
  **options: Any,
) -> dict[str, ProbeResult]:
  """Fits a linear probe to every layer, as in figure 2 of iGPT.

  All processes must call it together. `fewshot` documents the arguments and
  errors. Returns results by name of the layer, from the first to `pre_logits`.
  """
  frozen = _FrozenModel(checkpoint, data, **options)
  model = frozen.checkpoint.model
  probe_lib.hold_out(frozen.splits[0].labels())  # raises if there are too few
  names = [*(f'block_{i}' for i in range(model.num_blocks)), 'pre_logits']
  layers = [features_lib.layer(model, name) for name in names]

  def every_layer(params: Any, images_BHWC: jax.Array) -> jax.Array:
    # XLA merges the calls, so the model runs once for all layers.
    found = [layer(params, images_BHWC) for layer in layers]
    return jnp.concatenate(found, axis=-1)

  image_1HWC = jax.ShapeDtypeStruct(
    (1, *frozen.checkpoint.image_size, 3), jnp.float32
  )
  widths = [
    jax.eval_shape(layer, frozen.checkpoint.params, image_1HWC).shape[-1]
    for layer in layers
  ]
  train, test = (
    np.split(x_NX, np.cumsum(widths)[:-1], axis=-1)
    for x_NX in frozen.extract(every_layer, frozen.splits)
  )
  found = map(frozen.probe, names, train, test)
  return dict(zip(names, found, strict=True))


class _FrozenModel:
  """A checkpoint and the splits on which its features are measured."""

  def __init__(
    self,
    checkpoint: opening.Checkpoint | str,
    data: str | Mapping[str, Any],
    *,
    train_split: str = '',
    test_split: str = '',
    image_size: tuple[int, int] | None = None,
    batch_size: int | None = None,
  ):
    """Opens the checkpoint and the splits; see `fewshot`."""
    self._mesh = sharding.make_mesh({'data': -1, 'fsdp': 1, 'tensor': 1})
    count = self._mesh.size
    wanted = batch_size or BATCH_PER_DEVICE * count
    self._batch_size = -(-wanted // count) * count
    self.checkpoint = opening.open_checkpoint(checkpoint)
    if image_size:
      self.checkpoint = transfer.resized(self.checkpoint, image_size)
    config = sources.data_config(data)
    usual_train, usual_test = benchmarks.usual_splits(config.name)
    names = train_split or usual_train, test_split or usual_test
    self.splits = open_splits(config, *names)
    train, test = self.splits
    if jax.process_index() == 0:
      _log.info(
        f'model    {self.checkpoint.path}: {self.checkpoint.describe()}\n'
        f'data     {config.name}, {len(train.class_names):,} classes: '
        f'{len(train):,} images of {names[0]}, {len(test):,} of {names[1]}'
      )

  def extract(
    self, function: features_lib.Function, parts: Sequence[Source]
  ) -> list[np.ndarray]:
    """Returns the features of training and test images, ND and MD."""
    extractor = features_lib.Extractor(
      function,
      self.checkpoint.images,
      batch_size=self._batch_size,
      mesh=self._mesh,
    )
    everywhere = sharding.replicated(self._mesh)
    params = sharding.place(self.checkpoint.params, everywhere)
    found = []
    for source, name in zip(parts, ('training', 'test'), strict=True):
      found.append(extractor(params, source, f'{name} images'))
      ridge.check_finite(name, found[-1])
    return found

  def probe(
    self, name: str, train_ND: np.ndarray, test_MD: np.ndarray
  ) -> ProbeResult:
    """Fits a linear probe to the features of both splits."""
    train, test = self.splits
    found = probe_lib.fit_probe(
      train_ND,
      train.labels(),
      test_MD,
      test.labels(),
      num_classes=len(train.class_names),
      mesh=self._mesh,
    )
    if not found.converged:
      _log.warning(
        'The linear probe of %s has not converged after %d iterations.',
        *(name, found.iterations),
      )
    return ProbeResult(found.l2, found.accuracy)

  def knn(self, train_ND: np.ndarray, test_MD: np.ndarray) -> float:
    """Returns the accuracy of k-NN on the features of both splits."""
    train, test = self.splits
    return knn_lib.accuracy(
      knn_lib.blocks_of(train_ND, train.labels()),
      test_MD,
      test.labels(),
      num_classes=len(train.class_names),
      mesh=self._mesh,
    )


class FewShotEvaluator(Evaluator):
  """Measures the accuracy of classifiers fit to a few examples per class."""

  def __post_init__(self) -> None:
    entry = self.entry
    self._extract = _extractor_of(self.parts, entry)
    self._train, self._test = train, test = _splits_of(self.parts, entry)
    given = {key: entry[key] for key in ('shots', 'seeds', 'l2')}
    self._shots = Shots(
      train.labels(), test.labels(), train.class_names, **given
    )

  @classmethod
  def metrics(
    cls, entry: ConfigDict, objective: type[Objective]
  ) -> Mapping[str, Best]:
    return {f'{k}shot_accuracy': 'highest' for k in entry.shots}

  def run(self, params: Any) -> dict[str, float]:
    some = sources.subset(self._train, self._shots.rows_R.tolist())
    results = self._shots.evaluate(
      self._extract(params, some, self.name),
      self._extract(params, self._test, self.name),
    )
    return {
      f'{self.name}/{k}shot_accuracy': float(
        np.mean([r.accuracy for r in results if r.shots == k])
      )
      for k in dict.fromkeys(r.shots for r in results)
    }


class KNNEvaluator(Evaluator):
  """Measures k-NN on all training images, without storing their features."""

  fixed_metrics = {'accuracy': 'highest'}

  def __post_init__(self) -> None:
    self._extract = _extractor_of(self.parts, self.entry)
    self._train, self._test = _splits_of(self.parts, self.entry)

  def run(self, params: Any) -> dict[str, float]:
    test_MD = self._extract(params, self._test, f'{self.name}, test')
    labels_N = self._train.labels()
    batches = self._extract.batches(
      params, self._train, f'{self.name}, training'
    )
    accuracy = knn_lib.accuracy(
      ((x_BD, np.where(i_B < 0, -1, labels_N[i_B])) for x_BD, i_B in batches),
      test_MD,
      self._test.labels(),
      num_classes=len(self._train.class_names),
      mesh=self.parts.mesh,
      k=self.entry.k,
    )
    return {f'{self.name}/accuracy': accuracy}


def _extractor_of(parts: Parts, entry: ConfigDict) -> features_lib.Extractor:
  return parts.extractor(features_lib.layer(parts.objective.model, entry.layer))


def _splits_of(
  parts: Parts, entry: ConfigDict
) -> tuple[LabelledSource, LabelledSource]:
  """Opens the training and test split of an entry."""
  data = parts.config.data.copy_and_resolve_references()
  data.update(name=entry.data, class_order='')
  train, test = benchmarks.usual_splits(entry.data)
  return open_splits(data, entry.train_split or train, entry.test_split or test)


def open_splits(
  data: ConfigDict, train_split: str, test_split: str
) -> tuple[LabelledSource, LabelledSource]:
  """Opens two splits with the same classes, and checks their images."""
  train, test = (
    sources.labelled(
      bad_images.open_checked(data, split), f'{data.name} {split}'
    )
    for split in (train_split, test_split)
  )
  sources.check_same_classes(
    data.name, (test_split, train_split), (test, train)
  )
  return train, test
