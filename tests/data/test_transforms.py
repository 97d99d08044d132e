"""Crops and resizes against Pillow and closed forms."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from vit_jax import config as config_lib
from vit_jax.data import host_augmentation, preprocessing, sources, transforms
from vit_jax.data.images import Images, size_of
from vit_jax.data.preprocessing import Preprocessing

BICUBIC = Preprocessing(interpolation='bicubic')


def _record(image, label=3):
  return {'image': image, 'label': label, 'name': 'x'}


@pytest.mark.parametrize(
  'source, size, tolerance',
  [
    ((427, 640), (224, 224), 1.5),
    ((427, 640), (64, 32), 1.5),
    ((100, 120), (224, 224), 0.5),  # Larger: both are plain bilinear.
    ((300, 80), (150, 224), 2.0),
  ],
)
def test_resize_is_close_to_pillow(photo, source, size, tolerance):
  # Mean absolute difference in grey levels; the filters differ in shape but
  # not much in width. Plain bilinear sampling is at 3 to 15 where it aliases.
  image = np.ascontiguousarray(photo[: source[0], : source[1]])
  reference = Image.fromarray(image).resize(
    size[::-1], Image.Resampling.BILINEAR
  )
  ours = transforms.resize(image, size)
  assert ours.shape == (*size, 3) and ours.dtype == np.uint8
  difference = ours.astype(int) - np.asarray(reference)
  assert np.abs(difference).mean() < tolerance
  assert abs(difference.mean()) < 0.3


def test_resize_to_the_same_size_is_the_identity(photo):
  assert transforms.resize(photo, photo.shape[:2]) is photo


@pytest.mark.parametrize('scale', [1.8, 8])
def test_resize_does_not_alias(scale):
  # Stripes one pixel wide are grey from afar; sampling them makes patterns.
  stripes = np.zeros((400, 400, 3), np.uint8)
  stripes[::2] = 255
  size = round(400 / scale)
  small = transforms.resize(stripes, (size, 400)).astype(float)
  assert small[4:-4].std() < 20  # Plain bilinear sampling: above 70.


def test_train_crops_follow_the_distribution_they_claim():
  transform = transforms.TrainTransform((16, 16), min_area=0.05)
  rng = np.random.default_rng(0)
  boxes = np.array([transform.random_box(427, 640, rng) for _ in range(4000)])
  top, left, height, width = boxes.T
  assert (top >= 0).all() and (top + height <= 427).all()
  assert (left >= 0).all() and (left + width <= 640).all()
  area = height * width / (427 * 640)
  # Measured on 2,000 boxes of tf.image.sample_distorted_bounding_box: mean
  # area 0.312 with deviation 0.194, mean height 272 with deviation 90.
  assert area.min() >= 0.05
  assert abs(area.mean() - 0.312) < 0.02
  assert abs(area.std() - 0.194) < 0.02
  assert abs(height.mean() - 272) < 6
  aspect = width / height
  assert aspect.min() > 0.74 and aspect.max() < 1.35
  assert abs(aspect.mean() - (3 / 4 + 4 / 3) / 2) < 0.01


@pytest.mark.parametrize('shape', [(1, 30_000), (1, 1)])
def test_odd_shapes(shape):
  image = np.full((*shape, 3), 77, np.uint8)
  rng = np.random.default_rng(0)
  for transform in (
    transforms.EvalTransform((20, 24)),
    transforms.EvalTransform((20, 24), Preprocessing(32)),
  ):
    assert (transform(_record(image))['image'] == 77).all()
  for options in ({'min_area': 0.05}, {'min_area': 1}, {'resize': (24, 26)}):
    transform = transforms.TrainTransform((20, 24), **options)
    for _ in range(5):
      crop = transform(_record(image), rng)['image']
      assert crop.shape == (20, 24, 3) and (crop == 77).all()


@pytest.mark.parametrize(
  ('image', 'size'),
  [
    # The longest that are allowed, and the whole where that is one of them.
    ((9, 700), (9, 12)),
    ((700, 9), (12, 9)),
    ((300, 321), (300, 321)),
  ],
)
def test_an_image_with_no_part_to_draw_gives_its_largest(image, size):
  transform = transforms.TrainTransform((16, 16), min_area=0.9999)
  rng = np.random.default_rng(0)
  boxes = [transform.random_box(*image, rng) for _ in range(9)]
  assert {(box.height, box.width) for box in boxes} == {size}
  for box in boxes:
    assert 0 <= box.top <= image[0] - size[0]
    assert 0 <= box.left <= image[1] - size[1]
  assert (len(set(boxes)) > 5) == (size != image)


def test_training_decodes_no_better_than_it_needs(photo, encode, decodings):
  """At a scale that is enough, and faster than what is measured."""
  jpeg = _record(encode(photo, 'JPEG'))
  rng = np.random.default_rng(0)
  transforms.TrainTransform((100, 160), min_area=1)(jpeg, rng)
  transforms.TrainTransform((50, 60), resize=(60, 70))(jpeg, rng)
  transforms.EvalTransform((100, 160))(jpeg)
  transforms.EvalTransform((100, 160), Preprocessing(213))(jpeg)
  transforms.EvalTransform((100, 160), BICUBIC)(jpeg)
  assert decodings == [(4, False), (4, False), (4, True), (2, True), (1, True)]


def test_a_train_crop_is_the_resized_part(photo, encode):
  transform = transforms.TrainTransform((224, 224))
  box = transform.random_box(427, 640, np.random.default_rng(5))
  out = transform(_record(encode(photo)), np.random.default_rng(5))
  assert out['label'] == 3 and out['label'].dtype == np.int32
  part = Image.fromarray(photo).crop(
    (box.left, box.top, box.left + box.width, box.top + box.height)
  )
  reference = np.asarray(part.resize((224, 224), Image.Resampling.BILINEAR))
  assert np.abs(out['image'].astype(int) - reference).mean() < 2.5


def test_a_train_crop_of_a_scaled_decode(photo, encode):
  # The part is rounded outwards to pixels of the scaled decode.
  transform = transforms.TrainTransform((32, 32))
  data = encode(photo, 'JPEG', quality=95)
  for seed in range(5):
    box = transform.random_box(427, 640, np.random.default_rng(seed))
    factor = min(box.height, box.width) // 32
    factor = max(f for f in (1, 2, 4, 8) if f <= factor)
    out = transform(_record(data), np.random.default_rng(seed))
    part = Image.fromarray(photo).crop(
      (
        box.left // factor * factor,
        box.top // factor * factor,
        -(-(box.left + box.width) // factor) * factor,
        -(-(box.top + box.height) // factor) * factor,
      )
    )
    reference = np.asarray(part.resize((32, 32), Image.Resampling.BILINEAR))
    assert np.abs(out['image'].astype(int) - reference).mean() < 3.5


def test_min_area_1_is_a_squash(photo):
  train = transforms.TrainTransform((50, 60), min_area=1)
  crop = train(_record(photo), np.random.default_rng(0))['image']
  expected = transforms.EvalTransform((50, 60)).image(photo, 'x')
  np.testing.assert_array_equal(crop, expected)


def test_resize_crop_is_a_part_of_the_resized_image(photo):
  size = (60, 90)
  transform = transforms.TrainTransform((48, 80), resize=size)
  whole = transforms.resize(photo, size)
  windows = np.lib.stride_tricks.sliding_window_view(whole, (48, 80, 3))
  windows = windows[:, :, 0]
  found = set()
  for seed in range(400):
    out = transform(_record(photo), np.random.default_rng(seed))
    assert out['image'].base is None  # It keeps no larger image alive.
    (where,) = np.argwhere((windows == out['image']).all((2, 3, 4)))
    found.add(tuple(where.tolist()))
  assert out['label'] == 3 and out['label'].dtype == np.int32
  # Every place, up to both ends, is as likely: of 13 x 11 places 400 draws
  # find 134 on average, with a deviation of 3.
  assert {y for y, _ in found} == set(range(13))
  assert {x for _, x in found} == set(range(11))
  assert len(found) > 120


@pytest.mark.parametrize('shape', [(427, 640), (427, 301)])
def test_central_crop_against_pillow(photo, shape):
  image = photo[: shape[0], : shape[1]]
  short = min(shape)
  size = [round(n * 256 / short) for n in shape]
  resized = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
  top, left = (size[0] - 224) // 2, (size[1] - 200) // 2
  reference = np.asarray(resized)[top : top + 224, left : left + 200]
  ours = transforms.EvalTransform((224, 200), Preprocessing(256)).image(
    image, 'x'
  )
  # At 1.18 times the size ours samples without a filter, as it does up to 1.58.
  assert np.abs(ours.astype(int) - reference).mean() < 3


@pytest.mark.parametrize('resize_small', [0, 64])
def test_bicubic_is_that_of_pillow(photo, resize_small):
  size = (64, 96) if resize_small else (48, 60)
  image = photo[:400, :600]
  resized = Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC)
  want = np.asarray(resized)
  if resize_small:
    want = want[8:56, 18:78]
  transform = transforms.EvalTransform(
    (48, 60), dataclasses.replace(BICUBIC, resize_small=resize_small)
  )
  np.testing.assert_array_equal(transform.image(image, 'x'), want)


@pytest.mark.parametrize('axis', [0, 1])
def test_eval_of_a_panorama_keeps_the_centre(axis, monkeypatch):
  image = np.zeros((50, 4001, 3), np.uint8)
  image[:, 2000] = 255
  image = image if axis else image.transpose(1, 0, 2)
  sizes = []
  resize = preprocessing.resize
  monkeypatch.setattr(
    preprocessing, 'resize', lambda i, s: sizes.append(s) or resize(i, s)
  )
  ours = transforms.EvalTransform((31, 31), Preprocessing(50)).image(image, 'x')
  assert np.take(ours, 15, axis).min() == 255 and ours.sum() == 31 * 3 * 255
  assert max(sizes[0]) <= 102  # The rest is cut off before, to save memory.


def test_refusals():
  with pytest.raises(ValueError, match='resize_small is 31, .* at least 32'):
    transforms.EvalTransform((8, 32), Preprocessing(31))
  transforms.EvalTransform((8, 32), Preprocessing(32))


def test_a_config_is_applied_field_by_field():
  data = {
    'crop_min_area': 0.2,
    'crop_resize': 1.15,
    'flip': True,
    'augment': '3augment(0.3)',
    'erasing': 0.1,
  }
  given = {
    'resize_small': 40,
    'interpolation': 'bicubic',
    'mean': (0.1, 0.2, 0.3),
    'std': (0.4, 0.5, 0.6),
    'squash': True,
    'resize_like': 'torchvision',
  }
  size = {'image_size': '24x32', 'train_size': ''}
  images = Images.from_config(data | given | size, (24, 32))
  assert images == Images((24, 32), Preprocessing(**given), **data)
  augmentation = host_augmentation.ThreeAugment(0.3)
  train = transforms.TrainTransform((24, 32), 0.2, (28, 37), augmentation)
  assert images.train_transform() == train
  assert images.eval_transform() == transforms.EvalTransform(
    (24, 32), Preprocessing(**given)
  )
  assert Images((24, 32)).train_transform() == transforms.TrainTransform(
    (24, 32)
  )
  assert transforms.TrainTransform((24, 32)).min_area == 0.05


def test_wrong_labels_are_the_same_every_time():
  """About the share that was asked for, of all other classes as many."""
  source = sources.open_source('digits', 'train')
  plain = transforms.TrainTransform((8, 8), 1.0)
  wrong = transforms.WrongLabels(plain, 0.4, 10)
  given = np.array(
    [wrong(source[i], np.random.default_rng(i))['label'] for i in range(1437)]
  )
  again = [
    wrong(source[i], np.random.default_rng(0))['label'] for i in range(9)
  ]
  assert given[:9].tolist() == again and given.dtype == np.int32
  shift = (given - source.labels()) % 10
  assert np.mean(shift > 0) == pytest.approx(0.4, abs=0.04)
  counts = np.bincount(shift, minlength=10)[1:]
  assert counts.min() > 0.6 * counts.mean()


def test_wrong_labels_are_the_same_wherever_the_folder_is():
  plain = transforms.TrainTransform((8, 8), 1.0)
  wrong = transforms.WrongLabels(plain, 0.9, 1000)
  image = np.zeros((8, 8, 3), np.uint8)

  def given(name):
    record = {'image': image, 'label': 3, 'name': name}
    return wrong(record, np.random.default_rng(0))['label']

  assert given('./data/train/cat/1.jpg') == given('/mnt/x/cat/1.jpg')
  others = ('cat/2.jpg', 'dog/1.jpg', 'cat/\udcff.jpg')
  assert len({given(f'data/train/{x}') for x in ('cat/1.jpg', *others)}) == 4


def test_shares_of_wrong_labels_go_from_none_to_all():
  image = np.zeros((8, 8, 3), np.uint8)
  plain = transforms.TrainTransform((8, 8), 1.0)

  def given(share, classes, **label):
    wrong = transforms.WrongLabels(plain, share, classes)
    return [
      wrong({'image': image, 'name': f'{i}', **label}, None).get('label')
      for i in range(40)
    ]

  assert given(0.0, 10, label=3) == 40 * [3]
  assert set(given(1.0, 4, label=3)) == {0, 1, 2}
  assert given(1.0, 2, label=1) == 40 * [0]
  assert given(1.0, 4) == 40 * [None]


def test_a_label_is_left_out_and_nothing_else(photo):
  record = {'image': photo, 'label': 3, 'name': 'x'}
  train = transforms.TrainTransform((20, 24))
  evaluation = transforms.EvalTransform((20, 24))
  for transform, rngs in ((train, 2), (evaluation, 0)):
    rng, again = np.random.default_rng(1), np.random.default_rng(1)
    with_label = transform(record, *[rng][:rngs])
    without = transforms.without_label(transform)(record, *[again][:rngs])
    assert with_label.keys() == {'image', 'label'}
    assert without.keys() == {'image'} and 'label' in record
    np.testing.assert_array_equal(with_label['image'], without['image'])


def test_several_classes_of_an_image_stay_what_they_are(photo):
  label_C = np.uint8([0, 1, 1])
  found = transforms.EvalTransform((20, 24))(_record(photo, label_C))
  assert found['label'] is label_C


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'mean': (0.5, 0.5)}, 'give a number for red, green and blue each'),
    ({'std': (0.5, 0, 0.5)}, r'data.std is \(0.5, 0, 0.5\); it must be at'),
    ({'crop_resize': 0.9}, 'data.crop_resize is 0.9: use 0, or 1 or more'),
    ({'resize_small': 31}, 'data.resize_small is 31, less than the crop'),
  ],
)
def test_fields_of_a_config_that_cannot_work_are_refused(fields, message):
  data = config_lib.base().data.to_dict() | {'image_size': '24x32'}
  Images.from_config(data, (24, 32))
  with pytest.raises(ValueError, match=message):
    Images.from_config(data | fields, (24, 32))


@pytest.mark.parametrize(
  ('text', 'size'),
  [('224', (224, 224)), (224, (224, 224)), ('384x512', (384, 512))],
)
def test_a_size_is_height_and_width(text, size):
  assert size_of(text) == size


@pytest.mark.parametrize('text', ['0', '1x'])
def test_what_is_no_size_is_refused(text):
  with pytest.raises(ValueError, match=f"^--size is '{text}': give the side"):
    size_of(text, '--size')
