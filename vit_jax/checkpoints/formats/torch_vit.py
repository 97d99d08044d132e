"""Names and layouts of the arrays of PyTorch ViTs and ResNets.

Reading accepts every name in the tables below. Writing uses the first name in a
row for timm and the second for transformers. For DeiT's head, transformers uses
the third name.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.checkpoints.formats import archive, table
from vit_jax.checkpoints.formats.json_config import JsonConfig
from vit_jax.models import resnet

LEAVES = {'kernel': '.weight', 'scale': '.weight', 'bias': '.bias'}
BACKBONE = 'patch_embed.backbone.'
POSITIONS = 'Transformer/posembed_input/pos_embedding'
QKV = ('query', 'key', 'value')
FIRST = 'Transformer/encoderblock_0/'
_MSA = 'MultiHeadDotProductAttention_1'
_POOLING = 'MAPHead_0/MultiHeadDotProductAttention_0'
_MLP = 'MlpBlock_3/Dense_0'

# Names of our modules in timm and in transformers; '-' if the library lacks the
# module. The other names are only read, except DeiT's cls_classifier: those of
# transformers 5, CLIP, SigLIP, DINO and torchvision.
_NAMES = {
  'cls': 'cls_token embeddings.cls_token embeddings.class_embedding '
  'class_token',
  'dist': 'dist_token embeddings.distillation_token',
  POSITIONS: 'pos_embed embeddings.position_embeddings '
  'embeddings.position_embedding.weight encoder.pos_embedding',
  'embedding': 'patch_embed.proj embeddings.patch_embeddings.projection '
  'embeddings.patch_embeddings embeddings.patch_embedding conv_proj',
  'registers': 'reg_token embeddings.register_tokens register_tokens '
  'storage_tokens',
  'Transformer/pre_norm': 'norm_pre - pre_layrnorm',
  'Transformer/encoder_norm': 'norm layernorm post_layernorm encoder.ln',
  'MAPHead_0/probe': 'attn_pool.latent - head.probe',
  'MAPHead_0/LayerNorm_0': 'attn_pool.norm - head.layernorm',
  'MAPHead_0/MlpBlock_0/Dense_0': 'attn_pool.mlp.fc1 - head.mlp.fc1',
  'MAPHead_0/MlpBlock_0/Dense_1': 'attn_pool.mlp.fc2 - head.mlp.fc2',
  f'{_POOLING}/query': 'attn_pool.q -',
  f'{_POOLING}/key+value': 'attn_pool.kv -',
  f'{_POOLING}/query+key+value': '- - head.attention.in_proj',
  f'{_POOLING}/out': 'attn_pool.proj - head.attention.out_proj',
  'pooled_norm': 'fc_norm - pooler.layernorm',
  'pre_logits': 'pre_logits.fc pooler.dense heads.pre_logits',
  'head': 'head classifier cls_classifier visual_projection heads.head',
  'head_dist': 'head_dist distillation_classifier',
}
# Names of the modules of an encoder layer, in the same columns.
_IN_LAYER = {
  'LayerNorm_0': 'norm1 layernorm_before layer_norm1 ln_1',
  f'{_MSA}/query+key+value': 'attn.qkv - self_attention.in_proj',
  **{
    f'{_MSA}/{x}': f'attn.{x[0]} attention.attention.{x} attn.{x[0]}_proj '
    f'attention.{x[0]}_proj self_attn.{x[0]}_proj'
    for x in QKV
  },
  f'{_MSA}/query_norm': 'attn.q_norm -',
  f'{_MSA}/key_norm': 'attn.k_norm -',
  f'{_MSA}/out_norm': 'attn.norm -',
  f'{_MSA}/out': 'attn.proj attention.output.dense attention.o_proj '
  'self_attn.out_proj self_attention.out_proj',
  'LayerScale_0': 'ls1 - layer_scale1 gamma_1 lambda_1',
  'LayerNorm_2': 'norm2 layernorm_after layer_norm2 ln_2',
  _MLP: 'mlp.fc1 intermediate.dense mlp.weights_in mlp.w12 mlp.0 mlp.linear_1',
  f'{_MLP}+gate': 'mlp.fc1_g - mlp.gate_proj mlp.w1',
  f'{_MLP}+up': 'mlp.fc1_x - mlp.up_proj mlp.w2',
  'MlpBlock_3/inner_norm': 'mlp.norm -',
  'MlpBlock_3/Dense_1': 'mlp.fc2 output.dense mlp.weights_out mlp.w3 '
  'mlp.down_proj mlp.3 mlp.linear_2',
  'LayerScale_1': 'ls2 - layer_scale2 gamma_2 lambda_2',
}
# Names of BiT's modules in timm and in transformers.
_RESNET = {
  'conv_root': 'stem.conv embedder.convolution',
  'gn_root': 'stem.norm -',
  'gn_final': 'norm norm',
  'head': 'head.fc classifier.1',
}
_LAYER = re.compile(
  r'(?:blocks|(?:encoder\.)?layers?(?:\.encoder_layer)?)[._](\d{1,6})\.(.+)'
)
_UNIT = re.compile(
  r'(?:encoder\.)?stages\.(\d{1,6})\.(?:blocks|layers)\.(\d{1,6})\.'
  r'(downsample\.)?(conv|norm)(\d?)'
)
# Endings of names in files. A module whose kernel has such a name may lack its
# bias. The bias of the keys may be missing if the name of the query's bias ends
# like this. Missing biases are read as 0.
_WITHOUT_BIAS = (
  'patch_embed.proj.weight',
  'patch_embedding.weight',
  'visual_projection.weight',
  'q_bias',
  'q_proj.bias',
)
# Beginnings of the keys of layers and of a ResNet's units, for writing.
_PLACES = {
  'timm': ('blocks.{}.', 'stages.{}.blocks.{}.'),
  'hf': ('encoder.layer.{}.', 'encoder.stages.{}.layers.{}.'),
}
# Replacements that convert keys of other forms to the form MODULE.LEAF.
_FORMS = (
  (r'in_proj_(weight|bias)$', r'in_proj.\1'),
  (r'\.([qkv])_bias$', r'.\1.bias'),
  (r'\.((?:gamma|lambda)_\d)$', r'.\1.gamma'),
)


def _ours_by_key(names: Mapping[str, str]) -> dict[str, str]:
  return {key: ours for ours, row in names.items() for key in row.split()}


_OURS, _OURS_IN_LAYER = _ours_by_key(_NAMES), _ours_by_key(_IN_LAYER)


def _ours_of(key: str, is_bit: bool) -> str:
  """Returns our name for a key; '' if the key is unknown."""
  in_stem = key.startswith(BACKBONE)
  key = key.removeprefix(BACKBONE)
  for pattern, to in _FORMS:
    key = re.sub(pattern, to, key)
  if key in _OURS and not is_bit:
    return _OURS[key]
  module, _, leaf = key.rpartition('.')
  known = _ours_by_key(_RESNET) if is_bit else _OURS
  if match := _UNIT.fullmatch(module):
    stage, unit, down, part, number = match.groups()
    part = 'gn' if part == 'norm' else part
    name = f'block{int(stage) + 1}/unit{int(unit) + 1}/{part}'
    name += '_proj' if down else number
  elif in_stem:
    part = module.removeprefix('stem.')
    name = {'conv': 'conv_root', 'norm': 'gn_root'}.get(part, '')
  elif match := _LAYER.fullmatch(module):
    name = _OURS_IN_LAYER.get(match[2], '')
    name = name and f'Transformer/encoderblock_{int(match[1])}/{name}'
  else:
    name = known.get(module, '')
  is_norm = re.search('norm|Norm|Scale|gn', name)
  leaf = {
    'weight': 'scale' if is_norm else 'kernel',
    'gamma': 'scale',
    'lambda1': 'scale',
    'bias': 'bias',
  }.get(leaf, '')
  return f'{name}/{leaf}' if name and leaf else ''


def layout(name: str, shape: tuple[int, ...]) -> table.Layout:
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
  return table.SAME


def namer(
  library: str, is_bit: bool = False, stages: bool = False
) -> Callable[[str], str]:
  """Returns the function from our names to the keys of 'timm' or 'hf'.

  `stages` means that a hybrid's stem has stages besides its root.
  """
  layer, unit = _PLACES[library]
  rows = _RESNET if is_bit else _NAMES | _IN_LAYER
  column = [*_PLACES].index(library)
  modules = {ours: row.split()[column] for ours, row in rows.items()}
  if not is_bit:
    unit = BACKBONE + unit
    root = BACKBONE + 'stem.' * stages
    modules |= {'conv_root': f'{root}conv', 'gn_root': f'{root}norm'}

  def key_of(name: str) -> str:
    module, _, leaf = name.rpartition('/')
    if leaf not in LEAVES:
      return modules[name]
    if match := re.fullmatch(r'Transformer/encoderblock_(\d+)/(.+)', module):
      module = layer.format(match[1]) + modules[match[2]]
    elif match := re.fullmatch(r'block(\d+)/unit(\d+)/(.+)', module):
      part = re.sub('(.+)_proj', r'downsample.\1', match[3])
      module = unit.format(int(match[1]) - 1, int(match[2]) - 1)
      module += part.replace('gn', 'norm')
    else:
      module = modules[module]
    key = module + LEAVES[leaf]
    return re.sub(r'\.(ls[12])\.weight$', r'.\1.gamma', key)

  return key_of


class Arrays(dict[str, np.ndarray]):
  """Maps our names to the arrays of a file, in PyTorch's layout.

  `others` are the remaining arrays by key. Their keys are unknown, or an
  earlier key maps to the same name.
  """

  def __init__(
    self, path: str, stored: table.Flat, is_bit: bool, prefix: str = ''
  ):
    """Renames the arrays `stored` of a file.

    Also splits fused arrays, joins the gate and up projections of gated MLPs,
    and adds the missing biases of `_WITHOUT_BIAS` as zeros.
    `prefix` is a regular expression for a prefix to remove from keys.
    """
    super().__init__()
    self.path = path
    self.others: table.Flat = {}
    self._keys: dict[str, str] = {}
    for key, x in stored.items():
      name = _ours_of(re.sub(f'^{prefix}', '', key), is_bit)
      module, _, leaf = name.rpartition('/')
      start, _, last = module.rpartition('/')
      parts = last.split('+')
      if len(parts) > 1 and parts[-1] == 'value':
        pieces = np.array_split(x, len(parts)) if x.ndim else [x] * len(parts)
        for part, piece in zip(parts, pieces, strict=True):
          self._put(f'{start}/{part}/{leaf}', piece, key, f' ({part})')
      else:
        self._put(name, x, key)
    self._join_gates()
    self._add_zeros()

  def _put(self, name: str, x: np.ndarray, key: str, part: str = '') -> None:
    if not name or name in self:
      self.others[key] = x
      return
    if '/' not in name or name in (POSITIONS, 'MAPHead_0/probe'):
      x = x[(None,) * (3 - x.ndim)]
    elif name == 'head/kernel' and x.shape[2:] == (1, 1):
      x = x[:, :, 0, 0]  # BiT's head is a 1x1 convolution
    self[name], self._keys[name] = x, key + part

  def _join_gates(self) -> None:
    for name in [name for name in self if '+up' in name]:
      gate_name, joined = name.replace('+up', '+gate'), name.replace('+up', '')
      up, gate = self.pop(name), self.get(gate_name)
      if gate is not None and gate.ndim and gate.shape == up.shape:
        up = np.concatenate([self.pop(gate_name), up])
      self._put(joined, up, self._keys[name])

  def _add_zeros(self) -> None:
    """Adds zeros for biases that a library does not store."""
    for name in [name for name in self if name.endswith('/kernel')]:
      bias, key = name.replace('kernel', 'bias'), self._keys[name]
      if name.endswith('/key/kernel'):
        # Some models have biases of queries but not of keys.
        key = self._keys.get(bias.replace('/key/', '/query/'), '')
      if key.endswith(_WITHOUT_BIAS) and bias not in self and self[name].ndim:
        zeros = np.zeros(len(self[name]), np.float32)
        self._put(bias, zeros, self._keys[name], ' (bias)')

  def key_of(self, name: str) -> str:
    """Returns the file's key of an array, or our name if it is missing.

    For a part of a fused array, names the part too.
    """
    return self._keys.get(name, name)

  def lookup(self, format_name: str) -> archive.Lookup:
    """Returns a `Lookup` of these arrays."""
    return archive.Lookup(
      self.path, self, lambda x: x, format_name, self.key_of
    )

  def file(self, fields: dict[str, Any], **more: Any) -> table.File:
    """Returns a `File` of these arrays; `more` are its other attributes."""
    if 'registers' in self:  # from the file, or made from tokens
      fields = fields | {'registers': self['registers'].shape[1]}
    return table.File(
      path=self.path,
      arrays={self.key_of(name): x for name, x in self.items()} | self.others,
      fields=fields,
      table=table.renamed(self.key_of, layout),
      **more,
    )

  def convert_tokens(
    self,
    read: tuple[str, ...],
    stride: int,
    stated: tuple[int, int] | None,
    config: JsonConfig,
  ) -> tuple[tuple[int, int], int]:
    """Converts tokens and position embeddings to the form of our ViT.

    Tokens that the head does not read (all except `read`) become registers. If
    registers have position embeddings, these are added to the registers. If the
    tokens in `read` have no position embeddings, they get zeros. A patch kernel
    for grey images gets three channels; `config` gets a warning.

    Returns (H, W) in pixels, and the number of non-patch tokens that have a
    position embedding in the file. `stated` is the (H, W) in the configuration
    or None, `stride` the distance between patches in pixels. Raises ValueError
    if arrays contradict each other or the image size, or the size is unknown.
    """
    lookup = self.lookup('ViT')
    tokens = [x for x in ('cls', 'dist', 'registers') if x in self]
    width = lookup.shape('embedding/kernel', 4)[0]
    for name in (*tokens, *(x for x in (POSITIONS,) if x in self)):
      if (shape := lookup.shape(name, 3))[::2] != (1, width):
        raise ValueError(
          f'{self.path}: {self.key_of(name)!r} has shape {shape}; it must be '
          f'(1, ..., {width}).'
        )
    if (kernel := self['embedding/kernel']).shape[1] == 1:
      # Pillow's weights for converting RGB to grey.
      grey = np.array([[[0.299]], [[0.587]], [[0.114]]], np.float32)
      self['embedding/kernel'] = kernel * grey
      config.warnings.append(
        f'{self.path}: the model takes grey images; vit_jax converts RGB '
        'images to grey.'
      )
    counts = [self[name].shape[1] for name in tokens]
    size, placed = _size_and_placed(self, counts, stride, stated)
    if folded := [x for x in tokens if x not in read]:
      rows = np.concatenate([self.pop(name) for name in folded], axis=1)
      self._put('registers', rows, self._keys[folded[0]])
    first = sum(name in self for name in read)
    if POSITIONS in self and placed < first:
      zeros = (0, 0), (first - placed, 0), (0, 0)
      self[POSITIONS] = np.pad(self[POSITIONS], zeros)
    elif placed > first:
      rows = self['registers'].astype(np.float32)
      rows[:, : placed - first] += self[POSITIONS][:, first:placed]
      self['registers'] = rows
      rest = np.s_[first:placed]
      self[POSITIONS] = np.delete(self[POSITIONS], rest, axis=1)
    return size, placed

  def reorder_channels(
    self, K: int, neighbours: bool, columns_first: bool
  ) -> None:
    """Reorders the channels of queries and keys for our rotary embeddings.

    Products of queries and keys do not depend on this order. In a head of K
    channels, our embeddings rotate channels j and j + K/2 as a pair; the first
    K/4 pairs encode the row. In the file, pairs may be adjacent channels
    (`neighbours`), and the first pairs may encode the column (`columns_first`).
    """
    pairs = np.arange(K // 2)
    if columns_first:
      pairs = np.roll(pairs, K // 4)
    order = np.concatenate([pairs, pairs + K // 2])
    if neighbours:
      order = np.concatenate([2 * pairs, 2 * pairs + 1])
    for name, x in self.items():
      if re.search(rf'{_MSA}/(query|key)(_norm)?/', name):
        heads = x.reshape(-1, K, *x.shape[1:])
        self[name] = heads[:, order].reshape(x.shape)


def _size_and_placed(
  arrays: Arrays,
  counts: list[int],
  stride: int,
  stated: tuple[int, int] | None,
) -> tuple[tuple[int, int], int]:
  """Returns the image size, and how many non-patch tokens have positions.

  Either no such token has a position embedding, or all of them, or only the
  tokens before the registers. `counts` are the numbers of tokens of each kind.
  """
  path, key = arrays.path, arrays.key_of(POSITIONS)
  if POSITIONS not in arrays:
    if stated:
      return stated, 0
    raise ValueError(
      f'{path} has neither position embeddings ({key}) nor an image size. Give '
      'a directory whose config.json has model_args.img_size.'
    )
  rows = arrays[POSITIONS].shape[1]
  registers = arrays['registers'].shape[1] if 'registers' in arrays else 0
  possible = 0, sum(counts) - registers, sum(counts)
  if not stated:
    squares = (
      n for n in possible if math.isqrt(max(rows - n, 0)) ** 2 == rows - n
    )
    placed = next(squares, possible[1])
    side = table.square_side(rows - placed, path) * stride
    return (side, side), placed
  patches = (stated[0] // stride) * (stated[1] // stride)
  if rows - patches not in possible:
    raise ValueError(
      f'{path}/config.json: images of {stated[0]}x{stated[1]} pixels have '
      f'{patches} patches of {stride}, but {key!r} has {rows} tokens.'
    )
  return stated, rows - patches


def fields(lookup: archive.Lookup) -> tuple[dict[str, Any], int, int]:
  """Infers the fields of a ViT from its arrays.

  Returns the fields, the channels of images, and the distance between patches
  in pixels. Raises the errors of `Lookup.shape`, and ValueError if a model that
  is not a hybrid takes images of neither 1 nor 3 channels.
  """
  has = lookup.has
  width, channels, patch, _ = lookup.shape('embedding/kernel', 4)
  stem: dict[str, Any] = {}
  stride = patch
  if has('conv_root/kernel'):
    stem_width, channels, *_ = lookup.shape('conv_root/kernel', 4)
    stem = {'stem_width': stem_width, 'stem_layers': units(lookup)}
    stride *= resnet.total_stride(stem['stem_layers'])
  elif channels not in (1, 3):
    raise ValueError(
      f'{lookup.path}: {lookup.shown("embedding/kernel")!r} is for images of '
      f'{channels} channels; it must be for 3 (RGB) or 1 (grey).'
    )
  _, mlp_dim = lookup.shape(f'{FIRST}MlpBlock_3/Dense_1/kernel', 2)
  hidden, _ = lookup.shape(f'{FIRST}MlpBlock_3/Dense_0/kernel', 2)
  return (
    stem
    | {
      'name': 'deit' if has('head_dist/kernel') else 'vit',
      'patch_size': patch,
      'width': width,
      'depth': sum(lookup.count('Transformer/encoderblock_', r'(\d{1,6})/')),
      'mlp_dim': mlp_dim,
      'swiglu': hidden == 2 * mlp_dim,
      'norm': 'layer' if has(f'{FIRST}LayerNorm_0/bias') else 'rms',
      'pre_norm': has('Transformer/pre_norm/scale'),
      'norm_pooled': has('pooled_norm/scale'),
      # Any value above 0 works, because only initialisation depends on it.
      'layer_scale': 1e-4 * has(f'{FIRST}LayerScale_0/scale'),
      'qkv_bias': has(f'{FIRST}{_MSA}/query/bias'),
      'qk_norm': has(f'{FIRST}{_MSA}/query_norm/scale'),
      'attention_norm': has(f'{FIRST}{_MSA}/out_norm/scale'),
      'mlp_norm': has(f'{FIRST}MlpBlock_3/inner_norm/scale'),
      'posemb': 'learned1d' if has(POSITIONS) else 'none',
      'representation_size': lookup.size('pre_logits/kernel', 2),
      'num_classes': lookup.size('head/kernel', 2),
    },
    channels,
    stride,
  )


def units(lookup: archive.Lookup) -> tuple[int, ...]:
  """Returns the number of units in each stage of a ResNet."""
  return lookup.count('block', r'(\d{1,6})/unit(\d{1,6})/')


def bit_fields(lookup: archive.Lookup) -> dict[str, Any]:
  """Infers the fields of a BiT from its arrays."""
  return {
    'name': 'resnet',
    'version': 2,
    'layers': units(lookup),
    'width': lookup.shape('conv_root/kernel', 4)[0],
    'num_classes': lookup.size('head/kernel', 2),
  }


def to_timm(arrays: table.Flat) -> table.Flat:
  """Converts our arrays to timm's arrays, some of which concatenate ours."""
  arrays = dict(arrays)
  is_bit = 'embedding/kernel' not in arrays
  first = int('cls' in arrays)
  if 'Transformer/pre_norm/scale' in arrays:
    # With pre_norm, timm's patch embedding lacks a bias. Therefore the bias is
    # added to the position embeddings.
    positions_1LD = np.array(arrays[POSITIONS])
    positions_1LD[:, first:] += arrays.pop('embedding/bias')
    arrays[POSITIONS] = positions_1LD
  if 'registers' in arrays and POSITIONS in arrays:
    cls, patches = np.split(arrays[POSITIONS], [first], axis=1)
    zeros = np.zeros_like(arrays['registers'])
    arrays[POSITIONS] = np.concatenate([cls, zeros, patches], axis=1)
  stages = any(name.startswith('block1/') for name in arrays)
  key_of = namer('timm', is_bit, stages)
  stored: dict[str, dict[str, np.ndarray]] = {}
  for name, x in arrays.items():
    name_there = re.sub(r'_1/(query|key|value)/', '_1/query+key+value/', name)
    name_there = re.sub(r'_0/(key|value)/', '_0/key+value/', name_there)
    there = layout(name, x.shape)[0](x)
    if is_bit and name == 'head/kernel':
      there = there[:, :, None, None]
    part = name.rpartition('/')[0].rpartition('/')[2]
    stored.setdefault(key_of(name_there), {})[part] = there
  return {
    key: np.concatenate([parts[x] for x in QKV if x in parts])
    if len(parts) > 1
    else next(iter(parts.values()))
    for key, parts in stored.items()
  }
