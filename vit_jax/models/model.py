"""The base class of models, and the types of their inputs and outputs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.fields import REQUIRED, field

# A nested dictionary of arrays by module and parameter name.
Params = Any
# Arrays by name; the first axis goes over examples.
Batch = dict[str, jax.Array]
# Scalars by name; `Objective.evaluate` may add `rows`, a dict of arrays.
Metrics = dict[str, jax.Array]
# Mesh axes that a batch is sharded over.
BATCH_AXES = ('slice', 'data', 'fsdp')
# Mesh axes that a dimension of a parameter is sharded over.
Axes = str | tuple[str, ...] | None
# Sharding rules: a regular expression for parameter paths, and the mesh axes of
# the parameter's last dimensions. A scan stacks parameters along a new first
# dimension, so the same rules fit stacked parameters.
Partitions = tuple[tuple[str, tuple[Axes, ...]], ...]
# Fields of every Flax module.
_FLAX = ('parent', 'name')
# Values of `config.model.remat`, see `layers.remat`.
REMAT = (
  'none',
  'cheap',
  'nothing_saveable',
  'dots_saveable',
  'dots_with_no_batch_dims_saveable',
  'everything_saveable',
)


class Loop(NamedTuple):
  """Parameter names of layers with equal shapes.

  Unrolled layers have the names `prefix` + number, from `first`. Scanned layers
  share the name `stacked`.
  """

  prefix: str
  first: int
  stacked: str


class Model(nn.Module, kw_only=True):
  """A model: `apply` maps images to outputs and a dict of intermediates.

  Attributes:
    kind: name in `variants.ARCHITECTURES`.
    task_params: top-level names of the parameters that belong to the task (the
      head), not the body.
    optional_params: maps a field that enables a part of the model to the names
      of the part's parameters. If a model starts from a checkpoint that lacks
      these parameters, they are initialised. If only the checkpoint has them,
      they are dropped.
    compute_fields: fields that change predictions by rounding only; they do not
      change parameters, or only stack them.
    loops: groups of layers that a scan stacks.
    depth_loop: the loop whose length is the field `depth`, or None.
    after_layers: regular expression for the paths of the parameters that come
      after the layers of `depth_loop`.
    any_size: whether `apply` takes padded images of any size, with the argument
      `padding_BHW`.
    flop_capture: names of intermediates that `apply` computes only if they are
      captured, such as iGPT's colour logits, and that FLOP counts include.
    partitions: sharding rules, in addition to `sharding.RULES`.
    cast_params: regular expressions for the paths of parameters that are only
      used after a cast to `dtype`.
  """

  kind: ClassVar[str]
  task_params: ClassVar[tuple[str, ...]] = ('head',)
  optional_params: ClassVar[Mapping[str, tuple[str, ...]]] = {}
  compute_fields: ClassVar[tuple[str, ...]] = (
    'dropout',
    'stochastic_depth',
    'dtype',
    'scan',
    'remat',
  )
  loops: ClassVar[tuple[Loop, ...]] = ()
  depth_loop: ClassVar[Loop | None] = None
  after_layers: ClassVar[str] = ''
  any_size: ClassVar[bool] = False
  flop_capture: ClassVar[tuple[str, ...]] = ()
  partitions: ClassVar[Partitions] = ()
  cast_params: ClassVar[tuple[str, ...]] = ()

  num_classes: int = field(
    REQUIRED,
    'C, number of classes; 0 for a model without a head.',
    valid='[0, inf)',
  )
  dtype: Any = field(
    jnp.float32, 'Dtype of the computation; parameters are always float32.'
  )
  scan: bool = field(
    False,
    'Loops over one compiled layer with stacked parameters instead of '
    'unrolling the layers. This compiles several times faster.',
  )
  remat: str = field(
    'none',
    "Activations that a layer saves for the backward pass: all ('none'), "
    "matrix products and attention, but not cuDNN's ('cheap'), or chosen by a "
    'policy of `jax.checkpoint_policies`.',
    valid=REMAT,
  )

  @classmethod
  def own_fields(cls) -> tuple[dataclasses.Field[Any], ...]:
    """Returns the model's fields, with the fields of `Model` last."""
    shared = {x.name for x in dataclasses.fields(Model)}
    found = [x for x in dataclasses.fields(cls) if x.name not in _FLAX]
    return tuple(sorted(found, key=lambda x: x.name in shared))

  @property
  def task(self) -> str:
    """The kind of prediction.

    'classes' of an image, 'objects', 'masks' (a class per pixel), 'pixels' (the
    colour of each pixel) or 'patches' (masked patches).
    """
    return 'classes'

  @property
  def vectors(self) -> tuple[str, ...]:
    """Names of the outputs that are one vector per image."""
    return ('pre_logits', 'logits') if self.num_classes else ('pre_logits',)

  def outputs(
    self, outputs: jax.Array, aux: Mapping[str, Any]
  ) -> dict[str, jax.Array]:
    """Returns the outputs of `apply` for export and serving, by name."""
    return {'logits' if self.num_classes else 'pre_logits': outputs}

  @property
  def attention(self) -> str:
    """The kind of attention whose weights `capture=('attention',)` returns.

    'all': among all tokens. 'axial': along rows, then along columns. 'pixels':
    among the pixels of iGPT. 'objects': among patches, in the encoder of DETR.
    Empty: the model does not return attention weights.
    """
    return ''

  @property
  def extra_tokens(self) -> tuple[str, ...]:
    """The parameter name of each learned token before the patches."""
    return ()

  @property
  def num_blocks(self) -> int:
    """Number of outputs that `capture=('blocks',)` returns."""
    raise NotImplementedError

  def check(self, image_size: tuple[int, int]) -> None:
    """Raises ValueError if fields and image size do not fit together."""
    raise NotImplementedError

  @classmethod
  def stack_layers(cls, params: Params) -> Params:
    """Stacks parameters of unrolled layers along a first axis, for a scan."""
    tree = {
      name: cls.stack_layers(x) if isinstance(x, dict) else x
      for name, x in params.items()
    }
    for prefix, first, stacked in cls.loops:
      layers: list[Any] = []
      while (name := f'{prefix}{first + len(layers)}') in tree:
        layers.append(tree.pop(name))
      if layers:
        tree[stacked] = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    return tree

  @classmethod
  def unstack_layers(cls, params: Params) -> Params:
    """Undoes `stack_layers`."""
    tree = {
      name: cls.unstack_layers(x) if isinstance(x, dict) else x
      for name, x in params.items()
    }
    for prefix, first, stacked in cls.loops:
      if stacked in tree:
        layers = tree.pop(stacked)
        for i in range(len(jax.tree.leaves(layers)[0])):
          tree[f'{prefix}{first + i}'] = jax.tree.map(
            lambda x, i=i: x[i], layers
          )
    return tree

  def body(self) -> 'Model':
    """Returns the model without its head, that is, without `task_params`."""
    return self.clone(num_classes=0, parent=None)

  def parts(self) -> Mapping[str, 'Model']:
    """Returns submodels that other checkpoints can initialise, by name.

    The model's fields for a submodel begin with the submodel's name, as in
    `backbone_layers`.
    """
    return {}

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns the token grid (h, w) of images of (H, W) pixels.

    Raises:
      ValueError: if patches do not tile such images.
    """
    raise NotImplementedError

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    """Returns the number of tokens L, including the extra tokens."""
    h, w = self.grid(image_size)
    return len(self.extra_tokens) + h * w

  def pool_block(self, x_BXD: jax.Array) -> jax.Array:
    """Pools a block to BD: the class token, or the mean over the grid."""
    if 'cls' in self.extra_tokens:
      return x_BXD[:, 0]
    axes = tuple(range(1, x_BXD.ndim - 1))
    grid_BXD = x_BXD[:, len(self.extra_tokens) :]
    return jnp.mean(grid_BXD, axis=axes, dtype=jnp.float32)


def run(
  model: Any, params: Params, images: Any, key: jax.Array | None, **more: Any
) -> Any:
  """Applies a model, in training mode if there is a random key."""
  return model.apply(
    {'params': params},
    images,
    train=key is not None,
    rngs=None if key is None else {'dropout': key},
    **more,
  )


def padding(size_B2: jax.Array, image_size: Sequence[int]) -> jax.Array:
  """Returns a mask BHW: true outside of each image's (height, width)."""
  rows_H, columns_W = (jnp.arange(n) for n in image_size)
  return (rows_H[None, :, None] >= size_B2[:, 0, None, None]) | (
    columns_W[None, None] >= size_B2[:, 1, None, None]
  )
