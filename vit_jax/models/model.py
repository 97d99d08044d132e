"""What every model says of itself, so that nobody else keeps lists of them."""

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
# What splits a dimension of a parameter: axes of the device mesh, or none.
Axes = str | tuple[str, ...] | None
# From a pattern of paths to what splits the last dimensions of a parameter, so
# that layers stacked for a scan need no rules of their own.
Partitions = tuple[tuple[str, tuple[Axes, ...]], ...]
# Of `config.model.remat`: by name, the `jax.checkpoint_policies` without
# arguments.
REMAT = (
  'none',
  'cheap',
  'nothing_saveable',
  'dots_saveable',
  'dots_with_no_batch_dims_saveable',
  'everything_saveable',
)


class Loop(NamedTuple):
  """Equal layers that a model unrolls, or scans over.

  Their names are the prefix and numbers from `first`, or `stacked` for all of
  them, one array for each parameter.
  """

  prefix: str
  first: int
  stacked: str


class Model(nn.Module):
  """From images to outputs: `apply` returns them and a dict of intermediates.

  Attributes:
    kind: its name in `variants.ARCHITECTURES` and in `config.model.name`.
    task_params: names of its parameters, at the top of their tree, that belong
      to its task and not to its body.
    optional_params: by the field that switches a part on, the names of its
      parameters: new where a checkpoint is without, left behind where the
      model is.
    compute_fields: fields that decide how it is computed, and not what its
      parameters are.
    loops: what a scan stacks of it.
    depth_loop: that of the layers that its depth counts, if there are such.
    after_layers: pattern of the paths of the parameters after those.
    any_size: whether it takes images of any size, padded to one shape, which
      `padding_BHW` says.
    counted: names for `capture` of what only training computes, which counts
      among its FLOPs.
    partitions: rules for splitting its parameters over devices, besides those
      of `sharding.RULES`.
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
    """What it tells: 'classes' of images, 'objects', 'pixels' or 'patches'."""
    return 'classes'

  @property
  def vectors(self) -> tuple[str, ...]:
    """Its outputs that are one vector for each image."""
    return ('pre_logits', 'logits') if self.num_classes else ('pre_logits',)

  def outputs(
    self, outputs: jax.Array, aux: Mapping[str, Any]
  ) -> dict[str, jax.Array]:
    """Returns by name what `apply` tells of images, for export and serving."""
    del aux
    return {'logits' if self.num_classes else 'pre_logits': outputs}

  @property
  def attention(self) -> str:
    """How tokens attend to each other in every layer.

    'all' to all, 'axial' to their row and then to their column, 'pixels' to all
    or to those before them, 'objects' to all that are not padding, and queries
    to them; empty where layers are anything but attention.
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
    """Checks that the fields fit together, and the images.

    Raises:
      ValueError: naming field, value and way out.
    """
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
    """Returns the model without what only its task needs.

    Its parameters are those of this one without `task_params`.
    """
    return self.clone(num_classes=0, parent=None)

  def parts(self) -> Mapping[str, 'Model']:
    """Returns by name the parts of it that are the body of another model.

    A checkpoint of that one can start them. Their fields are called by the name
    of the part and their own: `backbone_layers`.
    """
    return {}

  def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
    """Returns (h, w) of the tokens of an image (H, W) in pixels.

    Raises:
      ValueError: if the model does not take such images.
    """
    raise NotImplementedError

  def describe(self, image_size: tuple[int, int]) -> str:
    """Returns what kind of model it is, in a line."""
    raise NotImplementedError

  def num_tokens(self, image_size: tuple[int, int]) -> int:
    """Returns L, the extra tokens included."""
    h, w = self.grid(image_size)
    return len(self.extra_tokens) + h * w

  def pool_block(self, x_BXD: jax.Array) -> jax.Array:
    """Returns one vector BD an image of a block's output.

    That of the class token, or else the mean over all positions of the grid.
    """
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
