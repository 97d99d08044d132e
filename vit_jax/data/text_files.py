"""Decodes the text files that users write: tables and lists of names."""

import os


def decoded(data: bytes, path: str | os.PathLike[str]) -> str:
  """Returns the text of a file in UTF-8; drops a byte order mark.

  Raises ValueError if the file has another encoding.
  """
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as e:
    raise ValueError(
      f'{path} has the byte 0x{data[e.start]:02x} at position {e.start}, which '
      'is not UTF-8. Save the file in UTF-8, which text editors and '
      'spreadsheets offer.'
    ) from e
