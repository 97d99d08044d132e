"""What DETR finds in files: boxes in their pixels, pictures, COCO's results."""

import csv
import io
import json
import sys

import jax
import numpy as np
import pytest
from flax import traverse_util
from PIL import Image

from tests.checkpoints.random_weights import random_arrays
from vit_jax import predict
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.convert import orbax
from vit_jax.data import transforms
from vit_jax.models import variants
from vit_jax.visualize import detections, draw

NAMES = ('cat', 'dog', 'bus')
SIZE = (32, 64)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture(scope='module')
def checkpoint():
  model = variants.build(
    name='detr',
    num_classes=3,
    image_size=SIZE,
    num_queries=4,
    width=32,
    heads=2,
    mlp_dim=32,
    encoder_layers=1,
    decoder_layers=1,
    backbone='plain',
    backbone_layers=(1, 1),
    backbone_width=32,
  )
  return Checkpoint(
    'made',
    model,
    traverse_util.unflatten_dict(random_arrays(model, SIZE), sep='/'),
    SIZE,
    Preprocessing(mean=MEAN, std=STD),
    NAMES,
  )


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """A wide image and a tall one, smooth, of other sizes than the model's."""
  folder = tmp_path_factory.mktemp('images')
  x = np.linspace(0, 255, 96)
  wide_HWC = np.stack([np.tile(x, (36, 1)) * f for f in (1, 0.5, 0.2)], -1)
  for name, image in {
    '7.png': wide_HWC,
    'tall.png': wide_HWC.swapaxes(0, 1),
  }.items():
    Image.fromarray(image.astype(np.uint8)).save(folder / name)
  return [str(folder / name) for name in ('7.png', 'tall.png')]


@pytest.mark.parametrize('tall', [False, True])
def test_boxes_are_the_models_in_pixels_of_the_file(checkpoint, files, tall):
  """The image fills its canvas but for what its shape leaves."""
  path, shown = files[tall], (24, 64)
  pixels = np.asarray(Image.open(path))
  seen = transforms.resize(pixels, shown[::-1] if tall else shown)
  H, W = SIZE[::-1] if tall else SIZE
  images_1HWC = np.zeros((1, H, W, 3), np.float32)
  is_padding_1HW = np.ones((1, H, W), bool)
  h, w = seen.shape[:2]
  images_1HWC[0, :h, :w] = (seen / 255 - MEAN) / STD
  is_padding_1HW[0, :h, :w] = False
  logits, aux = checkpoint.model.apply(
    {'params': checkpoint.params}, images_1HWC, is_padding_1HW
  )
  p_QC = np.asarray(jax.nn.softmax(logits[0]))[:, :-1]
  order = np.argsort(-p_QC.max(1))
  cx, cy, w, h = np.asarray(aux['boxes'][-1][0, order]).T
  height, width = pixels.shape[:2]
  want_N4 = np.stack(
    [
      np.clip(x, 0, 1) * side
      for x, side in (
        (cx - w / 2, width),
        (cy - h / 2, height),
        (cx + w / 2, width),
        (cy + h / 2, height),
      )
    ],
    -1,
  )
  image, found = detections.Detector(checkpoint, 0.0)(path)
  np.testing.assert_array_equal(image, pixels)
  np.testing.assert_array_equal(found.labels_N, p_QC.argmax(1)[order])
  np.testing.assert_allclose(found.scores_N, p_QC.max(1)[order], atol=1e-5)
  # Of resized pixels, which are whole numbers on one side only.
  np.testing.assert_allclose(found.boxes_N4, want_N4, atol=0.05)
  some = float(np.mean(found.scores_N))
  _, likely = detections.Detector(checkpoint, some)(path)
  assert 0 < len(likely.labels_N) < len(found.labels_N)
  assert likely.scores_N.min() >= some


def test_a_picture_has_the_box_where_it_is():
  found = detections.Detections(
    np.array([1]), np.array([0.9]), np.array([[100.0, 200.0, 300.0, 400.0]])
  )
  image = np.full((500, 600, 3), 255, np.uint8)
  drawn = draw.pixels(detections.picture(image, found, NAMES))
  changed = np.any(drawn != 255, axis=-1)
  assert drawn.shape == image.shape
  assert changed[200:400, 100].all() and changed[400, 100:300].all()
  assert not changed[205:395, 105:295].any()
  assert not changed[:, :99].any() and not changed[402:].any()


def test_the_command(checkpoint, files, tmp_path, monkeypatch, capsys):
  orbax.write(checkpoint, str(tmp_path / 'detr'), 'float32')
  out = tmp_path / 'seen'
  arguments = [str(tmp_path / 'detr'), *files, '--threshold=0', '--format=csv']
  monkeypatch.setattr(sys, 'argv', ['predict', *arguments, f'--out={out}'])
  assert predict.main() == 0
  rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
  _, found = detections.Detector(checkpoint, 0.0)(files[0])
  assert [row['class'] for row in rows[:4]] == [
    NAMES[c] for c in found.labels_N
  ]
  assert len(rows) == 8
  for row, box_4 in zip(rows[:4], found.boxes_N4, strict=True):
    got = [float(row[side]) for side in predict.BOX]
    np.testing.assert_allclose(got, box_4, atol=0.051)
  results = json.loads((out / 'coco.json').read_text())
  assert [r['image_id'] for r in results] == [7] * 4 + [files[1]] * 4
  x0, y0, x1, y1 = found.boxes_N4[0]
  assert results[0]['bbox'] == pytest.approx(
    [x0, y0, x1 - x0, y1 - y0], abs=0.01
  )
  assert results[0]['category_id'] == found.labels_N[0]
  assert sorted(p.name for p in out.iterdir()) == [
    'coco.json',
    'objects-7.png',
    'objects-tall.png',
  ]
