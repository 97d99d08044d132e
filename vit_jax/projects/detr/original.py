"""Read checkpoints of DETR's original code.

The number of heads follows from the shape of the mask head; without a mask head
it is 8. The last stage is dilated if the file name contains `dc5`.
"""

import os
from typing import Any

from vit_jax.checkpoints.formats import table
from vit_jax.projects.detr import hf_format


def matches(arrays: table.Flat) -> bool:
  key = 'transformer.decoder.norm.weight'
  return key in arrays or f'detr.{key}' in arrays


def read(path: str, arrays: table.Flat, config: Any = None) -> table.File:
  """Describes a file; raises ValueError as `Lookup.shape` does."""
  lookup, prefix = hf_format.lookup_of(path, arrays, hf_format.ORIGINAL)
  dilation, heads = 'dc5' in os.path.basename(path).lower(), hf_format.HEADS
  if lookup.has(hf_format.MASKS):
    width = lookup.shape('input_proj/kernel', 4)[0]
    heads = lookup.shape(hf_format.MASKS, 4)[0] - width
  warning = (
    f'The last stage of {path} is read as {"" if dilation else "not "}dilated '
    f'(DC5), because its name {"contains" if dilation else "lacks"} "dc5". '
    'Rename the file if this is wrong.'
  )
  fields = {'heads': heads, 'dilation': dilation, 'image_size': hf_format.SIZE}
  return table.File(
    path=path,
    arrays=lookup.arrays,
    fields=hf_format.fields_of(lookup, hf_format.ORIGINAL) | fields,
    table=hf_format.table_of(hf_format.ORIGINAL, prefix),
    preprocessing=table.Preprocessing(mean=hf_format.MEAN, std=hf_format.STD),
    warnings=(warning,),
  )
