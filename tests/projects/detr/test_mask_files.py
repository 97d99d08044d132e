"""COCO's annotations of images with mask files, by the command."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image, ImageDraw

from vit_jax.data import __main__ as command
from vit_jax.data import sources
from vit_jax.projects.detr import segments

pytest.importorskip('hotcoco')


@pytest.fixture
def root(tmp_path):
  """Five images with two objects each, the second one in front of the first."""
  for folder in ('images', 'masks'):
    (tmp_path / folder).mkdir()
  for i in range(5):
    numbers_HW = np.zeros((20, 30), np.uint8)
    numbers_HW[2:10, 3 : 12 + i] = 1
    numbers_HW[8:20, 5:9] = 7
    Image.fromarray(numbers_HW).save(tmp_path / f'masks/{i}.png')
    Image.new('RGB', (30, 20)).save(tmp_path / f'images/{i}.jpg')
  return tmp_path


def test_boxes_and_masks_are_those_of_the_files(root, capsys):
  assert command.main([str(root), '--class=person']) == 0
  assert '5 images, 10 objects' in capsys.readouterr().out
  source = sources.open_source(f'{root}/', 'all')
  assert source.class_names == ('person',)
  for record in source:
    stem = record['name'].rpartition('/')[2].removesuffix('.jpg')
    numbers_HW = np.asarray(Image.open(root / f'masks/{stem}.png'))
    np.testing.assert_array_equal(
      record['boxes'], [[3, 2, 12 + int(stem), 10], [5, 8, 9, 20]]
    )
    for number, mask in zip((1, 7), record['masks'], strict=True):
      np.testing.assert_array_equal(
        segments.mask(mask, (20, 30)), numbers_HW == number
      )
    assert record['area'].tolist() == [
      np.sum(numbers_HW == number) for number in (1, 7)
    ]
    assert record['crowd'].tolist() == [False, False]
  # Other tools take 0 for none.
  written = json.loads((root / 'instances.json').read_text())
  assert [x['id'] for x in written['images']] == [*range(1, 6)]
  assert [x['id'] for x in written['annotations']] == [*range(1, 11)]
  assert command.main([str(root)]) == 2
  assert 'exists already' in capsys.readouterr().err


def test_a_photo_that_is_to_be_turned_has_its_mask_upright(root):
  image = Image.new('RGB', (20, 30))
  exif = image.getexif()
  exif[0x0112] = 6
  image.save(root / 'images/3.jpg', exif=exif)
  assert command.main([str(root)]) == 0
  assert len(sources.open_source(f'{root}/', 'all')) == 5


def test_two_images_of_one_name_are_refused(root, capsys):
  shutil.copy(root / 'masks/2.png', root / 'masks/2_mask.png')
  assert command.main([str(root)]) == 2
  assert 'has both 2.png and 2_mask.png' in capsys.readouterr().err


def test_what_does_not_fit_is_named(root, capsys):
  Image.new('L', (20, 30)).save(root / 'masks/3.png')
  assert command.main([str(root)]) == 2
  assert '3.jpg has 30x20 pixels and' in capsys.readouterr().err
  Image.new('RGB', (30, 20)).save(root / 'masks/3.png')
  assert command.main([str(root)]) == 2
  assert '3.png is a PNG of mode RGB' in capsys.readouterr().err
  Image.new('L', (30, 20)).save(root / 'masks/3.png', format='JPEG')
  assert command.main([str(root)]) == 2
  assert '3.png is a JPEG of mode L' in capsys.readouterr().err
  cut = (root / 'masks/2.png').read_bytes()[:50]
  (root / 'masks/3.png').write_bytes(cut)
  assert command.main([str(root)]) == 2
  assert 'masks/3.png: image file is truncated' in capsys.readouterr().err
  (root / 'masks/3.png').unlink()
  assert command.main([str(root)]) == 2
  assert '5 images and 4 masks; missing: mask of 3. ' in capsys.readouterr().err
  assert not (root / 'instances.json').exists()


def test_masks_of_more_bits_of_one_and_with_a_palette_are_read(root):
  """Of 255 objects and more, and of one an image."""
  numbers_HW = np.zeros((20, 30), np.uint16)
  numbers_HW[3:5, 4:9], numbers_HW[7:9, 1:3] = 256, 60_000
  Image.fromarray(numbers_HW).save(root / 'masks/0.png')
  Image.fromarray(numbers_HW > 256).save(root / 'masks/1.png')
  Image.fromarray(numbers_HW.astype(np.int32)).save(root / 'masks/2.tif')
  coloured = Image.fromarray((numbers_HW > 0).astype(np.uint8))
  coloured.putpalette([0, 0, 0, 9, 9, 9])
  coloured.save(root / 'masks/3.png')
  (root / 'masks/2.png').unlink()
  for hidden in ('images/.2.jpg', 'masks/.2.png'):
    (root / hidden).write_bytes(b'of another system')
  assert command.main([str(root)]) == 0
  source = sources.open_source(f'{root}/', 'all')
  assert source.class_names == ('object',)
  boxes = {r['name'][-5:]: r['boxes'].tolist() for r in source}
  assert boxes['0.jpg'] == [[4, 3, 9, 5], [1, 7, 3, 9]]
  assert boxes['1.jpg'] == [[1, 7, 3, 9]]
  assert boxes['2.jpg'] == boxes['0.jpg']
  assert boxes['3.jpg'] == [[1, 3, 9, 9]]


def test_a_border_of_255_is_no_object(root, capsys):
  (root / 'masks/0.png').rename(root / 'masks/0_mask.png')
  for path in (root / 'masks').iterdir():
    numbers_HW = np.array(Image.open(path))
    numbers_HW[12:14] = 255
    Image.fromarray(numbers_HW).save(path)
  assert command.main([str(root)]) == 0
  out, err = capsys.readouterr()
  assert '5 images, 10 objects' in out
  assert '255 in 5 of 5 masks are left out as borders' in err
  written = json.loads((root / 'instances.json').read_text())
  assert [x['id'] for x in written['annotations']] == [*range(1, 11)]
  # Alone it is the object, and 255 objects are numbered up to it.
  for numbers in ([255], [254, 255]):
    (root / 'instances.json').unlink()
    for path in (root / 'masks').iterdir():
      numbers_HW = np.zeros((20, 30), np.uint8)
      for i, number in enumerate(numbers):
        numbers_HW[5 * i : 5 * i + 4] = number
      Image.fromarray(numbers_HW).save(path)
    assert command.main([str(root)]) == 0
    assert f'{5 * len(numbers)} objects' in capsys.readouterr().out


def test_masks_with_soft_edges_are_refused(root, capsys):
  """And neither many objects nor objects of a pixel."""
  path = root / 'masks/3.png'
  disk = Image.new('L', (300, 200))
  ImageDraw.Draw(disk).ellipse((20, 30, 250, 180), fill=255)
  disk.resize((30, 20)).save(path)
  assert command.main([str(root)]) == 2
  err = capsys.readouterr().err
  assert '3.png has ' in err and 'looks antialiased' in err
  numbers_HW = np.zeros((20, 30), np.uint8)
  numbers_HW[:18] = np.arange(90).reshape(9, 10).repeat(2, 0).repeat(3, 1)
  numbers_HW[18, ::2] = 100 + np.arange(15)
  Image.fromarray(numbers_HW).save(path)
  assert command.main([str(root)]) == 0
  # Lines of one pixel, such as cracks.
  (root / 'instances.json').unlink()
  lines_HW = np.zeros((20, 30), np.uint8)
  lines_HW[1::2] = np.arange(1, 11)[:, None]
  Image.fromarray(lines_HW).save(path)
  assert command.main([str(root)]) == 0
