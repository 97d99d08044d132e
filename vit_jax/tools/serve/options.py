"""The command line that a workstation and a board share."""

import argparse
import os

# Of the environment: the token, which others do not see among the processes.
TOKEN = 'VIT_JAX_TOKEN'


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds what both commands take."""
  parser.add_argument(
    '--host',
    default='127.0.0.1',
    help='address to listen at (default: 127.0.0.1, this machine alone; '
    '0.0.0.0 is for all who reach it, wherefore --token)',
  )
  parser.add_argument(
    '--port', type=_port, default=8000, help='(default: 8000; 0 for a free one)'
  )
  parser.add_argument(
    '--token',
    type=_token,
    default=os.environ.get(TOKEN),
    help=f'what whoever asks has to know (default: ${TOKEN}, which others on '
    'this machine do not see among the processes, or none)',
  )
  parser.add_argument(
    '--threads',
    type=int,
    default=0,
    help='that a model runs in (default: 0, as many as cores)',
  )


def _token(text: str) -> str:
  if not text:
    raise argparse.ArgumentTypeError(
      'it is empty, and everybody would be answered: give one, or leave it out.'
    )
  return text


def _port(text: str) -> int:
  if not text.isdecimal() or int(text) > 65535:
    raise argparse.ArgumentTypeError(f'{text} is none: use 0 to 65535.')
  return int(text)
