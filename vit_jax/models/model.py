"""The contract of models."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

# A nested dictionary of arrays by the names of modules and parameters.
Params = Any
# Arrays by name, examples first.
Batch = dict[str, jax.Array]
# Scalars by name.
Metrics = dict[str, jax.Array]
# The axes of the device mesh that split a batch.
BATCH_AXES = ('slice', 'data', 'fsdp')
# The axes of the device mesh that split a dimension of a parameter.
Axes = str | tuple[str, ...] | None
# From a pattern of paths to the axes of a parameter's last dimensions, so that
# layers stacked for a scan share the rules.
Partitions = tuple[tuple[str, tuple[Axes, ...]], ...]
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
  """Names of equal layers that a model unrolls or scans over.

  Unrolled, the prefix and numbers from `first`; scanned, `stacked`.
  """

  prefix: str
  first: int
  stacked: str


class Model(nn.Module):
  """From images to outputs: `apply` returns them and a dict of intermediates.

  Attributes:
    kind: its name in `variants.ARCHITECTURES` and in `config.model.name`.
    task_params: top-level names of the parameters of its task, not its body.
    optional_params: by the field that switches a part on, the names of its
      parameters. Transfer initialises them if the checkpoint lacks them, and
      drops them if the model does.
    compute_fields: fields that change the computation and not the parameters.
    loops: the layers that a scan stacks.
    depth_loop: the loop of the layers that its depth counts, or None.
    after_layers: pattern of the paths of the parameters after those layers.
    any_size: whether it takes padded images of any size with `padding_BHW`.
    counted: names for `capture` of computations of training alone, for FLOPs.
    partitions: rules for splitting its parameters, beside `sharding.RULES`.
    cast_params: patterns of the paths of parameters that are used in `dtype`
      alone.
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
  counted: ClassVar[tuple[str, ...]] = ()
  partitions: ClassVar[Partitions] = ()
  cast_params: ClassVar[tuple[str, ...]] = ()

  @classmethod
  def own_fields(cls) -> tuple[dataclasses.Field[Any], ...]:
    """Returns its fields without those of every Flax module."""
    return tuple(
      field
      for field in dataclasses.fields(cls)
      if field.name not in ('parent', 'name')
    )

  @property
  def task(self) -> str:
    """What it predicts: 'classes', 'objects', 'pixels' or 'patches'."""
    return 'classes'

  @property
  def vectors(self) -> tuple[str, ...]:
    """Its outputs that are one vector for each image."""
    return ('pre_logits', 'logits') if self.num_classes else ('pre_logits',)

  def outputs(
    self, outputs: jax.Array, aux: Mapping[str, Any]
  ) -> dict[str, jax.Array]:
    """Names the outputs of `apply` that export and serving give."""
    del aux
    return {'logits' if self.num_classes else 'pre_logits': outputs}

  @property
  def attention(self) -> str:
    """How tokens attend to each other in every layer.

    'all': to all; 'axial': to their row, then to their column; 'pixels': to all
    or to earlier ones; 'objects': to all but padding, and queries to them;
    empty: not at all.
    """
    return ''

  @property
  def extra_tokens(self) -> tuple[str, ...]:
    """The learned tokens before those of the grid, by parameter name."""
    return ()

  @property
  def num_blocks(self) -> int:
    """How many outputs `capture=('blocks',)` gives."""
    raise NotImplementedError

  def check(self, image_size: tuple[int, int]) -> None:
    """Raises ValueError unless the fields and the image size fit together."""
    raise NotImplementedError

  @classmethod
  def stack_layers(cls, params: Params) -> Params:
    """Turns unrolled layers into the leading axis that a scanned model has."""
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
    """Turns a scanned model's leading layer axis into unrolled layers."""
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
    """Returns the model without its task and `task_params`."""
    return self.clone(num_classes=0, parent=None)

  def parts(self) -> Mapping[str, 'Model']:
    """Returns by name the parts that a checkpoint of another model can start.

    Names of their fields start with the part's: `backbone_layers`.
    """
    return {}

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns (h, w) of the tokens of an image (H, W) in pixels.

    Raises:
      ValueError: if the model does not take such images.
    """
    raise NotImplementedError

  def describe(self, image_size: tuple[int, int]) -> str:
    """Describes the model in a line."""
    raise NotImplementedError

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    """Returns L, the extra tokens included."""
    h, w = self.grid(image_size)
    return len(self.extra_tokens) + h * w

  def pool_block(self, x_BXD: jax.Array) -> jax.Array:
    """Returns the class token of a block's output, or the grid's mean, BD."""
    if 'cls' in self.extra_tokens:
      return x_BXD[:, 0]
    axes = tuple(range(1, x_BXD.ndim - 1))
    grid_BXD = x_BXD[:, len(self.extra_tokens) :]
    return jnp.mean(grid_BXD, axis=axes, dtype=jnp.float32)


def padding(size_B2: jax.Array, image_size: Sequence[int]) -> jax.Array:
  """Returns where images of (height, width) are padding, bool BHW."""
  rows_H, columns_W = (jnp.arange(n) for n in image_size)
  return (rows_H[None, :, None] >= size_B2[:, 0, None, None]) | (
    columns_W[None, None] >= size_B2[:, 1, None, None]
  )
