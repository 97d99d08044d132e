"""Boxes stay around what they were drawn around."""

import collections
import dataclasses
import importlib.util

import numpy as np
import pytest

from vit_jax.data import loader, orientation
from vit_jax.projects.detr import box_transforms

# Colours of three rectangles on black, one of them cut by the border.
COLOURS = np.uint8([[255, 0, 0], [0, 255, 0], [0, 0, 255]])
BOXES = np.float32([[40, 30, 90, 130], [100, 10, 150, 60], [120, 80, 200, 150]])


def record(**fields):
  image = np.zeros((150, 200, 3), np.uint8)
  for colour, (x0, y0, x1, y1) in zip(COLOURS, BOXES.astype(int), strict=True):
    image[y0:y1, x0:x1] = colour
  masks = [np.all(image == colour, axis=2) for colour in COLOURS]
  if importlib.util.find_spec('hotcoco'):
    # As COCO has them, of which only the image says the size.
    x0, y0, x1, y1 = BOXES[2].tolist()
    masks[2] = [[x0, y0, x1, y0, x1, y1, x0, y1]]
  return {
    'image': image,
    'name': 'rectangles',
    'boxes': BOXES,
    'labels': np.array([0, 1, 2]),
    'size': image.shape[:2],
    'masks': masks,
  } | fields


def assert_boxes_are_around(example):
  """Each box has its colour inside, up to the blur of a resize."""
  height, width = example['size']
  assert not example['image'][height:].any()
  assert not example['image'][:, width:].any()
  for label in range(3):
    is_it_HW = example['image'][..., label] > 127
    places = np.flatnonzero(example['labels'] == label)
    if not len(places):
      assert is_it_HW.mean() < 0.01
      continue
    cx, cy, w, h = example['boxes'][places[0]] * ([width, height] * 2)
    rows, columns = np.nonzero(is_it_HW)
    drawn = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    box = cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2
    np.testing.assert_allclose(box, drawn, atol=2)
    assert_mask_is(example['masks'][places[0]], is_it_HW)


def assert_mask_is(mask_hw, is_it_HW):
  """A mask has the pixels of its colour, but for the blur around them."""
  stride = round(is_it_HW.shape[0] / mask_hw.shape[0])
  is_it_hw = is_it_HW[stride // 2 :: stride, stride // 2 :: stride]
  rows, columns = is_it_hw.shape
  assert mask_hw.any() and not mask_hw[rows:].any()
  around = np.lib.stride_tricks.sliding_window_view(np.pad(is_it_hw, 2), (5, 5))
  is_sure = np.ptp(around.astype(int), axis=(2, 3)) == 0
  np.testing.assert_array_equal(
    mask_hw[:rows, :columns][is_sure], is_it_hw[is_sure]
  )


def test_evaluation_resizes_to_the_last_side():
  transform = box_transforms.BoxTransform((128, 128), 4, (60, 75), 1)
  example = transform(record())
  assert example['image'].shape == (128, 128, 3)
  assert example['size'].tolist() == [75, 100]
  assert example['labels'].tolist() == [0, 1, 2, -1]
  assert {name: x.dtype for name, x in example.items()} == {
    'image': np.uint8,
    'size': np.int32,
    'boxes': np.float32,
    'labels': np.int32,
    'masks': bool,
  }
  assert_boxes_are_around(example)


@pytest.mark.parametrize(
  'image, short, canvas, size',
  [
    ((640, 480), 800, (1333, 1333), (1066, 800)),
    # The long side becomes the longest.
    ((480, 1280), 800, (1333, 1333), (500, 1333)),
    # Nor may the array's short side be exceeded.
    ((640, 480), 800, (800, 1333), (800, 600)),
    # The largest that fits.
    ((150, 200), 0, (48, 48), (36, 48)),
    ((1, 1000), 0, (48, 48), (1, 48)),
  ],
)
def test_sizes_are_those_of_the_original(image, short, canvas, size):
  assert orientation.fitted_size(image, canvas, short) == size


def test_training_keeps_boxes_around_what_they_show():
  transform = box_transforms.BoxTransform(
    (160, 180), 5, (70, 100, 130), 4, (90, 120), (60, 110), flip=True
  )
  seen, sizes = [], set()
  for seed in range(60):
    example = transform(record(), np.random.default_rng(seed))
    assert_boxes_are_around(example)
    seen.append(np.sum(example['labels'] >= 0))
    sizes.add(tuple(example['size']))
  # Parts lose objects, and sides differ.
  assert min(seen) < 3 and max(seen) == 3
  assert len(sizes) > 10
  # Of the whole, at each of the sides.
  assert {(70, 93), (100, 133), (130, 173)} <= sizes


def test_half_of_the_images_are_mirrored_and_half_are_parts():
  """Parts are squares here, and the whole is none."""
  transform = box_transforms.BoxTransform(
    (160, 180), 5, (70,), 0, (90,), (60, 60), flip=True
  )
  parts, mirrored = 0, 0
  for seed in range(200):
    example = transform(record(), np.random.default_rng(seed))
    size = tuple(example['size'].tolist())
    assert size in ((70, 70), (70, 93))
    parts += size == (70, 70)
    mirrored += size == (70, 93) and example['boxes'][0, 0] > 0.5
  # Binomials of 200 draws: deviations of 7.1, and of about 5.
  assert abs(parts - 100) < 35
  assert abs(mirrored - (200 - parts) / 2) < 25
  plain = dataclasses.replace(transform, flip=False, crop_sides=())
  for seed in range(9):
    example = plain(record(), np.random.default_rng(seed))
    assert example['boxes'][0, 0] < 0.5 and example['size'][1] == 93


def parts_of(height, width, count, short, crop):
  """Draws crops of an image; returns all tops, lefts, heights and widths."""
  transform = box_transforms.BoxTransform(
    (99, 99), 1, crop_sides=(short,), crop=crop
  )
  rng = np.random.default_rng(0)
  parts = [transform._part(height, width, rng) for _ in range(count)]
  return np.array(parts).T


def test_parts_have_every_place_and_side():
  """In pixels of the image, which is resized before they are taken."""
  top, left, height, width = parts_of(90, 120, 4000, 180, (40, 60))
  sides = range(20, 31)
  assert set(height) == set(width) == set(sides)
  assert (top + height <= 90).all() and (left + width <= 120).all()
  smallest = height == 20
  assert top.min() == left.min() == 0
  assert (top + height).max() == 90 and (left + width).max() == 120
  # Evenly: 4,000 draws of about 10 sides.
  assert abs(smallest.mean() * len(sides) - 1) < 1


def test_parts_end_where_the_image_does():
  """A third of 125 pixels is 41.7, and three times 42 are 126."""
  _, left, _, width = parts_of(90, 125, 400, 30, (20, 42))
  assert (left + width).max() == 125


def test_parts_of_a_few_pixels_have_one_at_the_least():
  """Of which each is a hundred after the resize."""
  top, left, height, width = parts_of(2, 3, 60, 200, (10, 20))
  assert set(top) == {0, 1} and set(left) == {0, 1, 2}
  assert set(height) == set(width) == {1}


def test_parts_of_a_small_image_are_as_large_as_it_is():
  parts = parts_of(60, 70, 9, 30, (40, 60))
  assert {*map(tuple, parts.T.tolist())} == {(0, 0, 60, 70)}


def test_batches_have_few_shapes_and_every_side_its_share():
  sides = tuple(range(480, 801, 32))
  transform = box_transforms.BoxTransform((1333, 1333), 5, sides, 0, buckets=3)
  shapes, weights = {}, collections.Counter()
  for seed in range(2000):
    of_batch = transform.of_batch(np.random.default_rng(seed))
    shapes.setdefault(of_batch.image_size, set()).add(of_batch.short_sides)
    for side in of_batch.short_sides:
      weights[side] += 1 / len(of_batch.short_sides)
    # 4:3 is as large as without buckets.
    for side in of_batch.short_sides:
      size = orientation.fitted_size((480, 640), of_batch.image_size, side)
      assert size == (side, int(side * 640 / 480))
  assert sorted(shapes) == [(960, 960), (1184, 1184), (1333, 1333)]
  assert all(len(groups) == 1 for groups in shapes.values())
  for side in sides:
    assert weights[side] / 2000 == pytest.approx(1 / 11, abs=0.02)
  said = collections.Counter(transform.sizes())
  assert said == {(960, 960): 4, (1184, 1184): 4, (1333, 1333): 3}
  assert dataclasses.replace(transform, buckets=1).sizes() == [(1333, 1333)]


def test_buckets_follow_from_the_step():
  transform = box_transforms.BoxTransform(
    (96, 96), 5, (32, 48, 64), 2, (60,), (40, 60), flip=True, buckets=3
  )
  source = Rectangles()

  def batches(start, process=0):
    stream = loader.train_batches(
      source,
      transform,
      batch_size=4,
      seed=3,
      start_step=start,
      process_index=process,
      process_count=2,
    )
    found = [next(stream) for _ in range(8 - start)]
    stream.close()
    return found

  whole = batches(0)
  assert {x['image'].shape[1:3] for x in whole} == {(64, 64), (96, 96)}
  for resumed, batch in zip(batches(5), whole[5:], strict=True):
    for name, x in batch.items():
      np.testing.assert_array_equal(resumed[name], x)
  for a, b in zip(whole, batches(0, 1), strict=True):
    assert a['image'].shape == b['image'].shape
    assert a['masks'].shape == b['masks'].shape


class Rectangles:
  """A source of ten images."""

  def __len__(self):
    return 10

  def __getitem__(self, index):
    return record(name=f'rectangles {index}')


def test_boxes_are_clipped_and_those_without_area_dropped():
  boxes = np.float32(
    [[-50, -20, 50, 75], [10, 10, 10, 50], [300, 10, 400, 50], [0, 0, 9, 9]]
  )
  example = box_transforms.BoxTransform((150, 200), 3)(
    record(
      boxes=boxes,
      labels=np.arange(4),
      crowd=np.array([False, False, False, True]),
    )
  )
  assert example['labels'].tolist() == [0, -1, -1]
  np.testing.assert_allclose(example['boxes'][0], [0.125, 0.25, 0.25, 0.5])
  assert not example['boxes'][1:].any()


def test_masks_are_those_of_pytorchs_nearest():
  torch = pytest.importorskip('torch')
  masks = np.random.default_rng(0).random((3, 150, 200)) < 0.5
  transform = box_transforms.BoxTransform((128, 128), 4, (60, 75), 1)
  example = transform(record(masks=list(masks)))
  want = torch.nn.functional.interpolate(
    torch.from_numpy(masks).float()[:, None], (75, 100), mode='nearest'
  )
  assert example['masks'].shape == (4, 128, 128)
  np.testing.assert_array_equal(example['masks'][:3, :75, :100], want[:, 0] > 0)
  assert not example['masks'][3].any()
  assert not example['masks'][:, 75:].any()
  # Of four pixels each way the third, and an array of a few more.
  transform = dataclasses.replace(
    transform, image_size=(129, 127), mask_stride=4
  )
  fewer = transform(record(masks=list(masks)))['masks']
  assert fewer.shape == (4, 33, 32)
  np.testing.assert_array_equal(
    fewer[:3, :19, :25], example['masks'][:3, 2:75:4, 2:100:4]
  )


def test_no_objects_are_no_error():
  for boxes in (np.zeros((0, 4)), []):
    empty = record(boxes=boxes, labels=np.zeros(0))
    example = box_transforms.BoxTransform((150, 200), 3)(empty)
    assert example['labels'].tolist() == [-1, -1, -1]


def test_training_decodes_no_better_than_it_needs(encode, decodings):
  """At a scale that is enough, and faster than what is measured."""
  jpeg = record(image=encode(record()['image'], 'JPEG'))
  # 36 x 48 pixels, of which the image has four times as many.
  box_transforms.BoxTransform((48, 48), 3)(jpeg, np.random.default_rng(0))
  box_transforms.BoxTransform((48, 48), 3)(jpeg)
  assert decodings == [(4, False), (4, True)]


def test_refusals():
  transform = box_transforms.BoxTransform((150, 200), 2)
  with pytest.raises(
    ValueError, match='rectangles has 3 objects and .* 2. Raise'
  ):
    transform(record())
  with_masks = box_transforms.BoxTransform((150, 200), 3, (), 1)
  masks = [*record()['masks'][:2], None]
  with pytest.raises(
    ValueError, match='rectangles has 1 objects without a mas'
  ):
    with_masks(record(masks=masks))
  # Even where a crop keeps none of them, or it would be said after days.
  pixels = np.arange(150), np.arange(200)
  with pytest.raises(ValueError, match='has 1 objects without a mask'):
    with_masks._masks(record(masks=masks), np.arange(0), pixels)
  no_masks = {k: x for k, x in record().items() if k != 'masks'}
  with pytest.raises(ValueError, match='has 3 objects without a mask'):
    with_masks(no_masks)
  crowd = np.array([False, False, True])
  example = with_masks(record(masks=masks, crowd=crowd))
  assert example['masks'].any(axis=(1, 2)).tolist() == [True, True, False]
  without = {k: x for k, x in record().items() if k != 'boxes'}
  with pytest.raises(ValueError, match='rectangles has no boxes'):
    transform(without)
