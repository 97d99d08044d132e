"""What a model sees of files, beside what the rest of the package makes."""

import io
import os
import resource
import signal
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.tools.serve.pictures_to_send import encoded, every_kind, pixels
from vit_jax.data.preprocessing import Preprocessing
from vit_jax.data.transforms import EvalTransform
from vit_jax.projects.detr.box_transforms import BoxTransform
from vit_jax.tools.serve import decoder as decoder_lib
from vit_jax.tools.serve.decoder import (
  MAX_MEMORY_BYTES,
  Decoder,
  UnreadableUpload,
  View,
)

VIEWS = [
  View((32, 48), Preprocessing()),
  View((32, 32), Preprocessing(40)),
  View((24, 36), Preprocessing(36, interpolation='bicubic')),
  View((24, 24), Preprocessing(36, squash=True, resize_like='torchvision')),
]
KINDS = every_kind()


@pytest.mark.parametrize('kind', KINDS)
def test_the_pixels_are_those_of_the_checkpoint(kind):
  for view in VIEWS:
    got = decoder_lib.see(KINDS[kind], view)
    want = EvalTransform(*view[:2]).image(KINDS[kind], kind)
    assert got.pixels_HWC.shape == want.shape
    np.testing.assert_array_equal(got.pixels_HWC, want)


def test_an_image_that_keeps_its_shape_is_that_of_evaluation():
  """Boxes are looked for in the whole of it."""
  nothing = {'boxes': np.zeros((0, 4)), 'labels': ()}
  for view in VIEWS[:2]:
    transform = BoxTransform(
      view.size, max_objects=0, short_sides=(min(view.size),)
    )
    view = view._replace(keeps_shape=True)
    for kind, data in KINDS.items():
      got = decoder_lib.see(data, view)
      want = transform({'image': data, 'name': kind} | nothing)
      assert got.size == tuple(want['size']), kind
      assert got.box == (0, 0, 1, 1)
      np.testing.assert_array_equal(got.pixels_HWC, want['image'], kind)


def test_a_photograph_has_the_size_of_evaluation():
  view = View((800, 1333), Preprocessing(), keeps_shape=True)
  photo = encoded(Image.fromarray(pixels(427, 640)), 'PNG')
  assert decoder_lib.see(photo, view).size == (800, 1199)  # as in DETR's code


def test_the_box_is_the_part_that_is_seen():
  """A white box there, on black, is all that a model sees."""
  size = (200, 700)
  view = View((32, 24), Preprocessing(40))
  data = encoded(Image.fromarray(pixels(*size)), 'PNG')
  (H, W), box = size, decoder_lib.see(data, view).box
  top, left, height, width = box
  # Of 32 x 24 pixels, where the shorter side has 40.
  part = 32 / 40 * 200 / H, 24 / 40 * 200 / W
  assert box == pytest.approx((*(20 / 200, 290 / 700), *part))
  image = np.zeros((*size, 3), np.uint8)
  image[
    round(top * H) : round((top + height) * H),
    round(left * W) : round((left + width) * W),
  ] = 255
  seen = decoder_lib.see(encoded(Image.fromarray(image), 'PNG'), view)
  assert seen.pixels_HWC[1:-1, 1:-1].min() == 255
  image = 255 - image
  seen = decoder_lib.see(encoded(Image.fromarray(image), 'PNG'), view)
  assert seen.pixels_HWC[1:-1, 1:-1].max() == 0


def png_of(width, height):
  """Returns the beginning of a PNG that claims to be as large."""
  head = b'IHDR' + struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
  data = b'IDAT' + zlib.compress(bytes(1000))
  return b'\x89PNG\r\n\x1a\n' + b''.join(
    struct.pack('>I', len(x) - 4) + x + struct.pack('>I', zlib.crc32(x))
    for x in (head, data)
  )


BAD = {
  'nothing': (b'', 'the file is empty'),
  'text': (b'hello', 'known format. Send one of JPEG, PNG, WEBP,'),
  'postscript': (b'%!PS-Adobe-3.0 EPSF-3.0\n', 'not an image of a known'),
  'a bomb': (png_of(60_000, 60_000), 'pixels. is too large'),
  'many pixels': (png_of(8_000, 8_000), '8000x8000 pixels exceed'),
  'cut off': (KINDS['JPEG of 301 x 607'][:2000], 'truncated'),
  'floats': (
    encoded(Image.fromarray(np.ones((9, 9), np.float32)), 'TIFF'),
    'no defined white',
  ),
}


@pytest.mark.edge
def test_an_image_may_have_as_many_pixels_as_are_said(monkeypatch):
  data = encoded(Image.fromarray(pixels(8, 9)), 'PNG')
  monkeypatch.setattr(decoder_lib, 'MAX_PIXELS', 72)
  assert decoder_lib.see(data, VIEWS[0]).pixels_HWC.shape == (32, 48, 3)
  monkeypatch.setattr(decoder_lib, 'MAX_PIXELS', 71)
  unreadable = decoder_lib.decode.UnreadableImage
  with pytest.raises(unreadable, match='9x8 pixels .* limit of 71'):
    decoder_lib.see(data, VIEWS[0])


@pytest.fixture(scope='module')
def decoder():
  decoder = Decoder(VIEWS, seconds=600)
  yield decoder
  decoder.close()


@pytest.mark.edge
@pytest.mark.parametrize(('data', 'message'), BAD.values(), ids=BAD)
def test_what_is_no_image_is_said(decoder, data, message):
  with pytest.raises(UnreadableUpload, match=message):
    decoder.see(data)


def test_another_process_gives_the_same(decoder):
  data = KINDS['JPEG turned 6']
  for got, view in zip(decoder.see(data), VIEWS, strict=True):
    want = decoder_lib.see(data, view)
    np.testing.assert_array_equal(got.pixels_HWC, want.pixels_HWC)
    assert (got.box, got.size) == (want.box, want.size)


def test_warnings_about_an_image_fill_no_log(decoder, capfd):
  """Pillow warns of images that it reads."""
  exif = b'Exif\0\0II*\0\x08\0\0\0\xff\0'
  data = encoded(Image.fromarray(pixels(9, 7)), 'JPEG', exif=exif)
  with pytest.warns(UserWarning, match='EXIF'):
    Image.open(io.BytesIO(data)).getexif()
  decoder.see(data)
  assert capfd.readouterr() == ('', '')


@pytest.mark.edge
def test_what_stops_while_it_decodes_is_given_up(decoder, monkeypatch):
  """And the next is decoded by another process."""
  monkeypatch.setattr(decoder, '_seconds', 0.25)
  os.kill(decoder._process.pid, signal.SIGSTOP)
  with pytest.raises(UnreadableUpload, match='more than 0.25 seconds'):
    decoder.see(KINDS['JPEG of 9 x 7'])
  monkeypatch.setattr(decoder, '_seconds', 600)
  assert len(decoder.see(KINDS['JPEG of 9 x 7'])) == len(VIEWS)


def test_the_process_has_limits_where_the_server_has_none():
  """Whatever a decoder is made to do, it fills no memory and no disk."""
  decoder = Decoder(VIEWS)
  try:
    memory, file, core = (
      resource.prlimit(decoder._process.pid, limit)
      for limit in (
        resource.RLIMIT_AS,
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_CORE,
      )
    )
  finally:
    decoder.close()
  # No limit is -1, and the server may have a lower one itself.
  assert 0 < min(memory) <= max(memory) <= MAX_MEMORY_BYTES
  assert file == core == (0, 0)
