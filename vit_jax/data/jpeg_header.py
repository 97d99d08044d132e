"""What a JPEG says of itself before its pixels."""

import struct
from typing import NamedTuple


class JpegHeader(NamedTuple):
  """What the segments before the pixels of a JPEG say.

  Attributes:
    height: Rows as stored.
    width: Columns as stored.
    components: 1 grey, 3 colour, 4 CMYK.
    height_at: Where in the file the height is stored, in bytes.
    lookahead: How many decoded rows below a row can influence it: none, unless
      chroma has fewer rows than brightness and is interpolated.
    has_metadata: Whether there is EXIF or XMP, hence maybe an orientation.
    can_stop_early: Whether rows come top to bottom in one scan, without the
      restart markers whose absence we could not tell from damage.
  """

  height: int
  width: int
  components: int
  height_at: int
  lookahead: int
  has_metadata: bool
  can_stop_early: bool


def read_header(data: bytes) -> JpegHeader | None:
  """Walks over the segments up to the first scan; None if that fails."""
  if data[:3] != b'\xff\xd8\xff':
    return None
  at, frame_at, has_metadata, restarts = 2, 0, False, False
  while at + 4 <= len(data) and data[at] == 0xFF:
    marker = data[at + 1]
    length = data[at + 2] << 8 | data[at + 3]
    if marker == 0xDA:  # Start of scan.
      break
    # Start of frame: C0 to CF, but for C4, C8 and CC, which are tables.
    if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
      frame_at = at
    elif marker == 0xE1:
      has_metadata = True
    elif marker == 0xDD:
      restarts = True
    at += 2 + length
  else:
    return None
  if not frame_at or frame_at + 10 > len(data) or at + 5 > len(data):
    return None
  height, width, components = struct.unpack_from('>HHB', data, frame_at + 5)
  if not height or not width:
    return None
  # Three bytes per component, the middle one with the sampling factors.
  sampling = data[frame_at + 11 : frame_at + 10 + 3 * components : 3]
  tallest = max((factors & 15 for factors in sampling), default=1)
  sequential = data[frame_at + 1] in (0xC0, 0xC1)
  one_scan = data[at + 4] == components
  return JpegHeader(
    height=height,
    width=width,
    components=components,
    height_at=frame_at + 5,
    lookahead=0 if tallest == 1 else 2 * tallest,
    has_metadata=has_metadata,
    can_stop_early=sequential and one_scan and not restarts,
  )
