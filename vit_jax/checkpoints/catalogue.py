"""Short names of published checkpoints.

Sources: the READMEs of google-research/vision_transformer and big_transfer.
AugReg's B/8, and all AugReg files fine-tuned at 224 pixels, are from timm's
`vision_transformer.py` and `vision_transformer_hybrid.py`.
"""

from typing import NamedTuple


class Published(NamedTuple):
  """A published checkpoint."""

  model: str  # name of the variant, as in `variants.fields`
  image_size: int  # side in pixels, in the last stage of training
  data: str  # the training datasets, in the order of use
  address: str  # gs://BUCKET/FILE in a public bucket
  accuracy: float | None = None  # top-1 on ImageNet in percent, if known
  accuracy_from: str = ''
  size_mib: int | None = None


_I21K, _I1K = 'ImageNet-21k', 'ImageNet'
_BOTH = f'{_I21K}, {_I1K}'
_VIT, _BIT = 'gs://vit_models', 'gs://bit_models'
_README, _TABLE_5, _TIMM = 'README', 'table 5', 'timm'

# Names of the files of the ViT paper, by model.
_VIT_FILES = {
  'b16': 'ViT-B_16',
  'b32': 'ViT-B_32',
  'l16': 'ViT-L_16',
  'l32': 'ViT-L_32',
  'h14': 'ViT-H_14',
  'r26+b32': 'R26+ViT-B_32',
  'r50+b16': 'R50+ViT-B_16',
  'r50+l32': 'R50+ViT-L_32',
}

# Accuracy and source for each file fine-tuned on ImageNet, by model and image
# size. The sources state no accuracy of the hybrid's file.
_VIT_TUNED: dict[tuple[str, int], tuple[float | None, str]] = {
  ('b16', 224): (81.2, _README),
  ('b16', 384): (83.97, _TABLE_5),
  ('b32', 384): (81.28, _TABLE_5),
  ('l16', 224): (82.7, _README),
  ('l16', 384): (85.15, _TABLE_5),
  ('l32', 384): (80.99, _TABLE_5),
  ('r50+b16', 384): (None, ''),
}

# Columns: model, its name in the file name, pre-training recipe, image size and
# learning rate of fine-tuning, accuracy of the fine-tuned file, size in MiB of
# the pre-trained file.
_AUGREG = """
ti16    Ti_16    aug_none-wd_0.03-do_0.0-sd_0.0    384 0.03 78.22 37
s32     S_32     aug_none-wd_0.1-do_0.0-sd_0.0     384 0.01 79.58 118
s16     S_16     aug_light1-wd_0.03-do_0.0-sd_0.0  384 0.03 83.73 115
b32     B_32     aug_light1-wd_0.1-do_0.0-sd_0.0   384 0.01 83.59 398
b16     B_16     aug_medium1-wd_0.1-do_0.0-sd_0.0  384 0.03 85.49 391
l16     L_16     aug_strong1-wd_0.1-do_0.0-sd_0.0  384 0.01 85.59 1243
r+ti16  R_Ti_16  aug_none-wd_0.03-do_0.0-sd_0.0    384 0.03 75.40 40
r26+s32 R26_S_32 aug_light1-wd_0.1-do_0.0-sd_0.0   384 0.01 83.85 170
r50+l32 R50_L_32 aug_medium1-wd_0.1-do_0.1-sd_0.1  384 0.01 85.99 1337
ti16    Ti_16    aug_none-wd_0.03-do_0.0-sd_0.0    224 0.03
s32     S_32     aug_light1-wd_0.03-do_0.0-sd_0.0  224 0.03
s16     S_16     aug_light1-wd_0.03-do_0.0-sd_0.0  224 0.03
b32     B_32     aug_medium1-wd_0.03-do_0.0-sd_0.0 224 0.03
b16     B_16     aug_medium1-wd_0.1-do_0.0-sd_0.0  224 0.01
b8      B_8      aug_medium1-wd_0.1-do_0.0-sd_0.0  224 0.01
l16     L_16     aug_medium1-wd_0.1-do_0.1-sd_0.1  224 0.01
r+ti16  R_Ti_16  aug_none-wd_0.03-do_0.0-sd_0.0    224 0.03
r26+s32 R26_S_32 aug_light0-wd_0.03-do_0.1-sd_0.1  224 0.03
r50+l32 R50_L_32 aug_medium1-wd_0.1-do_0.1-sd_0.1  224 0.01
"""

# Accuracy of the BiT files fine-tuned on ImageNet, measured by timm.
_BIT_TUNED = {
  'r50x1': 80.19,
  'r50x3': 83.75,
  'r101x1': 82.21,
  'r101x3': 84.38,
  'r152x2': 84.40,
  'r152x4': 84.95,
}


def _all() -> dict[str, Published]:
  found = {}
  for model, file in _VIT_FILES.items():
    found[f'vit/{model}'] = Published(
      model, 224, _I21K, f'{_VIT}/imagenet21k/{file}.npz'
    )
  for (model, pixels), said in _VIT_TUNED.items():
    suffix = '-224' if pixels == 224 else ''
    address = f'{_VIT}/imagenet21k+imagenet2012/{_VIT_FILES[model]}{suffix}.npz'
    found[f'vit/{model}-{pixels}'] = Published(
      model, pixels, _BOTH, address, *said
    )
  for line in _AUGREG.split('\n')[1:-1]:
    model, file, recipe, side, lr, *known = line.split()
    file = f'{_VIT}/augreg/{file}-i21k-300ep-lr_0.001-{recipe}'
    # The README does not list AugReg files fine-tuned at 224 pixels.
    said = (float(known[0]), _README) if known else (None, '')
    size_mib = int(known[1]) if known else None
    before = Published(model, 224, _I21K, f'{file}.npz', size_mib=size_mib)
    found.setdefault(f'augreg/{model}', before)
    address = f'{file}--imagenet2012-steps_20k-lr_{lr}-res_{side}.npz'
    found[f'augreg/{model}-{side}'] = Published(
      model, int(side), _BOTH, address, *said
    )
  for model, measured in _BIT_TUNED.items():
    file = f'{_BIT}/BiT-M-{model.upper().replace("X", "x")}'
    found[f'bit/m-{model}'] = Published(model, 224, _I21K, f'{file}.npz')
    found[f'bit/m-{model}-imagenet'] = Published(
      model, 480, _BOTH, f'{file}-ILSVRC2012.npz', measured, _TIMM
    )
    if model != 'r152x2':  # published after the paper, as BiT-M only
      found[f'bit/s-{model}'] = Published(
        model, 224, _I1K, f'{file.replace("-M-", "-S-")}.npz'
      )
  return found


PUBLISHED = _all()
FAMILIES = ('vit', 'augreg', 'bit')
