"""Detect objects in photographs with DETR: boxes, masks and pictures."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import atomic_files, decode
from vit_jax.projects.detr import segments, set_losses
from vit_jax.projects.detr.box_transforms import BoxTransform
from vit_jax.projects.detr.model import predicted
from vit_jax.visualize import draw, photos

# Images whose long side is at most half of this are enlarged in pictures, so
# that names fit beside boxes.
_LEAST_SIDE = 480


class Detections(NamedTuple):
  """The objects detected in an image, likeliest first.

  Labels are class numbers, int32; scores are probabilities, float32. Boxes are
  (x0, y0, x1, y1) in pixels of the image, clipped to it. Masks are bool, at the
  resolution of the image; None if the model does not predict them.
  """

  labels_N: np.ndarray
  scores_N: np.ndarray
  boxes_N4: np.ndarray
  masks_NHW: np.ndarray | None = None


class Detector:
  """Runs a DETR checkpoint on one photograph at a time."""

  def __init__(self, checkpoint: Checkpoint, threshold: float):
    """Prepares a detector that drops objects less likely than `threshold`."""
    self._checkpoint, self._threshold = checkpoint, threshold
    self._likeliest = jax.jit(self._outputs)

  def __call__(self, path: str) -> tuple[np.ndarray, Detections]:
    """Returns the upright image, uint8 HWC, and its detections.

    The model sees a copy that is resized to fit into the checkpoint's image
    size. The longer side of this size lies along the longer side of the image.

    Raises:
      UnreadableImage: if the file cannot be read or decoded.
      ValueError: if scores are not finite.
    """
    data = decode.read_file(path)
    shown_HWC = decode.open_image(data, path).read()
    height, width = shown_HWC.shape[:2]
    short, long = sorted(self._checkpoint.image_size)
    canvas = (long, short) if height > width else (short, long)
    nothing = {'boxes': np.zeros((0, 4)), 'labels': ()}
    transform = BoxTransform(canvas, max_objects=0, short_sides=(short,))
    example = transform({'image': data, 'name': path, **nothing})
    queries = jax.device_get(
      self._likeliest(
        self._checkpoint.on_device, example['image'], example['size']
      )
    )
    scores_Q = queries['scores']
    self._checkpoint.check_finite(scores_Q, path)
    order_N = np.argsort(-scores_Q, kind='stable')
    order_N = order_N[scores_Q[order_N] >= self._threshold]
    kept = {name: x[order_N] for name, x in queries.items()}
    masks_NHW = None
    if 'mask_logits' in kept:
      seen_height, seen_width = example['size'].tolist()
      masks_NHW = np.zeros((len(order_N), height, width), bool)
      for i, logits_hw in enumerate(kept['mask_logits']):
        masks_NHW[i] = 0 < segments.in_pixels(
          logits_hw, canvas, (seen_height, seen_width), (height, width)
        )
    boxes_N4 = np.clip(kept['boxes'], 0, 1) * ([width, height] * 2)
    found = Detections(kept['labels'], kept['scores'], boxes_N4, masks_NHW)
    return shown_HWC, found

  def _outputs(
    self, params: Any, image_HWC: jax.Array, size_2: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns `set_losses.likeliest` of one image."""
    outputs = predicted(
      self._checkpoint.model,
      params,
      self._checkpoint.normalize,
      image_HWC[None],
      size_2[None],
    )
    return {k: x[0] for k, x in set_losses.likeliest(*outputs).items()}


def find(
  checkpoint: Checkpoint, paths: Sequence[str], threshold: float, out: str = ''
) -> Iterator[list[tuple[Any, ...]] | decode.UnreadableImage]:
  """Yields for each file a list of (class name, probability, x0, y0, x1, y1).

  The list has the objects whose probability is at least `threshold`, likeliest
  first. Boxes are in pixels, rounded to 0.1. For an unreadable file, yields its
  error.
  With `out`, writes a picture of each image into this folder, as
  `objects-NAME.png`. Raises the ValueError of `Detector`.
  """
  C = checkpoint.model.num_classes
  names = tuple(map(checkpoint.class_name, range(C)))
  detector = Detector(checkpoint, threshold)
  if out:
    os.makedirs(out, exist_ok=True)
  for path, stem in zip(paths, photos.unique_names(paths), strict=True):
    try:
      shown_HWC, found = detector(path)
    except decode.UnreadableImage as e:
      yield e
      continue
    if out:
      drawn = picture(shown_HWC, found, names)
      atomic_files.replace(os.path.join(out, f'objects-{stem}.png'), drawn)
    yield [
      (names[c], float(p), *(round(float(x), 1) for x in box_4))
      for c, p, box_4 in zip(*found[:3], strict=True)
    ]


def picture(
  shown_HWC: np.ndarray, found: Detections, names: tuple[str, ...]
) -> bytes:
  """Returns a PNG of an image with its detections."""
  if found.masks_NHW is not None:
    shown_HWC = shown_HWC.copy()
    both = zip(found.labels_N, found.masks_NHW, strict=True)
    for label, mask_HW in reversed(list(both)):
      ink_C = np.array(draw.class_colour(label), np.uint8)
      shown_HWC[mask_HW] = shown_HWC[mask_HW] // 2 + ink_C // 2
  scale = max(1, _LEAST_SIDE // max(shown_HWC.shape[:2]))
  shown_HWC = shown_HWC.repeat(scale, axis=0).repeat(scale, axis=1)
  image = Image.fromarray(shown_HWC)
  pen = ImageDraw.Draw(image)
  short = min(image.size)
  letters = max(12, short // 40)
  font = ImageFont.load_default(letters)
  # The likeliest object is drawn last, on top.
  for label, score, box_4 in reversed(list(zip(*found[:3], strict=True))):
    colour = draw.class_colour(label)
    x0, y0, x1, y1 = (float(x) * scale for x in box_4)
    pen.rectangle((x0, y0, x1, y1), outline=colour, width=max(2, short // 200))
    text = f'{names[label]} {score:.0%}'
    above = max(0.0, y0 - letters - 4)
    pen.rectangle(pen.textbbox((x0 + 2, above), text, font), fill=colour)
    pen.text((x0 + 2, above), text, 'white', font)
  return draw.png(np.asarray(image))
