"""Names and layouts of PyTorch's arrays."""

from vit_jax.checkpoints.formats.table import SAME, Layout

LEAVES = {'kernel': '.weight', 'scale': '.weight', 'bias': '.bias'}


def layout(name: str, shape: tuple[int, ...]) -> Layout:
  """Returns the layout of one of our arrays in PyTorch."""
  leaf = name.rpartition('/')[2]
  if leaf == 'kernel' and len(shape) == 4:
    return lambda x: x.transpose(3, 2, 0, 1), lambda x: x.transpose(2, 3, 1, 0)
  if leaf == 'kernel':
    # In an output projection, the first two axes are heads and channels.
    rows = shape[0] * shape[1] if name.endswith('out/kernel') else shape[0]
    return lambda x: x.reshape(rows, -1).T, lambda x: x.T.reshape(shape)
  if leaf == 'bias':
    return lambda x: x.reshape(-1), lambda x: x.reshape(shape)
  return SAME
