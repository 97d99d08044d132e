"""DETR's arrays as its original and as transformers name them.

What transformers saves is named after the original where it is the panoptic
head, and after what its modules were once called elsewhere; its backbone is
timm's, with the names of the original's torchvision, or its own.
"""

import re
from collections.abc import Callable

from vit_jax.checkpoints.formats import table, torch_table, torchvision
from vit_jax.checkpoints.formats.table import Entry, Shapes
from vit_jax.checkpoints.formats.torchvision import Rules

ORIGINAL, TIMM, OWN = 'original', 'timm', 'transformers'

_LEAVES = torchvision.LEAVES | {'query_embed': '.weight'}

_QKV = ('query', 'key', 'value')
_BODY = {
  ORIGINAL: 'backbone.0.body.',
  TIMM: 'model.backbone.conv_encoder.model.',
  OWN: 'model.backbone.conv_encoder.model.',
}
_RESNET: Rules = (
  (r'^(conv|bn)_root', r'embedder.embedder.\1'),
  (
    r'block(\d+)/unit(\d+)/',
    lambda m: f'encoder.stages.{int(m[1]) - 1}.layers.{int(m[2]) - 1}.',
  ),
  (r'(conv|bn)(\d)$', lambda m: f'layer.{int(m[2]) - 1}.{m[1]}'),
  (r'(conv|bn)_proj', r'shortcut.\1'),
  ('conv$', 'convolution'),
  ('bn$', 'normalization'),
)
_LAYERS: dict[str, Rules] = {
  ORIGINAL: (
    (r'^(en|de)coder_layer', r'transformer.\1coder.layers.'),
    ('out$', 'out_proj'),
    ('^decoder_norm', 'transformer.decoder.norm'),
  ),
  OWN: (
    (r'^(en|de)coder_layer', r'model.\1coder.layers.'),
    (r'/(q|k|v)(uery|ey|alue)$', r'.\1_proj'),
    ('out$', 'out_proj'),
    ('linear', 'fc'),
    ('multihead_attn', 'encoder_attn'),
    ('norm1$', 'self_attn_layer_norm'),
    (r'(encoder.*)norm2$', r'\1final_layer_norm'),
    ('norm2$', 'encoder_attn_layer_norm'),
    ('norm3$', 'final_layer_norm'),
    ('^decoder_norm', 'model.decoder.layernorm'),
    ('^input_proj', 'model.input_projection'),
    ('^query_embed', 'model.query_position_embeddings'),
    ('^class_embed', 'class_labels_classifier'),
    ('^bbox_embed', 'bbox_predictor'),
  ),
}


def key_of(name: str, naming: str, prefix: str = '') -> str:
  """Returns the key of an array of ours.

  Args:
    name: of ours.
    naming: `ORIGINAL`, `TIMM` or `OWN`.
    prefix: before all but the panoptic head.
  """
  module, _, leaf = name.rpartition('/')
  module = module or name
  if module.startswith(('mask_head/', 'bbox_attention/')):
    return module.replace('/', '.') + _LEAVES[leaf]
  if module.startswith('backbone/'):
    rules = _RESNET if naming == OWN else torchvision.RULES
    module, start = module.removeprefix('backbone/'), _BODY[naming]
  else:
    rules = _LAYERS[ORIGINAL if naming == ORIGINAL else OWN]
    start = ''
  for pattern, to in rules:
    module = re.sub(pattern, to, module)
  module = re.sub(r'layers_(\d)', r'layers.\1', module)
  return prefix + start + module.replace('/', '.') + _LEAVES[leaf]


def table_of(naming: str, prefix: str) -> Callable[[Shapes], list[Entry]]:
  """Returns the table, as of a `File`; its arguments are those of `key_of`."""

  def entries(shapes: Shapes) -> list[Entry]:
    found = []
    for name, shape in shapes.items():
      layout = torch_table.layout(name, shape)
      module, _, leaf = name.rpartition('/')
      attention, _, projection = module.rpartition('/')
      if naming != ORIGINAL or projection not in _QKV:
        found.append(table.one(key_of(name, naming, prefix), name, layout))
      elif projection == 'query':
        # The original has queries, keys and values in one array.
        key = key_of(f'{attention}/in_proj/{leaf}', naming, prefix)
        key = key.replace('in_proj.', 'in_proj_')
        names = tuple(f'{attention}/{x}/{leaf}' for x in _QKV)
        found.append(table.joined(key, names, layout))
    return found

  return entries
