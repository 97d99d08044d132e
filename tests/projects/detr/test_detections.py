"""What DETR finds in files: boxes in their pixels, and pictures."""

import colorsys
import csv
import io
import json
import sys

import jax
import numpy as np
import pytest
from flax import traverse_util
from PIL import Image, ImageDraw

from tests.checkpoints.random_weights import random_arrays
from vit_jax.checkpoints.formats.table import Preprocessing
from vit_jax.checkpoints.opening import Checkpoint
from vit_jax.cli import predict
from vit_jax.convert import orbax
from vit_jax.data import transforms
from vit_jax.models import variants
from vit_jax.projects.detr import detections
from vit_jax.projects.detr.box_transforms import BoxTransform
from vit_jax.visualize import draw

NAMES = ('cat', 'dog', 'bus')
SIZE = (32, 64)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def made(width, heads, backbone_layers, **fields):
  model = variants.build(
    name='detr',
    num_classes=3,
    image_size=SIZE,
    num_queries=4,
    width=width,
    heads=heads,
    mlp_dim=32,
    encoder_layers=1,
    decoder_layers=1,
    backbone='plain',
    backbone_layers=backbone_layers,
    backbone_width=32,
    **fields,
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
def checkpoint():
  return made(32, 2, (1, 1))


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


@pytest.mark.slow
def test_boxes_are_the_models_in_pixels_of_the_file(checkpoint, files):
  """The image fills its canvas but for what its shape leaves."""
  path, shown = files[0], (24, 64)
  pixels = np.asarray(Image.open(path))
  seen = transforms.resize(pixels, shown)
  h, w = shown
  images_1HWC = np.zeros((1, *SIZE, 3), np.float32)
  is_padding_1HW = np.ones((1, *SIZE), bool)
  images_1HWC[0, :h, :w] = (seen / 255 - MEAN) / STD
  is_padding_1HW[0, :h, :w] = False
  logits, aux = jax.jit(checkpoint.model.apply)(
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


def ink(label):
  """The colour of a class: a golden angle from the one before."""
  rgb = colorsys.hls_to_rgb(label * 137.5 / 360 % 1, 0.4, 0.9)
  return 255 * np.array(rgb)


def close(pixels, colour):
  """Whether they are of the colour, whose angle is a whole number."""
  return (np.abs(pixels - colour) <= 3).all()


@pytest.fixture
def written(monkeypatch):
  """Collects what is written where, and how large."""
  found = []
  text = ImageDraw.ImageDraw.text

  def note(pen, place, words, fill, font):
    found.append((place, words, fill, font.size))
    return text(pen, place, words, fill, font)

  monkeypatch.setattr(ImageDraw.ImageDraw, 'text', note)
  return found


@pytest.mark.parametrize('shape', [(40, 60), (500, 600)])
def test_names_stand_above_their_boxes_or_below_the_upper_edge(shape, written):
  """Of small images enlarged, as often as they fit into 480 pixels."""
  H, W = shape
  scale = max(k for k in range(1, 99) if k == 1 or k * max(shape) <= 480)
  boxes_N4 = np.array([[W / 5, H / 2, W - 2, H - 2], [0, 0, W / 2, H / 4]])
  found = detections.Detections(
    np.array([1, 2]), np.array([0.876, 0.5]), boxes_N4
  )
  image = np.full((*shape, 3), 255, np.uint8)
  drawn = draw.pixels(detections.picture(image, found, NAMES))
  assert drawn.shape == (H * scale, W * scale, 3)
  x0, y0 = boxes_N4[0, :2] * scale
  letters = written[0][-1]
  assert written == [
    ((2, 0), 'bus 50%', 'white', letters),
    ((x0 + 2, y0 - letters - 4), 'dog 88%', 'white', letters),
  ]
  # On the class's colour.
  rows = slice(int(y0) - letters - 4, int(y0))
  assert (drawn[rows, : int(x0) + 2] == 255).all()
  above = drawn[rows, int(x0) + 2 :]
  near = np.abs(above - ink(1)).max(-1) <= 3
  assert near.any() and (above == 255).all(-1).any()


class TwoLayers:
  """A model whose layers say different things, each query the same."""

  def apply(self, variables, images_BHWC, is_padding_BHW):
    shapes = images_BHWC.shape[1:3], is_padding_BHW.shape[1:]
    assert shapes == ((32, 64), (32, 64))
    aux = {'boxes': np.array([[[[0.5] * 4]], [[[0.25, 0.5, 0.5, 1.0]]]])}
    return np.log([[[0.3, 0.6, 0.1]]]), aux


def test_the_last_layer_says_where_objects_are(files):
  model = TwoLayers()
  one = Checkpoint('made', model, {}, SIZE, Preprocessing(mean=MEAN, std=STD))
  _, found = detections.Detector(one, 0.5)(files[0])
  np.testing.assert_allclose(found.scores_N, [0.6], rtol=1e-5)
  np.testing.assert_array_equal(found.labels_N, [1])
  np.testing.assert_allclose(found.boxes_N4, [[0, 0, 48, 36]], rtol=1e-6)
  assert found.masks_NHW is None


def test_images_are_resized_by_their_shorter_side(tmp_path):
  """Rounded as the original does: 47 by 62 are 32 by 32 * 62 / 47 = 42.2."""
  path = str(tmp_path / 'a.png')
  Image.fromarray(np.zeros((47, 62, 3), np.uint8)).save(path)
  seen = []

  class Sized(TwoLayers):
    def apply(self, variables, images_BHWC, is_padding_BHW):
      jax.debug.callback(lambda x: seen.append(np.array(x)), is_padding_BHW)
      return super().apply(variables, images_BHWC, is_padding_BHW)

  one = Checkpoint('made', Sized(), {}, SIZE, Preprocessing())
  detections.Detector(one, 0.5)(path)
  jax.effects_barrier()
  assert (~seen[0][0]).sum() == 32 * 42


def test_as_likely_as_the_threshold_is_likely_enough(
  checkpoint, files, monkeypatch
):
  detector = detections.Detector(checkpoint, 0.5)
  queries = {
    'scores': np.array([0.2, 0.5, 0.7, 0.5]),
    'labels': np.array([0, 1, 2, 0]),
    'boxes': np.array([[0, 0, 1, 1]] * 3 + [[-1, 0.25, 0.5, 2]]),
  }
  monkeypatch.setattr(detector, '_likeliest', lambda *args: queries)
  _, found = detector(files[0])
  assert found.labels_N.tolist() == [2, 1, 0]
  assert found.boxes_N4.tolist() == [[0, 0, 96, 36]] * 2 + [[0, 9, 48, 36]]


@pytest.mark.slow
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
  assert sorted(p.name for p in out.iterdir()) == [
    'objects-7.png',
    'objects-tall.png',
  ]
  # An image without objects is named.
  arguments[3:] = ['--threshold=1', '--format=json']
  monkeypatch.setattr(sys, 'argv', ['predict', *arguments])
  assert predict.main() == 0
  said = capsys.readouterr()
  assert json.loads(said.out) == []
  for file in files:
    assert f'{file}: no object has a probability of 1 or more\n' in said.err


@pytest.fixture(scope='module')
def with_masks():
  return made(128, 8, (1, 1, 1, 1), masks=True)


@pytest.mark.slow
def test_masks_are_the_models_in_pixels_of_the_file(with_masks, files):
  detector = detections.Detector(with_masks, 0.0)
  _, found = detector(files[0])
  assert found.masks_NHW.shape == (4, 36, 96)
  example = BoxTransform(SIZE, max_objects=0, short_sides=(32,))(
    {
      'image': np.asarray(Image.open(files[0])),
      'name': '7.png',
      'boxes': np.zeros((0, 4)),
      'labels': (),
    }
  )
  queries = detector._likeliest(
    with_masks.on_device, example['image'], example['size']
  )
  # The image fills 24 of 32 rows; a point of it is one of the canvas.
  logits_hw = queries['mask_logits'][np.argmax(queries['scores'])]
  fine_HW = jax.image.resize(logits_hw, SIZE, 'linear', antialias=False)
  rows, columns = np.arange(36) * 24 // 36, np.arange(96) * 64 // 96
  want_HW = np.asarray(fine_HW)[rows[:, None], columns] > 0
  assert np.mean(found.masks_NHW[0] != want_HW) < 1e-3
  assert 0 < want_HW.mean() < 1


def test_a_picture_has_box_and_mask_where_they_are():
  masks_1HW = np.zeros((1, 500, 600), bool)
  masks_1HW[0, 220:260, 120:160] = True
  found = detections.Detections(
    np.array([1]),
    np.array([0.9]),
    np.array([[100.0, 200.0, 300.0, 400.0]]),
    masks_1HW,
  )
  image = np.full((500, 600, 3), 255, np.uint8)
  drawn = draw.pixels(detections.picture(image, found, NAMES))
  changed = np.any(drawn != 255, axis=-1)
  assert drawn.shape == image.shape
  assert changed[200:400, 100].all() and changed[400, 100:300].all()
  assert not changed[:, :99].any() and not changed[402:].any()
  np.testing.assert_array_equal(
    changed[205:395, 105:295], masks_1HW[0, 205:395, 105:295]
  )
  assert (image == 255).all()
  # Half of each.
  inside = drawn[221:259, 121:159]
  assert close(inside, (255 + ink(1)) / 2)
  # The likeliest object is on top.
  both = detections.Detections(
    np.array([1, 2]),
    np.array([0.9, 0.5]),
    np.repeat(found.boxes_N4, 2, axis=0),
    np.repeat(masks_1HW, 2, axis=0),
  )
  drawn = draw.pixels(detections.picture(image, both, NAMES))
  inside = drawn[221:259, 121:159]
  assert close(inside, ((255 + ink(2)) / 2 + ink(1)) / 2)
