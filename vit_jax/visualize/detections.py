"""Objects that DETR finds in photographs: boxes, masks, COCO's results."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.data import decode, segments
from vit_jax.data.box_transforms import EvalBoxTransform
from vit_jax.models import boxes
from vit_jax.objectives.detection import padding
from vit_jax.visualize import draw

# Pictures of smaller images are enlarged, so that names fit beside boxes.
_LEAST_SIDE = 480


class Detections(NamedTuple):
  """What is found in an image, the likeliest first.

  Attributes:
    labels_N: classes.
    scores_N: their probabilities.
    boxes_N4: (x0, y0, x1, y1) in pixels of the image, inside of it.
    masks_NHW: which pixels of the image each has, bool; None where the
      checkpoint finds no masks.
  """

  labels_N: np.ndarray
  scores_N: np.ndarray
  boxes_N4: np.ndarray
  masks_NHW: np.ndarray | None = None


class Detector:
  """A checkpoint of DETR at work on one photograph after the other."""

  def __init__(self, checkpoint: Checkpoint, threshold: float):
    """Takes a checkpoint, and the least probability of what is told."""
    self._checkpoint, self._threshold = checkpoint, threshold
    self._likeliest = jax.jit(self._outputs)

  def __call__(self, path: str) -> tuple[np.ndarray, Detections]:
    """Returns an image as it is, uint8 HWC upright, and what is in it.

    The model sees the largest copy that fits into the checkpoint's size, or,
    where that is wide and the image tall, into the same turned by 90 degrees.

    Raises:
      UnreadableImage: naming the file.
    """
    data = decode.read_file(path)
    shown_HWC = decode.open_image(data, path).read()
    height, width = shown_HWC.shape[:2]
    short, long = sorted(self._checkpoint.image_size)
    size = (long, short) if height > width else (short, long)
    nothing = {'boxes': np.zeros((0, 4)), 'labels': ()}
    example = EvalBoxTransform(size, max_objects=0)(
      {'image': data, 'name': path, **nothing}
    )
    scores_Q, labels_Q, boxes_Q4, *masks = jax.device_get(
      self._likeliest(
        self._checkpoint.on_device, example['image'], example['size']
      )
    )
    order_N = np.argsort(-scores_Q, kind='stable')
    order_N = order_N[scores_Q[order_N] >= self._threshold]
    boxes_N4 = np.clip(boxes_Q4[order_N], 0, 1) * ([width, height] * 2)
    masks_NHW = None
    for logits_Qhw in masks:
      masks_NHW = np.zeros((len(order_N), height, width), bool)
      for mask_HW, query in zip(masks_NHW, order_N, strict=True):
        mask_HW[:] = segments.of_logits(
          logits_Qhw[query], size, tuple(example['size']), (height, width)
        )
    return shown_HWC, Detections(
      labels_Q[order_N], scores_Q[order_N], boxes_N4, masks_NHW
    )

  def _outputs(
    self, params: Any, image_HWC: jax.Array, size_2: jax.Array
  ) -> tuple[jax.Array, ...]:
    images_1HWC = self._checkpoint.normalize(image_HWC[None])
    height, width, _ = image_HWC.shape
    is_padding_1HW = padding(size_2[None], (height, width))
    images_1HWC = jnp.where(is_padding_1HW[..., None], 0.0, images_1HWC)
    apply: Any = self._checkpoint.model.apply
    logits_1QC, aux = apply({'params': params}, images_1HWC, is_padding_1HW)
    found = boxes.likeliest(logits_1QC, aux['boxes'][-1])
    masks = [aux['mask_logits']] if 'mask_logits' in aux else []
    return tuple(x[0] for x in (*found, *masks))


def picture(
  shown_HWC: np.ndarray, found: Detections, names: tuple[str, ...]
) -> bytes:
  """Returns a PNG of an image with boxes, masks, names and probabilities."""
  if found.masks_NHW is not None:
    shown_HWC = shown_HWC.copy()
    for label, mask_HW in zip(found.labels_N, found.masks_NHW, strict=True):
      ink_C = np.array(ImageColor.getrgb(_colour(label)), np.uint8)
      shown_HWC[mask_HW] = shown_HWC[mask_HW] // 2 + ink_C // 2
  scale = max(1, _LEAST_SIDE // max(shown_HWC.shape[:2]))
  shown_HWC = shown_HWC.repeat(scale, axis=0).repeat(scale, axis=1)
  image = Image.fromarray(shown_HWC)
  pen = ImageDraw.Draw(image)
  short = min(image.size)
  letters = max(12, short // 40)
  font = ImageFont.load_default(letters)
  # The likeliest is drawn over the others.
  for label, score, box_4 in reversed(list(zip(*found[:3], strict=True))):
    colour = _colour(label)
    x0, y0, x1, y1 = (float(x) * scale for x in box_4)
    pen.rectangle((x0, y0, x1, y1), outline=colour, width=max(2, short // 200))
    text = f'{names[label]} {score:.0%}'
    above = max(0.0, y0 - letters - 4)
    pen.rectangle(pen.textbbox((x0 + 2, above), text, font), fill=colour)
    pen.text((x0 + 2, above), text, 'white', font)
  return draw.png(np.asarray(image))


def _colour(label: int) -> str:
  # Neighbouring classes differ by the golden angle.
  return f'hsl({label * 137.5 % 360:.0f}, 90%, 40%)'


def coco_results(path: str, found: Detections) -> list[dict[str, Any]]:
  """Returns what COCO's tools take of an image.

  Its id is its name where that is a number, as COCO's are, and else its path.
  Masks are compressed RLE, for which it takes pycocotools.
  """
  stem = os.path.splitext(os.path.basename(path))[0]
  results: list[dict[str, Any]] = [
    {
      'image_id': int(stem) if stem.isascii() and stem.isdigit() else path,
      'category_id': int(label),
      'bbox': [round(float(x), 2) for x in (x0, y0, x1 - x0, y1 - y0)],
      'score': round(float(score), 5),
    }
    for label, score, (x0, y0, x1, y1) in zip(*found[:3], strict=True)
  ]
  if found.masks_NHW is not None:
    for result, mask_HW in zip(results, found.masks_NHW, strict=True):
      written = segments.run_lengths(mask_HW, mask_HW.shape)
      counts = written['counts'].decode()
      result['segmentation'] = written | {'counts': counts}
  return results
