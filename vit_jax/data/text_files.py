"""Decodes the text files that users write: tables and lists of names."""

import os


def decoded(data: bytes, path: str | os.PathLike[str]) -> str:
  """Returns the text of a file in UTF-8; drops a byte order mark.

  Raises ValueError if the file has another encoding.
  """
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as e:
    # The error counts from the end of a byte order mark.
    start = e.start + len(data) - len(e.object)
    raise ValueError(
      f'{path} has the byte 0x{data[start]:02x} at position {start}, which is '
      'not UTF-8. Save the file in UTF-8, which text editors and spreadsheets '
      'offer.'
    ) from e
