"""Folders with COCO's annotations, good and bad."""

import functools
import json
import math
import os

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import bad_images, sources
from vit_jax.projects.detr import coco


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
        'segmentation': [[1.5, 2, 11.5, 2, 11.5, 22]],
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
  if not isinstance(found, bytes):
    text = found if isinstance(found, str) else json.dumps(found)
    found = text.encode()
  path.write_bytes(found)
  for i in range(10):
    Image.new('RGB', size, (i, 0, 0)).save(root / images / f'{i}.png')
  return root


def test_one_file_of_all_images(tmp_path):
  # As Windows begins a text.
  write(tmp_path, '\ufeff' + json.dumps(annotated()))
  train, test = (
    sources.open_source(str(tmp_path), split) for split in ('train', 'test')
  )
  assert (len(train), len(test)) == (8, 2)
  assert isinstance(train, sources.BoxedSource)
  # By category ids from 0 on, as published models count.
  assert train.class_names == ('N/A', 'dog', 'N/A', 'cat')
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
    assert record['masks'] == [[[1.5, 2, 11.5, 2, 11.5, 22]], None]


def test_the_seed_holds_out_images_and_orders_them(tmp_path):
  def names(split, seed):
    source = sources.open_source(str(tmp_path), split, split_seed=seed)
    return [record['name'] for record in source]

  write(tmp_path, annotated())
  assert names('test', 0) == names('test', 0)
  assert {*names('test', 0)} != {*names('test', 1)}
  (tmp_path / 'instances.json').unlink()
  write(tmp_path, annotated(), 'annotations/instances_train.json')
  assert names('train', 0) != names('train', 1) != sorted(names('train', 1))
  assert sorted(names('train', 0)) == sorted(names('train', 1))


def test_files_of_train_and_val(tmp_path):
  for part in ('train2017', 'val2017'):
    write(tmp_path, annotated(), f'annotations/instances_{part}.json', part)
  train = sources.open_source(str(tmp_path), 'train')
  val = sources.open_source(str(tmp_path), 'test')
  assert len(train) == len(val) == 10
  assert '/train2017/' in train[0]['name'] and '/val2017/' in val[0]['name']
  assert len(sources.open_source(str(tmp_path), 'train[:50%]')) == 5
  assert not {*train.states(range(10))} & {*val.states(range(10))}


def test_a_file_of_all_does_not_mix_the_splits(tmp_path):
  for part in ('train', 'val', 'all'):
    write(tmp_path, annotated(), f'annotations/instances_{part}.json', part)
  train, val = (sources.open_source(str(tmp_path), x) for x in ('train', 'val'))
  assert len(train) == len(val) == 10
  assert all('/train/' in train[i]['name'] for i in range(10))
  assert all('/val/' in val[i]['name'] for i in range(10))


def test_a_name_that_is_only_a_year(tmp_path):
  write(tmp_path, annotated(), 'annotations/instances_2017.json', '2017')
  assert len(sources.open_source(str(tmp_path), '2017')) == 10


def test_changed_annotations_are_read_again(tmp_path):
  write(tmp_path, annotated())
  before = {*sources.open_source(str(tmp_path), 'all').states(range(10))}
  changed = annotated()
  changed['annotations'][0]['bbox'][0] = 2
  changed['images'][1]['height'] += 1
  (tmp_path / 'instances.json').write_text(json.dumps(changed))
  source = sources.open_source(str(tmp_path), 'all')
  # Only the image whose size is another is checked again.
  assert len({*source.states(range(10))} - before) == 1
  assert any(2 in x['boxes'] for x in map(source.objects, range(len(source))))


def test_splits_that_differ_in_their_number_alone(tmp_path):
  for part in ('train1', 'train2', 'val2017'):
    write(tmp_path, annotated(), f'annotations/instances_{part}.json', part)
  open_source = functools.partial(sources.open_source, str(tmp_path))
  assert [len(open_source(x)) for x in ('train1+train2', 'val2017')] == [20, 10]
  with pytest.raises(
    ValueError, match="no split 'train'; it has train1, train2"
  ):
    open_source('train')


def changed(**fields):
  found = annotated()
  found['annotations'][0] |= fields
  return found


@pytest.mark.parametrize(
  'found, message',
  [
    (json.dumps(annotated())[:-20], 'is not valid JSON'),
    ('[]', 'is incomplete: COCO needs a JSON object with the lists'),
    (annotated(images=[]), 'at least one image'),
    (
      annotated(categories=[{'id': -1, 'name': 'x'}]),
      'a whole number from 0 to',
    ),
    (annotated(images=[{'id': 1}]), 'image 1: needs an id and a file_name'),
    (annotated(categories=['cat']), "category 'cat' is not an object"),
    (
      annotated(images=2 * annotated()['images'][:1]),
      '2 entries with the image id 10',
    ),
    (
      annotated(images=[{'id': 1, 'file_name': 'a', 'width': 0, 'height': 2}]),
      'image 1: is 0 wide and 2 high',
    ),
    (changed(bbox=[1, 2, -3, 4]), 'annotation 1: bbox .* is not x, y, width'),
    (changed(bbox=[1, 2, math.nan, 4]), 'is not x, y, width, height'),
    (changed(bbox=[50, 2, 3, 3]), r'lies outside its image of 40x30'),
    (changed(area=-1), 'annotation 1: area is -1; it must be'),
    (changed(iscrowd=2), 'annotation 1: iscrowd is 2; it must be 0 or 1'),
    (annotated(annotations=[{'id': 7}]), 'annotation 7: image_id is None'),
    (changed(category_id=2), 'category_id is 2, which is not in the'),
    (
      changed(segmentation=[[1, 2, 3, 4, 5, 6, 7]]),
      'annotation 1: segmentation has .* is not x',
    ),
  ],
)
def test_bad_annotations_are_named(tmp_path, found, message):
  write(tmp_path, found)
  with pytest.raises(ValueError, match=message) as error:
    sources.open_source(str(tmp_path), 'train')
  assert 'instances.json' in str(error.value)


@pytest.mark.parametrize(
  'fields',
  [
    # Boxes that touch their image from outside, in its corners.
    {'bbox': [-5, -6, 5, 6], 'area': 0, 'iscrowd': True, 'segmentation': None},
    {'bbox': [40, 30, 0, 0]},
  ],
)
def test_annotations_are_good_up_to_their_bounds(tmp_path, fields):
  write(tmp_path, changed(**fields))
  assert len(sources.open_source(str(tmp_path), 'all')) == 10


def test_ids_of_categories_go_up_to_10000(tmp_path):
  categories = [*annotated()['categories'], {'id': 10_000, 'name': 'last'}]
  write(tmp_path, annotated(categories=categories))
  names = sources.open_source(str(tmp_path), 'all').class_names
  assert len(names) == 10_001 and names[-1] == 'last'
  assert set(names[4:-1]) == {coco.NO_NAME}
  categories[-1]['id'] += 1
  write(tmp_path, annotated(categories=categories))
  with pytest.raises(ValueError, match='a whole number from 0 to 10,000'):
    sources.open_source(str(tmp_path), 'all')


@pytest.mark.parametrize('images', ['train2017', '.'])
def test_images_are_found_where_they_lie(tmp_path, images):
  file = 'annotations/instances_train2017.json'
  write(tmp_path, annotated(), file, images)

  def folder():
    source = sources.open_source(f'{tmp_path}/', 'train')
    (found,) = {os.path.dirname(source[i]['name']) for i in range(9)}
    return found

  # The first image may be the one that is missing.
  (tmp_path / images / '0.png').rename(tmp_path / 'kept')
  source = sources.open_source(f'{tmp_path}/', 'train')
  missing = str(tmp_path / images / '0.png')
  with pytest.raises(ValueError, match=f'{missing}: No such file'):
    bad_images.checked(source, 'error')
  # If it is there, folders without it are of no matter.
  (tmp_path / 'kept').rename(missing)
  for name in ('train2017', 'images', 'images/train2017'):
    (tmp_path / name).mkdir(exist_ok=True)
  assert folder() == os.path.dirname(missing)


def test_bad_annotations_are_listed_up_to_20(tmp_path):
  times = 3
  found = annotated()
  found['annotations'] *= times
  for annotation in found['annotations']:
    annotation['category_id'] = 7
  write(tmp_path, found)
  with pytest.raises(ValueError, match=f'has {10 * times} wrong') as error:
    sources.open_source(str(tmp_path), 'train')
  said = str(error.value)
  assert said.count('category_id is 7') == 20
  assert said.endswith('\n  ...') and 'Correct or remove them' in said


def test_names_that_are_numbers(tmp_path):
  """A checkpoint keeps names as text."""
  categories = [{'id': 3, 'name': 7}, {'id': 1, 'name': 'dog'}]
  write(tmp_path, annotated(categories=categories))
  source = sources.open_source(str(tmp_path), 'all')
  assert source.class_names == (coco.NO_NAME, 'dog', coco.NO_NAME, '7')


def test_other_categories_of_another_split(tmp_path):
  write(tmp_path, annotated(), 'annotations/instances_train.json')
  other = annotated(
    categories=[{'id': 3, 'name': 'cow'}, {'id': 1, 'name': 'dog'}]
  )
  write(tmp_path, other, 'annotations/instances_val.json')
  with pytest.raises(
    ValueError,
    match="category 3 'cow', and another annotation file names it 'cat'",
  ):
    sources.open_source(str(tmp_path), 'train')
  # It may have fewer or more.
  other['categories'] = [{'id': 5, 'name': 'cow'}, {'id': 1, 'name': 'dog'}]
  other['annotations'] = other['annotations'][1::2]
  other['annotations'][0]['iscrowd'] = 0
  write(tmp_path, other, 'annotations/instances_val.json')
  touch(tmp_path / 'annotations/instances_val.json')
  for split in ('train', 'val'):
    source = sources.open_source(str(tmp_path), split)
    assert source.class_names == ('N/A', 'dog', 'N/A', 'cat', 'N/A', 'cow')


def test_a_file_of_a_split_that_is_not_needed(tmp_path, caplog):
  write(tmp_path, annotated(), 'annotations/instances_train.json')
  write(tmp_path, changed(bbox=[]), 'annotations/instances_test.json')
  assert len(sources.open_source(str(tmp_path), 'train')) == 10
  assert 'Split test is left out. ' in caplog.text
  for split in ('test', 'val', 'all', 'train+test'):
    with pytest.raises(ValueError, match='1 wrong entries'):
      sources.open_source(str(tmp_path), split)


def test_numbers_may_be_text_and_nulls_are_missing(tmp_path):
  found = annotated()
  for i, x in enumerate(found['images']):
    x['id'] = (str, float)[i % 2](x['id'])
    x |= ({'width': 40.0, 'height': '30'}, {'width': None})[i % 2]
  for x in found['annotations'][::2]:
    x |= {'image_id': str(x['image_id']), 'category_id': 3.0}
    x |= {'area': None, 'iscrowd': None, 'segmentation': {}}
  # Two points cover nothing.
  polygons = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
  found['annotations'][0]['segmentation'] = polygons
  write(tmp_path, annotated())
  before = sources.open_source(str(tmp_path), 'all')
  write(tmp_path, found)
  touch(tmp_path / 'instances.json')
  after = sources.open_source(str(tmp_path), 'all')
  for i in range(10):
    old, new = before.objects(i), after.objects(i)
    assert old['size'] == new['size'] == (30, 40)
    np.testing.assert_array_equal(old['boxes'], new['boxes'])
    assert old['labels'].tolist() == new['labels'].tolist()
    assert old['crowd'].tolist() == new['crowd'].tolist()
    assert [x for x in new['area'] if x not in old['area']] in ([], [200.0])
    assert new['masks'] in ([], [None, None], [polygons[1:], None])


def test_layouts_of_labelling_tools(tmp_path):
  for tool, file, images in (
    ('cvat', 'annotations/instances_default.json', 'images/default'),
    ('labelstudio', 'result.json', 'images'),
    ('roboflow alone', '_annotations.coco.json', '.'),
  ):
    found = annotated()
    if tool == 'labelstudio':
      for x in found['images']:
        x['file_name'] = f'images\\{x["file_name"]}'
    root = write(tmp_path / tool, found, file, images)
    for split, count in (('train', 8), ('val', 2)):
      source = sources.open_source(str(root), split)
      assert isinstance(source, sources.BoxedSource) and len(source) == count
      assert bad_images.checked(source, 'error') is source
  root = tmp_path / 'roboflow'
  for part in ('train', 'valid'):
    write(root, annotated(), f'{part}/_annotations.coco.json', part)
  source = sources.open_source(str(root), 'test')
  assert len(source) == 10 and '/valid/' in source[0]['name']
  assert bad_images.checked(source, 'error') is source
  # Elsewhere result.json may mean anything.
  Image.new('RGB', (4, 4)).save(tmp_path / 'x.png')
  (tmp_path / 'result.json').write_text('[]')
  assert not coco.open_annotated(str(tmp_path), 'train', 0)


def test_improbable_objects_are_refused_or_said(tmp_path, caplog):
  caplog.set_level('INFO')
  write(tmp_path, annotated())
  sources.open_source(str(tmp_path), 'train[:8]')
  assert '8 images, ' in caplog.text and ' 2 classes' in caplog.text
  assert 'boxes per image' in caplog.text and 'a pixel' not in caplog.text
  found = annotated()
  for x in found['annotations']:
    x['bbox'][2] = 0.5
  write(tmp_path, found)
  sources.open_source(str(tmp_path), 'train')
  assert 'are less than a pixel wide or high' in caplog.text
  path = tmp_path / 'instances.json'
  for box, message in (
    ([0.1, 0.2, 0.3, 0.1], 'shares of the image, such as .0.1, 0.2, 0.3, 0.1.'),
    ([20, 10, 38, 25], 'two corners, such as .20, 10, 38, 25. of annotation 1'),
    ('crowds', 'all objects are crowds'),
  ):
    found = annotated()
    for x in found['annotations']:
      x |= {'iscrowd': 1} if box == 'crowds' else {'bbox': box}
    path.write_text(json.dumps(found))
    touch(path)
    with pytest.raises(ValueError, match=message):
      sources.open_source(str(tmp_path), 'train')
  # A few may be like corners, or reach out of their image.
  found = annotated()
  found['annotations'][0]['bbox'] = [20, 10, 38, 25]
  found['annotations'][1]['bbox'] = [1, 1, 0.5, 5]
  found['annotations'][3]['bbox'] = [1, 1, 5, 0.5]
  found['annotations'][5]['bbox'] = [1, 1, 5, 0.5]
  path.write_text(json.dumps(found))
  touch(path)
  sources.open_source(str(tmp_path), 'train+test')


def test_an_image_of_another_size_is_named(tmp_path):
  write(tmp_path, annotated(), size=(30, 40))
  source = sources.open_source(str(tmp_path), 'all')
  with pytest.raises(
    ValueError, match='has 30x40 pixels, but its annotation says 40x3'
  ):
    bad_images.checked(source, 'error')


XML = """<annotation><filename>{name}.jpg</filename>
<size><width>40</width><height>30</height><depth>3</depth></size>
<object><name>dog</name><difficult>1</difficult><bndbox><xmin>1</xmin>
<ymin>1</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object>
<object><name>cat</name><bndbox><xmin>3</xmin><ymin>5</ymin><xmax>12.5</xmax>
<ymax>20</ymax></bndbox></object></annotation>"""


def write_voc(root, **changes):
  """Writes six images as Pascal VOC has them; the last has no objects."""
  for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
    (root / folder).mkdir(parents=True)
  for name in 'abcdef':
    text = XML.format(name=name)
    if name == 'f':
      text = text[: text.index('<object>')] + '</annotation>'
    for old, new in changes.items():
      text = text.replace(f'<{old}>', f'<{old}>{new}') if name == 'c' else text
    (root / f'Annotations/{name}.xml').write_text(text)
    Image.new('RGB', (40, 30)).save(root / f'JPEGImages/{name}.jpg')
  return root


def test_a_folder_of_pascal_voc(tmp_path):
  root = write_voc(tmp_path)
  found = [sources.open_source(str(root), part) for part in ('train', 'test')]
  assert [len(source) for source in found] == [5, 1]
  assert all(source.class_names == ('cat', 'dog') for source in found)
  records = {r['name'].split('/')[-1]: r for source in found for r in source}
  assert len(records) == 6 and records['f.jpg']['boxes'].shape == (0, 4)
  # Pixels count from 1, and the last ones are in the box.
  record = records['a.jpg']
  np.testing.assert_array_equal(
    record['boxes'], np.float32([[0, 0, 40, 30], [2, 4, 12.5, 20]])
  )
  assert record['labels'].tolist() == [1, 0]
  assert record['crowd'].tolist() == [True, False]
  assert record['size'] == (30, 40)
  assert record['area'].tolist() == [1200, 10.5 * 16]
  assert bad_images.checked(found[0], 'error') is found[0]
  path = root / 'Annotations/a.xml'
  path.write_text(XML.format(name='a').replace('12.5', '11'))
  os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
  assert any(11 in x['boxes'] for x in sources.open_source(str(root), 'train'))


def test_the_first_image_of_pascal_voc_may_be_the_one_that_is_missing(tmp_path):
  root = write_voc(tmp_path)
  (root / 'JPEGImages/a.jpg').unlink()
  source = sources.open_source(str(root), 'all')
  (bad,) = bad_images.find_bad_images(source)
  assert bad.name == str(root / 'JPEGImages/a.jpg')


def test_the_splits_of_pascal_voc(tmp_path):
  root = write_voc(tmp_path)
  for part, names in {'train': 'ab', 'valid': 'cd', 'trainval': 'abcd'}.items():
    path = root / f'ImageSets/Main/{part}.txt'
    text = ''.join(f'{name}\n' for name in names) + ' \n'
    path.write_text(text, encoding='utf-8-sig')  # as Windows writes it
  source = sources.open_source(str(root), 'all')
  assert sorted(r['name'][-5:] for r in source) == [
    *('a.jpg', 'b.jpg', 'c.jpg', 'd.jpg')
  ]
  assert len(sources.open_source(str(root), 'test')) == 2
  path.write_text('x\n')
  (root / 'ImageSets/Main/train.txt').unlink()
  with pytest.raises(ValueError, match='trainval.txt lists 1 images without'):
    sources.open_source(str(root), 'all')


def test_encodings_that_are_not_read(tmp_path):
  root = write_voc(tmp_path)
  path = root / 'Annotations/c.xml'
  text = path.read_text()
  path.write_text(f'<?xml version="1.0" encoding="nothing"?>\n{text}')
  with pytest.raises(ValueError, match='c.xml cannot be read as XML'):
    sources.open_source(str(root), 'train')
  path.write_text(text)
  path = root / 'ImageSets/Main/train.txt'
  path.write_text('pâté\n', encoding='latin-1')
  with pytest.raises(ValueError, match='train.txt .* Save the file in UTF-8'):
    sources.open_source(str(root), 'train')


def test_a_name_may_have_a_blank_in_it(tmp_path):
  """Where in files of a class a number stands behind."""
  root = write_voc(tmp_path)
  (root / 'Annotations/c.xml').rename(root / 'Annotations/c 1.xml')
  (root / 'ImageSets/Main/train.txt').write_text('a -1\nb  1\nc 1\n')
  assert len(sources.open_source(str(root), 'train')) == 3
  # Which is read anew once it has changed.
  path = root / 'ImageSets/Main/train.txt'
  path.write_text('a -1\nb  1\n')
  os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
  assert len(sources.open_source(str(root), 'train')) == 2


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'xmax': 'x'}, r'annotation 1 of c.xml: bbox .* is not x, y, width'),
    (
      {'name': '</name><name>'},
      r'category_id is missing \(no <name>\), which is not',
    ),
    ({'width': 'w'}, "image c: is 'w40' wide"),
    ({'size': '<'}, 'c.xml cannot be read as XML'),
  ],
)
def test_bad_files_of_pascal_voc_are_named(tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    sources.open_source(str(write_voc(tmp_path, **changes)), 'train')


def test_the_image_of_pascal_voc_is_that_of_the_same_stem(tmp_path, caplog):
  """Whatever `<filename>` says, which tools that rename files do not change."""
  root = write_voc(tmp_path, filename='a.jpg</filename><filename>')
  (root / 'JPEGImages/d.jpg').rename(root / 'JPEGImages/d.PNG')
  (root / 'JPEGImages/._d.jpg').write_bytes(b'')
  (root / 'Annotations/._d.xml').write_bytes(b'')
  source = sources.open_source(str(root), 'all')
  names = {os.path.basename(r['name']) for r in source}
  assert names == {*(f'{x}.jpg' for x in 'abcef'), 'd.PNG'}
  assert 'in 1 of 6 XML files, <filename> names another file' in caplog.text
  # Without its own image, or with several.
  (root / 'JPEGImages/c.jpg').rename(root / 'JPEGImages/x.jpg')
  touch(root / 'JPEGImages')
  with pytest.raises(ValueError, match='has 2 entries with the image .*/a.jpg'):
    sources.open_source(str(root), 'all')
  path = root / 'Annotations/c.xml'
  path.write_text(path.read_text().replace('>a.jpg<', '>x.jpg<'))
  touch(path)
  source = sources.open_source(str(root), 'all')
  assert 'x.jpg' in {os.path.basename(r['name']) for r in source}
  for extension in ('jpg', 'png'):
    Image.new('RGB', (40, 30)).save(root / f'JPEGImages/c.{extension}')
  touch(root / 'JPEGImages')
  with pytest.raises(
    ValueError, match='c.jpg and c.png have .* c.xml names none'
  ):
    sources.open_source(str(root), 'all')


def touch(path):
  """Gives a file or folder another time, which may not change by itself."""
  os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def test_folders_of_labelimg(tmp_path, monkeypatch):
  root = write_voc(tmp_path)
  (root / 'Annotations').rename(root / 'moved')
  (root / 'moved').rename(root / 'annotations')
  (root / 'JPEGImages').rename(root / 'images')
  # Beside images, XML may be something else.
  (root / 'project.xml').write_text('<x/>')
  monkeypatch.chdir(root.parent)
  source = sources.open_source(f'./{root.name}', 'all')
  assert len(source) == 6 and source.class_names == ('cat', 'dog')
  assert bad_images.checked(source, 'error') is source


def test_files_of_pascal_voc_may_leave_out_image_and_size(tmp_path):
  """The image then has their name. Blanks around a text are of no matter."""
  root = write_voc(tmp_path)
  path = root / 'Annotations/c.xml'
  text = path.read_text().replace('<filename>c.jpg</filename>', '')
  text = text.replace('<difficult>1<', '<difficult> 1 <')
  text = text.replace('<width>40', '<width>0')
  path.write_text(text.replace('<height>30</height>', ''))
  source = sources.open_source(str(root), 'all')
  (record,) = [r for r in source if r['name'].endswith('/JPEGImages/c.jpg')]
  assert record['crowd'].tolist() == [True, False]
  assert record['size'] == (30, 40)
