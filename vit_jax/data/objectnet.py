"""ObjectNet: everyday objects in unusual places, for ImageNet models.

Barbu et al., "ObjectNet: A large-scale bias-controlled dataset for pushing the
limits of object recognition models", NeurIPS 2019. ImageNet has 113 of the 313
classes; only these are read. https://objectnet.dev has the images.
"""

import json
import logging
import os
import pathlib
from typing import Any

from vit_jax.data import decode, folder, image_files

_log = logging.getLogger(__name__)

# The test images have a red border of one pixel. The authors' code cuts off two
# pixels at each edge.
BORDER = 2

# Maps folder names to ImageNet classes, numbered in the order of their WordNet
# ids. Two files in mappings/ of the archive define this mapping:
# folder_to_objectnet_label.json gives the label of a folder, and
# objectnet_to_imagenet_1k.json the WordNet names of a label.
IMAGENET_CLASSES: dict[str, list[int]] = json.loads(
  pathlib.Path(__file__).with_suffix('.json').read_text()
)


class ObjectNet(folder.LabelledFiles):
  """A source of the ObjectNet images whose classes overlap ImageNet.

  A label is the index of a folder in the sorted `class_names`. Look up a folder
  name in `IMAGENET_CLASSES` for its ImageNet classes.
  """

  def __init__(self, name: str):
    """Lists the files of the unpacked archive, or of its folder `images`.

    Raises FileNotFoundError if the folder is missing, and ValueError if it has
    no images of the classes that overlap ImageNet.
    """
    root = pathlib.Path(os.path.expanduser(name))
    if not root.is_dir():
      raise FileNotFoundError(
        f'no folder {root}; give the unpacked archive of ObjectNet '
        '(https://objectnet.dev)'
      )
    if (root / 'images').is_dir():
      root = root / 'images'
    inside = image_files.sub_folders(root)
    found = [
      (name, path)
      for name in sorted(IMAGENET_CLASSES.keys() & {*inside})
      for path in image_files.list_images(root / name)[0]
    ]
    names = tuple(dict.fromkeys(name for name, _ in found))
    if not names:
      raise ValueError(
        f"{root} has no images of ObjectNet's {len(IMAGENET_CLASSES)} classes "
        'that overlap ImageNet; the layout must be images/<class>/<image>, '
        'such as images/alarm_clock/'
      )
    if missing := sorted(IMAGENET_CLASSES.keys() - {*names}):
      _log.warning(
        f'ObjectNet in {root} lacks {len(missing)} of {len(IMAGENET_CLASSES)} '
        f'classes, so accuracies are not comparable: {", ".join(missing)}'
      )
    labels = [names.index(name) for name, _ in found]
    super().__init__([path for _, path in found], labels, names)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """Returns a record whose image is uint8 [H, W, 3], without the border.

    Raises UnreadableImage if the image cannot be decoded or is too small.
    """
    record = super().__getitem__(index)
    pixels_HWC = decode.decode(record['image'], record['name'])
    height, width, _ = pixels_HWC.shape
    if min(height, width) <= 2 * BORDER:
      raise decode.UnreadableImage(
        record['name'],
        f'{width}x{height} pixels are too few to cut off {BORDER} at each edge',
      )
    return {**record, 'image': pixels_HWC[BORDER:-BORDER, BORDER:-BORDER]}
