"""The command line that a workstation and a board share."""

import argparse
import os
import re

# The environment variable of the token, which is hidden from other users.
TOKEN = 'VIT_JAX_TOKEN'


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of both commands."""
  parser.add_argument(
    '--host',
    default='127.0.0.1',
    help='address to listen at (default: 127.0.0.1, for this machine alone; '
    '0.0.0.0 is for everybody who reaches it, so give a --token too)',
  )
  parser.add_argument(
    '--port', type=_port, default=8000, help='(default: 8000; 0 for a free one)'
  )
  parser.add_argument(
    '--token',
    type=_token,
    default=os.environ.get(TOKEN),
    help=f'secret that every request must have (default: ${TOKEN}, which other '
    'users of this machine cannot see, or none)',
  )
  parser.add_argument(
    '--threads',
    type=int,
    default=0,
    help='threads of a model (default: 0, as many as cores)',
  )


def _token(text: str) -> str:
  # Headers lose blanks at their ends, and differ in other characters.
  if not re.fullmatch('[!-~]+', text):
    raise argparse.ArgumentTypeError(
      f'the token {text!r} is empty, or has a blank or another character that '
      'headers do not keep: use letters, digits and punctuation of ASCII.'
    )
  return text


def _port(text: str) -> int:
  if not text.isdecimal() or int(text) > 65535:
    raise argparse.ArgumentTypeError(f'{text} is not a port: use 0 to 65535.')
  return int(text)
