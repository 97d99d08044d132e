"""Headers of JPEGs, segment by segment as ITU-T T.81 (annex B) has them."""

import struct

import pytest

from vit_jax.data.decode import JpegHeader, read_header


def segment(marker, content=b''):
  return struct.pack('>BBH', 0xFF, marker, 2 + len(content)) + content


def frame(marker=0xC0, height=20, width=30, factors=(0x22, 0x11, 0x11)):
  """Precision, size, and of each component its number, sampling and table."""
  components = b''.join(bytes([i, x, 0]) for i, x in enumerate(factors))
  size = struct.pack('>BHHB', 8, height, width, len(factors))
  return segment(marker, size + components)


def scan(components=3):
  return segment(0xDA, bytes([components]) + bytes(2 * components + 3))


START = b'\xff\xd8'
TABLES = segment(0xDB, bytes(65))
EXIF = segment(0xE1, b'Exif\0\0' + bytes(9))
PLAIN = JpegHeader(
  height=20,
  width=30,
  height_at=2 + len(TABLES) + 5,
  lookahead=4,
  has_metadata=False,
)


@pytest.mark.parametrize(
  ('segments', 'changes'),
  [
    ([frame(), scan()], {}),
    # Two or four rows of brightness to one of colour; or as many.
    ([frame(factors=(0x14, 0x11, 0x11)), scan()], {'lookahead': 8}),
    ([frame(factors=(0x21, 0x11, 0x11)), scan()], {'lookahead': 0}),
    ([frame(factors=(0x11, 0x11, 0x12)), scan()], {'lookahead': 4}),
    ([frame(factors=(0x11,)), scan(1)], {'lookahead': 0}),
    # Extended sequential, progressive, and the last kind that there is.
    ([frame(0xC1), scan()], {}),
    ([frame(0xC2), scan()], {'height_at': 0}),
    ([frame(0xCF), scan()], {'height_at': 0}),
    # A scan for each component.
    ([frame(), scan(1)], {'height_at': 0}),
    # Tables, and what is none of the frame's before and after it.
    *(
      ([frame(), segment(x, bytes(12)), scan()], {})
      for x in (0xC4, 0xC8, 0xCC, 0xBF, 0xD0)
    ),
    ([frame(), segment(0xDD, b'\0\5'), scan()], {'height_at': 0}),
    ([frame(), EXIF, scan()], {'has_metadata': True}),
    ([frame(), segment(0xE2, b'Exif\0\0'), scan()], {}),
    # A length of more than a byte.
    ([frame(), segment(0xFE, bytes(300)), scan()], {}),
  ],
)
def test_segments_say_what_a_jpeg_is(segments, changes):
  data = b''.join([START, TABLES, *segments])
  assert read_header(data) == PLAIN._replace(**changes)


def test_a_header_that_is_cut_is_none():
  """Up to how many components the scan has, behind which are pixels."""
  before = START + frame()
  whole = before + scan()
  ends = [bool(read_header(whole[:n])) for n in range(len(whole) + 1)]
  assert ends.index(True) == len(before) + 5
  assert all(ends[len(before) + 5 :])


@pytest.mark.parametrize(
  'data',
  [
    START + frame(height=0) + scan(),
    START + TABLES + scan(),
    # Without components, and with those of CMYK.
    START + frame(factors=()) + scan(0),
    START + frame(factors=(0x11,) * 4) + scan(4),
    START + frame() + b'x' + scan(),
    b'\xff\xd9' + frame() + scan(),
    # A frame that claims no content, with a scan where its size would be.
    START + b'\xff\xc0\0\2' + scan()[:5],
  ],
)
def test_what_is_no_header_is_none(data):
  assert read_header(data) is None
