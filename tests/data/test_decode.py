"""Pixels against Pillow, and what must be refused."""

import errno
import io
import os
import pickle
import struct

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps, PngImagePlugin

from vit_jax.cli import flags
from vit_jax.data import decode
from vit_jax.data.orientation import Box


def _pillow(data):
  return np.asarray(Image.open(io.BytesIO(data)).convert('RGB'))


@pytest.mark.parametrize(
  'options',
  [{'subsampling': '4:2:0'}, {'subsampling': '4:4:4'}, {'progressive': True}],
)
def test_parts_of_jpegs_are_bitwise_those_of_pillow(photo, encode, options):
  # Both are libjpeg-turbo with the same DCT. Sides are no multiples of 16.
  data = encode(photo[:123, :217], 'JPEG', **options)
  reference = _pillow(data)
  picture = decode.open_image(data, 'x.jpg')
  rng = np.random.default_rng(0)
  assert (picture.read() == reference).all()
  for _ in range(40):
    height, width = rng.integers(1, 124), rng.integers(1, 218)
    top, left = rng.integers(124 - height), rng.integers(218 - width)
    part = picture.read(Box(int(top), int(left), int(height), int(width)))
    np.testing.assert_array_equal(
      part, reference[top : top + height, left : left + width]
    )


@pytest.mark.parametrize('factor', [2, 8])
def test_scaled_decode_is_that_of_pillow(photo, encode, factor):
  data = encode(photo[:400, :640], 'JPEG')
  reference = Image.open(io.BytesIO(data))
  reference.draft('RGB', (640 // factor, 400 // factor))
  reference = np.asarray(reference)
  picture = decode.open_image(data, 'x.jpg')
  size = (400 // factor, 640 // factor)
  np.testing.assert_array_equal(picture.read(size=size), reference)
  part = picture.read(Box(64, 128, 200, 320), (200 // factor, 320 // factor))
  np.testing.assert_array_equal(
    part,
    reference[64 // factor : 264 // factor, 128 // factor : 448 // factor],
  )
  # Rounded outwards, so that no pixel is lost.
  part = picture.read(Box(65, 130, 200, 300), (200 // factor, 300 // factor))
  np.testing.assert_array_equal(
    part,
    reference[65 // factor : -(-265 // factor)][
      :, 130 // factor : -(-430 // factor)
    ],
  )


@pytest.mark.parametrize('factor', [1, 4])
def test_parts_are_of_the_whole_where_colours_have_half_the_rows(photo, factor):
  """As of a camera's JPEG that was turned without being decoded."""
  data = simplejpeg.encode_jpeg(
    np.ascontiguousarray(photo[:96, :64]), colorsubsampling='440'
  )
  picture = decode.open_image(data, 'x.jpg')
  whole = picture.read(size=(96 // factor, 64 // factor))
  for bottom in range(8, 96, 8):
    part = picture.read(Box(0, 0, bottom, 64), (bottom // factor, 64 // factor))
    np.testing.assert_array_equal(part, whole[: bottom // factor])


def test_decode_never_goes_below_the_size_asked_for(photo, encode):
  picture = decode.open_image(encode(photo, 'JPEG'), 'x.jpg')
  for size in range(1, 500, 7):
    part = picture.read(Box(10, 20, 400, 600), (size, size))
    assert min(part.shape[:2]) >= min(size, 400)
  # ... but makes use of the scales: 400 / 8 = 50.
  assert picture.read(Box(0, 0, 400, 600), (50, 50)).shape[0] == 50


def test_the_fast_dct_is_close(photo, encode):
  picture = decode.open_image(encode(photo, 'JPEG'), 'x.jpg')
  exact = picture.read().astype(int)
  fast = picture.read(exact=False).astype(int)
  assert 0 < np.abs(exact - fast).mean() < 2


@pytest.mark.parametrize(
  'file_format, said_by, orientation',
  [
    *(('JPEG', 'exif', x) for x in range(1, 9)),
    *((x, 'exif', 6) for x in ('PNG', 'WEBP', 'TIFF')),
    *((x, 'xmp', 6) for x in ('JPEG', 'WEBP')),
  ],
)
def test_orientation(photo, encode, file_format, said_by, orientation):
  exif = Image.Exif()
  exif[0x0112] = orientation
  xmp = f'<rdf tiff:Orientation="{orientation}"/>'.encode()
  options = {'exif': exif} if said_by == 'exif' else {'xmp': xmp}
  data = encode(photo[:80, :160], file_format, **options)
  reference = np.asarray(
    ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert('RGB')
  )
  picture = decode.open_image(data, 'x')
  assert (picture.height, picture.width) == reference.shape[:2]
  np.testing.assert_array_equal(picture.read(), reference)
  np.testing.assert_array_equal(
    picture.read(Box(8, 16, 40, 24)), reference[8:48, 16:40]
  )
  scaled = picture.read(Box(16, 32, 48, 32), (24, 16))
  if file_format == 'JPEG':
    assert scaled.shape == (24, 16, 3)
    # Half the size: the mean of the part stays.
    np.testing.assert_allclose(
      scaled.mean(), reference[16:64, 32:64].mean(), atol=2
    )


def test_damaged_exif_is_no_reason_to_refuse(photo, encode):
  exif = Image.Exif()
  exif[0x0112] = 6
  # Of a JPEG without a resolution Pillow reads EXIF by itself, and forgives.
  data = encode(photo[:40, :60], 'JPEG', exif=exif, dpi=(72, 72))
  at = data.index(b'Exif\0\0') + 6
  damaged = data[:at] + b'XXXXXXXX' + data[at + 8 :]
  assert decode.decode(damaged, 'x.jpg').shape == (40, 60, 3)


def test_jpegs_of_twelve_bits_are_refused_by_name(photo, encode):
  """Which no decoder here knows, whoever is the first to see it."""
  exif = Image.Exif()
  exif[0x0112] = 6
  data = bytearray(encode(photo[:40, :60], 'JPEG', exif=exif))
  assert decode.read_header(data).has_metadata
  precision_at = decode.read_header(data).height_at - 1
  assert data[precision_at] == 8
  data[precision_at] = 12
  with pytest.raises(decode.UnreadableImage, match='image x.jpg: not an image'):
    decode.decode(bytes(data), 'x.jpg')


def test_grey_palette_and_one_bit(photo, encode):
  grey = photo[:50, :70, 1]
  expected = np.repeat(grey[:, :, None], 3, axis=2)
  np.testing.assert_array_equal(decode.decode(encode(grey), 'x'), expected)
  jpeg = decode.decode(encode(grey, 'JPEG', quality=95), 'x')
  assert (jpeg[..., 0] == jpeg[..., 2]).all()
  assert np.abs(jpeg.astype(int) - expected).mean() < 2
  scaled = decode.open_image(encode(grey, 'JPEG'), 'x').read(size=(6, 8))
  assert scaled.shape == (7, 9, 3)
  palette = Image.fromarray(photo[:50, :70]).quantize(16)
  np.testing.assert_array_equal(
    decode.decode(encode(palette), 'x'), np.asarray(palette.convert('RGB'))
  )
  one_bit = decode.decode(encode(Image.fromarray(grey).convert('1')), 'x')
  assert set(np.unique(one_bit)) == {0, 255}


def test_16_bit_grey_is_scaled_and_not_clipped(encode):
  values = np.array([[0, 128, 129, 257, 30_000, 65_278, 65_535]], np.uint16)
  decoded = decode.decode(encode(values), 'x')
  expected = np.round(values / 257).astype(np.uint8)
  np.testing.assert_array_equal(decoded[..., 0], expected)


def test_12_bits_in_16_are_told_once_a_folder(encode, caplog):
  image = encode(np.array([[0, 4095]], np.uint16), 'PNG')
  for name in ('scans/a', 'scans/b', 'more/a'):
    decode.decode(image, name)
  first, second = (x.getMessage() for x in caplog.records)
  assert 'image in scans is' in first and 'image in more is' in second


def _tiff(values, bits=16, most=None, black=1):
  """A TIFF of one row of grey; `most` is its MaxSampleValue."""
  packed = ''.join(f'{x:0{bits}b}' for x in values)
  data = int(packed, 2).to_bytes(len(packed) // 8, 'big')
  if bits == 16:
    data = np.asarray(values, '<u2').tobytes()
  # Size, bits, no compression, 0 is black, where, one value a pixel, how many.
  tags = {256: len(values), 257: 1, 258: bits, 259: 1, 262: black, 273: 8}
  tags |= {277: 1, 278: 1, 279: len(data)} | ({281: most} if most else {})
  entries = [struct.pack('<HHIHH', tag, 3, 1, x, 0) for tag, x in tags.items()]
  head = struct.pack('<2sHI', b'II', 42, 8 + len(data))
  return b''.join(
    [head, data, struct.pack('<H', len(entries)), *entries, bytes(4)]
  )


@pytest.mark.parametrize(
  'tags, white',
  [
    ({'bits': 12}, 4095),
    ({'most': 4095}, 4095),
    ({'most': 1023}, 65_535),  # which the values exceed
    # the brightest that there is, not white
    ({}, 65_535),
  ],
)
def test_grey_tiffs_have_as_many_bits_as_they_say(tags, white):
  values = np.array([0, 9, 1000, 4095])
  decoded = decode.decode(_tiff(values, **tags), 'x')
  expected = np.round(values * 255 / white)
  np.testing.assert_array_equal(decoded[0, :, 0], expected)


def test_tiffs_of_16_bits_may_have_0_as_white():
  values = np.array([0, 257, 65_535])
  for black, expected in ((1, [0, 1, 255]), (0, [255, 254, 0])):
    decoded = decode.decode(_tiff(values, black=black), 'x')
    assert decoded[0, :, 0].tolist() == expected


def test_the_text_of_a_png_is_no_reason_to_refuse(photo, encode):
  info = PngImagePlugin.PngInfo()
  info.add_text('Comment', 'x' * (2 << 20), zip=True)
  data = encode(photo[:40, :60], pnginfo=info)
  np.testing.assert_array_equal(decode.decode(data, 'x'), photo[:40, :60])
  with pytest.raises(decode.UnreadableImage):
    decode.decode(data[:-3000], 'x')
  damaged = data.replace(b'zTXtComment', b'zTXtcomment')
  with pytest.raises(decode.UnreadableImage, match='checksum in b.zTXt'):
    decode.decode(damaged, 'x')


def test_grey_of_more_bits_is_refused(encode):
  data = encode(Image.fromarray(np.array([[0, 65_536]], np.int32)), 'TIFF')
  with pytest.raises(decode.UnreadableImage, match='exceed 16 bits'):
    decode.decode(data, 'x')


def test_transparency_is_composited_on_white(encode):
  pixels = np.zeros((1, 3, 4), np.uint8)
  pixels[0, :, 0] = 200
  pixels[0, :, 3] = 0, 128, 255
  expected = [[[255, 255, 255], [227, 127, 127], [200, 0, 0]]]
  decoded = decode.decode(encode(pixels), 'x')
  np.testing.assert_allclose(decoded, expected, atol=1)
  palette = Image.new('P', (2, 1), 1)
  palette.putpalette([0, 0, 0, 9, 9, 9])
  palette.putpixel((0, 0), 0)
  decoded = decode.decode(encode(palette, transparency=0), 'x')
  np.testing.assert_array_equal(decoded[0, :, 0], [255, 9])
  grey = Image.fromarray(np.array([[1000, 1028, 0]], np.uint16))
  decoded = decode.decode(encode(grey, transparency=1028), 'x')
  np.testing.assert_array_equal(decoded[0, :, 0], [4, 255, 0])


def test_what_the_fast_decoder_complains_of_is_read_at_full_size(
  photo, encode, monkeypatch
):
  data = encode(photo[:123, :217], 'JPEG')

  def complain(*args, **options):
    raise ValueError('something odd')

  monkeypatch.setattr(decode.simplejpeg, 'decode_jpeg', complain)
  picture = decode.open_image(data, 'x.jpg')
  # Of which it would have read every second pixel.
  part = picture.read(Box(8, 16, 100, 180), (25, 45))
  np.testing.assert_array_equal(part, _pillow(data)[8:108, 16:196])


def test_cmyk_jpeg_of_adobe_is_inverted_right(encode):
  # Pillow writes CMYK inverted and with Adobe's marker, as Photoshop does.
  red = Image.new('CMYK', (16, 16), (0, 255, 255, 0))
  data = encode(red, 'JPEG', quality=100)
  assert b'Adobe' in data
  decoded = decode.decode(data, 'x.jpg')
  np.testing.assert_allclose(decoded[8, 8], [255, 0, 0], atol=3)


def test_animations_give_their_first_frame(photo, encode):
  frames = [Image.fromarray(photo[:40, :60]), Image.new('RGB', (60, 40))]
  data = encode(frames[0], save_all=True, append_images=frames[1:])
  np.testing.assert_array_equal(decode.decode(data, 'x'), photo[:40, :60])


def test_pixels_pass_through_and_are_checked():
  image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
  assert decode.decode(image, 'x') is image
  part = decode.open_image(image, 'x').read(Box(1, 1, 1, 2))
  np.testing.assert_array_equal(part, image[1:2, 1:3])
  for wrong in (image.astype(np.float32), image[:, :, 0], image[:, :, :2]):
    with pytest.raises(
      decode.UnreadableImage, match=r'x: pixels must be uint8'
    ):
      decode.decode(wrong, 'x')


@pytest.mark.parametrize(
  'name, reason',
  [
    ('empty.jpg', 'the file is empty'),
    ('text.jpg', 'not an image of a known format'),
    ('cut_50.jpg', 'truncated'),
    ('bomb.png', '12000x12000 pixels exceed the limit'),
    ('float.tif', 'floating point pixels'),
  ],
)
def test_reasons(odd_files, name, reason):
  with pytest.raises(decode.UnreadableImage, match=reason):
    decode.decode(odd_files[name][0], name)


def test_bombs_are_refused_before_they_are_decoded(odd_files, monkeypatch):
  monkeypatch.setattr(Image.Image, 'load', None)
  monkeypatch.setattr(decode.simplejpeg, 'decode_jpeg', None)
  for name in ('bomb.png', 'bigger_bomb.png', 'bomb.jpg'):
    with pytest.raises(decode.UnreadableImage, match='bomb'):
      decode.open_image(odd_files[name][0], name)


def test_an_image_may_have_as_many_pixels_as_is_said(
  photo, encode, monkeypatch
):
  data = encode(photo[:4, :6], 'JPEG')
  monkeypatch.setattr(decode, 'MAX_PIXELS', 24)
  assert decode.decode(data, 'x').shape == (4, 6, 3)
  monkeypatch.setattr(decode, 'MAX_PIXELS', 23)
  with pytest.raises(decode.UnreadableImage, match='6x4 pixels exceed'):
    decode.decode(data, 'x')


def test_no_part_of_a_truncated_image_is_read(odd_files):
  """Not even of what is there."""
  picture = decode.open_image(odd_files['cut_80.jpg'][0], 'x')
  for height in (8, 55):
    with pytest.raises(decode.UnreadableImage, match='truncated'):
      picture.read(Box(0, 0, height, 90))


def test_postscript_is_no_image(photo, encode):
  """For it is a program."""
  data = encode(photo[:4, :6], 'EPS')
  with pytest.raises(decode.UnreadableImage, match='not an image of a known'):
    decode.decode(data, 'x')


def test_of_a_jpeg_of_several_pictures_the_first_counts(photo, encode):
  exif = Image.Exif()
  exif[0x0112] = 6  # on its side
  one = encode(photo[:123, :217], 'JPEG', exif=exif)
  other = Image.fromarray(photo[200:323, :217])
  first = Image.fromarray(photo[:123, :217])
  both = encode(first, 'MPO', exif=exif, save_all=True, append_images=[other])
  assert Image.open(io.BytesIO(both)).n_frames == 2
  for box, size in ((None, None), (Box(9, 8, 100, 90), (30, 30))):
    got, want = (
      decode.open_image(data, 'x').read(box, size) for data in (both, one)
    )
    np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(
    decode.from_pillow(Image.open(io.BytesIO(both))), decode.decode(one, 'x')
  )


def test_errors_survive_the_way_between_processes():
  error = pickle.loads(pickle.dumps(decode.UnreadableImage('a.png', 'torn')))
  assert str(error) == 'cannot read image a.png: torn'
  for cause in (OSError(errno.EIO, 'bad disk'), MemoryError()):
    error.__cause__ = cause
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert flags.status(again) == flags.EXIT_ENVIRONMENT


@pytest.mark.skipif(not os.path.exists('/proc/self/mem'), reason='reads /proc')
def test_storage_that_fails_is_the_cause_of_an_unreadable_image():
  """/proc/self/mem fails to be read as a bad disk does: EIO."""
  with pytest.raises(decode.UnreadableImage, match='/proc/self/mem') as e:
    decode.read_file('/proc/self/mem')
  assert flags.status(e.value) == flags.EXIT_ENVIRONMENT
  with pytest.raises(decode.UnreadableImage) as e:
    decode.read_file('/proc/self/missing')
  assert flags.status(e.value) == flags.EXIT_BAD_INPUT
