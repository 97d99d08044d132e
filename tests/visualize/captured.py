"""Rollout of weights that a model captured, all layers at once."""

from vit_jax.visualize import attention_maps, rollout


def of_captured(attention_XBNLL, grid, class_tokens):
  """Returns the maps Bhw, heads averaged, of what the first tokens read."""
  _, B, _, L, _ = attention_XBNLL.shape
  return rollout.maps(
    [{'all': rollout.fuse(x_BNLL)} for x_BNLL in attention_XBNLL],
    attention_maps.read(B, L, grid[0] * grid[1], class_tokens),
    grid,
  )
