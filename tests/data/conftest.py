"""Images good and bad, and folders of them, for the tests of the input."""

import importlib.resources
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import decode


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  """No test reads or writes the cache of the user."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture(scope='session')
def photo():
  """A photograph: uint8 [427, 640, 3]."""
  path = importlib.resources.files('sklearn.datasets.images') / 'china.jpg'
  return np.asarray(Image.open(io.BytesIO(path.read_bytes())))


def _encode(image, file_format='PNG', **options):
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  buffer = io.BytesIO()
  image.save(buffer, file_format, **options)
  return buffer.getvalue()


@pytest.fixture(scope='session')
def encode():
  """encode(pixels or Pillow image, format, **options) -> bytes."""
  return _encode


@pytest.fixture
def decodings(monkeypatch):
  """A list of how JPEGs are decoded: by which factor, and if exactly."""
  found, decode_rows = [], decode._JpegPicture._decode

  def spy(self, factor, bottom, exact):
    found.append((factor, exact))
    return decode_rows(self, factor, bottom, exact)

  monkeypatch.setattr(decode._JpegPicture, '_decode', spy)
  return found


def _bomb_png(side):
  """A valid PNG of side x side black pixels that takes few bytes."""

  def chunk(kind, data):
    crc = zlib.crc32(kind + data)
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', crc)

  rows = zlib.compressobj(9)
  row = b'\0' * (side // 8 + 1)
  data = b''.join(rows.compress(row) for _ in range(side)) + rows.flush()
  header = struct.pack('>IIBBBBB', side, side, 1, 0, 0, 0, 0)
  return (
    b'\x89PNG\r\n\x1a\n'
    + chunk(b'IHDR', header)
    + chunk(b'IDAT', data)
    + chunk(b'IEND', b'')
  )


def _bomb_jpeg(encode_small):
  """A JPEG whose header claims 60,000 x 60,000 pixels."""
  data = bytearray(encode_small)
  at = data.index(b'\xff\xc0')
  struct.pack_into('>HH', data, at + 5, 60_000, 60_000)
  return bytes(data)


@pytest.fixture(scope='session')
def odd_files(photo):
  """About 200 damaged or odd files: name -> (bytes, whether readable)."""
  small = photo[100:160, 200:290]
  files = {}
  jpeg = _encode(small, 'JPEG', quality=90)
  png = _encode(small)
  others = {
    'webp': _encode(small, 'WEBP'),
    'gif': _encode(small, 'GIF'),
    'bmp': _encode(small, 'BMP'),
    'tif': _encode(small, 'TIFF'),
    'ppm': _encode(small, 'PPM'),
  }
  for extension, data in {'jpg': jpeg, 'png': png, **others}.items():
    files[f'good.{extension}'] = (data, True)
    files[f'empty.{extension}'] = (b'', False)
    files[f'text.{extension}'] = (b'This is not an image.\n' * 9, False)
    files[f'zeros.{extension}'] = (bytes(500), False)
    files[f'magic.{extension}'] = (data[:4], False)
    # The content counts: each format under all the other extensions.
    for other in ('jpg', 'jpeg', 'png', 'gif', 'webp', 'bmp', 'tiff'):
      files[f'{extension}_called.{other}'] = (data, True)
  for percent in range(2, 100, 3):
    cut = len(jpeg) * percent // 100
    files[f'cut_{percent}.jpg'] = (jpeg[:cut], False)
    # The end marker in place hides the cut from a careless reader.
    files[f'closed_{percent}.jpg'] = (jpeg[:cut] + b'\xff\xd9', False)
    files[f'cut_{percent}.png'] = (png[: len(png) * percent // 100], False)
  progressive = _encode(small, 'JPEG', progressive=True)
  files['progressive.jpg'] = (progressive, True)
  files['cut_progressive.jpg'] = (progressive[: len(progressive) // 2], False)
  files['restarts.jpg'] = (_encode(small, 'JPEG', restart_marker_rows=1), True)
  files['junk_behind.jpg'] = (jpeg + b'junk' * 50, True)
  files['grey.jpg'] = (_encode(small[:, :, 0], 'JPEG'), True)
  files['cmyk.jpg'] = (
    _encode(Image.fromarray(small).convert('CMYK'), 'JPEG'),
    True,
  )
  deep = small[:, :, 0].astype(np.uint16) * 257
  files['grey16.png'] = (_encode(deep), True)
  files['grey16.tif'] = (_encode(deep, 'TIFF'), True)
  files['float.tif'] = (
    _encode(small[:, :, 0] / np.float32(255), 'TIFF'),
    False,
  )
  for mode in ('1', 'L', 'LA', 'P', 'RGBA'):
    image = Image.fromarray(small).convert(mode)
    files[f'mode_{mode}.png'] = (_encode(image), True)
  frames = [Image.fromarray(small), Image.fromarray(small[::-1])]
  for extension in ('gif', 'webp', 'png', 'tiff'):
    files[f'animated.{extension}'] = (
      _encode(
        frames[0], extension.upper(), save_all=True, append_images=frames[1:]
      ),
      True,
    )
  files['wide.png'] = (_encode(np.zeros((1, 30_000, 3), np.uint8)), True)
  files['tall.png'] = (_encode(np.zeros((30_000, 1, 3), np.uint8)), True)
  files['wide.jpg'] = (
    _encode(np.zeros((1, 30_000, 3), np.uint8), 'JPEG'),
    True,
  )
  files['one_pixel.png'] = (_encode(np.zeros((1, 1, 3), np.uint8)), True)
  files['one_pixel.jpg'] = (
    _encode(np.zeros((1, 1, 3), np.uint8), 'JPEG'),
    True,
  )
  files['bomb.png'] = (_bomb_png(12_000), False)
  files['bigger_bomb.png'] = (_bomb_png(20_000), False)
  files['bomb.jpg'] = (_bomb_jpeg(jpeg), False)
  return files
