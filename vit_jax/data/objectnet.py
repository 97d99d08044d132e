"""ObjectNet: everyday objects in unusual places, for ImageNet models.

Barbu et al., "ObjectNet: A large-scale bias-controlled dataset for pushing the
limits of object recognition models", NeurIPS 2019. Of its 313 classes, 113
overlap ImageNet; only those are read. https://objectnet.dev has the images.
"""

import logging
import os
import pathlib
from typing import Any

from vit_jax.data import decode, folder, image_files

_log = logging.getLogger(__name__)

# Pixels on every side, red, by which the authors mark their test images.
BORDER = 2

# ImageNet classes (positions among the sorted WordNet ids) by folder name, from
# the archive's mappings/: folder_to_objectnet_label.json, then
# objectnet_to_imagenet_1k.json, whose names are those of WordNet.
IMAGENET_CLASSES: dict[str, tuple[int, ...]] = {
  'alarm_clock': (409, 530),
  'backpack': (414,),
  'banana': (954,),
  'band_aid': (419,),
  'basket': (790,),
  'beer_bottle': (440,),
  'bench': (703,),
  'bicycle': (444, 671),
  'binder_closed': (446,),
  'bottle_cap': (455,),
  'bread_loaf': (930,),
  'broom': (462,),
  'bucket': (463,),
  'butchers_knife': (499,),
  'can_opener': (473,),
  'candle': (470,),
  'cellphone': (487,),
  'chair': (423, 559, 765),
  'clothes_hamper': (588,),
  'coffee_french_press': (550,),
  'combination_lock': (507,),
  'computer_mouse': (673,),
  'desk_lamp': (846,),
  'doormat': (539,),
  'dress': (578,),
  'dress_shoe_men': (630,),
  'drill': (740,),
  'drinking_cup': (968,),
  'drying_rack_for_dishes': (729,),
  'envelope': (549,),
  'fan': (545,),
  'frying_pan': (567,),
  'full_sized_towel': (434,),
  'hair_dryer': (589,),
  'hammer': (587,),
  'hand_towel_or_rag': (533,),
  'helmet': (518, 560),
  'iron_for_clothes': (606,),
  'jeans': (608,),
  'keyboard': (508,),
  'ladle': (618,),
  'lampshade': (619,),
  'laptop_open': (620,),
  'lemon': (951,),
  'letter_opener': (623,),
  'lighter': (626,),
  'lipstick': (629,),
  'match': (644,),
  'measuring_cup': (647,),
  'microwave': (651,),
  'mixing_salad_bowl': (659,),
  'monitor': (664,),
  'mug': (504,),
  'nail_fastener': (677,),
  'necklace': (679,),
  'orange': (950,),
  'padlock': (695,),
  'paintbrush': (696,),
  'paper_towel': (700,),
  'pen': (418, 563, 749),
  'pill_bottle': (720,),
  'pillow': (721,),
  'pitcher': (725,),
  'plastic_bag': (728,),
  'plate': (923,),
  'plunger': (731,),
  'pop_can': (737,),
  'portable_heater': (811,),
  'printer': (742,),
  'remote_control': (761,),
  'ruler': (769,),
  'running_shoe': (770,),
  'safety_pin': (772,),
  'salt_shaker': (773,),
  'sandal': (774,),
  'screw': (783,),
  'shovel': (792,),
  'skirt': (601, 655, 689),
  'sleeping_bag': (797,),
  'soap_dispenser': (804,),
  'sock': (806,),
  'soup_bowl': (809,),
  'spatula': (813,),
  'speaker': (632,),
  'still_camera': (732, 759),
  'strainer': (828,),
  'stuffed_animal': (850,),
  'suit_jacket': (834,),
  'sunglasses': (837,),
  'sweater': (841,),
  'swimming_trunks': (842,),
  't-shirt': (610,),
  'teapot': (849,),
  'tennis_racket': (752,),
  'tie': (457, 906),
  'toaster': (859,),
  'toilet_paper_roll': (999,),
  'trash_bin': (412,),
  'tray': (868,),
  'tv': (851,),
  'umbrella': (879,),
  'vacuum_cleaner': (882,),
  'vase': (883,),
  'wallet': (893,),
  'watch': (531,),
  'water_bottle': (898,),
  'weight_exercise': (543,),
  'weight_scale': (778,),
  'wheel': (479, 694),
  'whistle': (902,),
  'wine_bottle': (907,),
  'winter_glove': (658,),
  'wok': (909,),
}


class ObjectNet(folder.Folder):
  """The images of ObjectNet's classes that overlap ImageNet, as a source.

  Labels are positions in `class_names`, the sorted folder names; their classes
  in ImageNet are in `IMAGENET_CLASSES`.
  """

  def __init__(self, name: str):
    """Lists the files of the unpacked archive, or of its folder `images`.

    That has a folder for each class; others than the 113 are left out.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it has none of the classes, or a class without images.
    """
    root = pathlib.Path(os.path.expanduser(name))
    if not root.is_dir():
      raise FileNotFoundError(
        f'no folder {root}; give the unpacked archive of ObjectNet '
        '(https://objectnet.dev)'
      )
    if (root / 'images').is_dir():
      root = root / 'images'
    self.class_names = tuple(
      class_name
      for class_name in sorted(IMAGENET_CLASSES)
      if (root / class_name).is_dir()
    )
    if not self.class_names:
      raise ValueError(
        f"{root} has none of ObjectNet's {len(IMAGENET_CLASSES)} classes that "
        'overlap ImageNet; the layout must be images/<class>/<image>, such as '
        'images/alarm_clock/'
      )
    missing = sorted(IMAGENET_CLASSES.keys() - set(self.class_names))
    if missing:
      _log.warning(
        'ObjectNet in %s lacks %d of %d classes, so accuracies will not be '
        'comparable: %s',
        root,
        len(missing),
        len(IMAGENET_CLASSES),
        ', '.join(missing),
      )
    self._paths: list[str] = []
    self._labels: list[int] = []
    for label, class_name in enumerate(self.class_names):
      paths, _ = image_files.list_images(root / class_name)
      if not paths:
        raise ValueError(
          f'class folder {root / class_name} has no images; unpack the archive '
          'again'
        )
      self._paths += paths
      self._labels += [label] * len(paths)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns a record whose image is uint8 [H, W, 3], without the border."""
    record = super().__getitem__(index)
    pixels_HWC = decode.decode(record['image'], record['name'])
    height, width, _ = pixels_HWC.shape
    if min(height, width) <= 2 * BORDER:
      raise decode.UnreadableImage(
        record['name'],
        f'{width}x{height} pixels are only the border of {BORDER} pixels',
      )
    return {**record, 'image': pixels_HWC[BORDER:-BORDER, BORDER:-BORDER]}

  def fingerprint(self) -> str:
    """Changes with the files, and is not that of the same images uncropped."""
    return f'objectnet {super().fingerprint()}'
