"""Folders with COCO's annotations, good and bad."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import bad_images, sources


def annotated(**changes):
  """Returns annotations of ten images, every other one with two objects."""
  images = [
    {'id': 10 + i, 'file_name': f'{i}.png', 'width': 40, 'height': 30}
    for i in range(10)
  ]
  annotations = []
  for i in range(0, 10, 2):
    annotations += [
      {
        'id': len(annotations) + 1,
        'image_id': 10 + i,
        'category_id': 3,
        'bbox': [1.5, 2, 10, 20],
        'area': 150.5,
        'iscrowd': 0,
      },
      {
        'id': len(annotations) + 2,
        'image_id': 10 + i,
        'category_id': 1,
        'bbox': [0, 0, 40, 30],
        'iscrowd': 1,
      },
    ]
  return {
    'images': images,
    'annotations': annotations,
    'categories': [{'id': 3, 'name': 'cat'}, {'id': 1, 'name': 'dog'}],
  } | changes


def write(root, found, file='instances.json', images='images', size=(40, 30)):
  path = root / file
  path.parent.mkdir(exist_ok=True, parents=True)
  (root / images).mkdir(exist_ok=True, parents=True)
  path.write_text(found if isinstance(found, str) else json.dumps(found))
  for i in range(10):
    Image.new('RGB', size, (i, 0, 0)).save(root / images / f'{i}.png')
  return root


def test_one_file_of_all_images(tmp_path):
  write(tmp_path, annotated())
  train, test = (
    sources.open_source(str(tmp_path), split) for split in ('train', 'test')
  )
  assert (len(train), len(test)) == (8, 2)
  assert isinstance(train, sources.BoxedSource)
  # By category ids from 0 on, as published models count.
  assert sources.class_names(train) == ('N/A', 'dog', 'N/A', 'cat')
  records = [*train, *test]
  assert len({record['name'] for record in records}) == 10
  for record in records:
    number = int(record['name'].split('/')[-1].removesuffix('.png'))
    assert record['image'].startswith(b'\x89PNG')
    assert record['size'] == (30, 40)
    if number % 2:
      assert record['boxes'].shape == (0, 4) and not len(record['labels'])
      continue
    np.testing.assert_array_equal(
      record['boxes'], np.float32([[1.5, 2, 11.5, 22], [0, 0, 40, 30]])
    )
    assert record['labels'].tolist() == [3, 1]
    assert record['crowd'].tolist() == [False, True]
    assert record['area'].tolist() == [150.5, 1200]


def test_files_of_train_and_val(tmp_path):
  for part in ('train2017', 'val2017'):
    write(tmp_path, annotated(), f'annotations/instances_{part}.json', part)
  train = sources.open_source(str(tmp_path), 'train')
  val = sources.open_source(str(tmp_path), 'test')
  assert len(train) == len(val) == 10
  assert '/train2017/' in train[0]['name'] and '/val2017/' in val[0]['name']
  assert len(sources.open_source(str(tmp_path), 'train[:50%]')) == 5
  assert train.fingerprint() != val.fingerprint()


def test_the_fingerprint_changes_with_annotations(tmp_path):
  write(tmp_path, annotated())
  before = sources.open_source(str(tmp_path), 'all').fingerprint()
  changed = annotated()
  changed['annotations'][0]['bbox'][0] = 2
  (tmp_path / 'instances.json').write_text(json.dumps(changed))
  source = sources.open_source(str(tmp_path), 'all')
  assert source.fingerprint() != before
  assert any(2 in x['boxes'] for x in map(source.objects, range(len(source))))


def changed(**fields):
  found = annotated()
  found['annotations'][0] |= fields
  return found


@pytest.mark.parametrize(
  'found, message',
  [
    (json.dumps(annotated())[:-20], 'is no JSON, or was cut short'),
    ('[]', "has not COCO's lists images, annotations, categories"),
    (annotated(images=[]), 'has no images'),
    (annotated(categories=[]), 'give at least one'),
    (annotated(categories=[{'id': -1, 'name': 'x'}]), 'whole numbers up to'),
    (annotated(categories=[{'id': 10**6, 'name': 'x'}]), 'whole numbers up to'),
    (annotated(images=[{'id': 1}]), "'height' is missing"),
    (changed(bbox=[1, 2, -3, 4]), 'annotation 1: bbox .* has a negative side'),
    (changed(bbox=[1, 2, math.nan, 4]), 'is not x, y, width, height'),
    (changed(bbox=[1, 2, 3]), 'is not x, y, width, height'),
    (changed(bbox=[50, 2, 3, 3]), r'lies outside its image of 40x30'),
    (changed(bbox=[-5, 2, 3, 3]), r'lies outside its image of 40x30'),
    (changed(category_id=2), 'category_id 2 is none of the categories'),
    (changed(image_id=99), 'image_id 99 is none of the images'),
  ],
)
def test_bad_annotations_are_named(tmp_path, found, message):
  write(tmp_path, found)
  with pytest.raises(ValueError, match=message) as error:
    sources.open_source(str(tmp_path), 'train')
  assert 'instances.json' in str(error.value)


@pytest.mark.parametrize(
  ('times', 'end'), [(1, ''), (2, ''), (3, '  and 10 more\n')]
)
def test_bad_annotations_are_listed_up_to_20(tmp_path, times, end):
  found = annotated()
  found['annotations'] *= times
  for annotation in found['annotations']:
    annotation['category_id'] = 7
  write(tmp_path, found)
  with pytest.raises(ValueError, match=f'has {10 * times} wrong') as error:
    sources.open_source(str(tmp_path), 'train')
  said = str(error.value)
  assert said.count('category_id 7') == min(10 * times, 20)
  assert said.endswith(f'\n{end}Mend or remove them.')
  assert ('more' in said) == bool(end)


def test_other_categories_of_another_split(tmp_path):
  write(tmp_path, annotated(), 'annotations/instances_train.json')
  other = annotated(
    categories=[{'id': 3, 'name': 'cow'}, {'id': 1, 'name': 'dog'}]
  )
  write(tmp_path, other, 'annotations/instances_val.json')
  with pytest.raises(ValueError, match='has other categories than'):
    sources.open_source(str(tmp_path), 'train')


def test_a_missing_image_is_named(tmp_path):
  write(tmp_path, annotated())
  (tmp_path / 'images/4.png').unlink()
  source = sources.open_source(str(tmp_path), 'all')
  with pytest.raises(ValueError, match=r'1 of 10 images(.|\n)*4\.png: No such'):
    bad_images.checked(source, 'error')
  kept = bad_images.checked(source, 'skip')
  assert len(kept) == 9 and isinstance(kept, sources.BoxedSource)


def test_an_image_of_another_size_is_named(tmp_path):
  write(tmp_path, annotated(), size=(30, 40))
  source = sources.open_source(str(tmp_path), 'all')
  with pytest.raises(ValueError, match='is 30x40 pixels and annotated as 40x3'):
    bad_images.checked(source, 'error')
