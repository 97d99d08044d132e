"""Flags of the server. This module works without the extra `serve`."""

import argparse
import os
import re

from vit_jax.tools.serve.decoder import TOKEN


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags of `vit_jax.serve` and of the serve.py for boards."""
  parser.add_argument(
    '--host',
    default='127.0.0.1',
    help='address to listen on (default: 127.0.0.1, only this machine; 0.0.0.0 '
    'accepts the whole network, so set --token too)',
  )
  parser.add_argument(
    '--port',
    type=_port,
    default=8000,
    help='port to listen on (default: 8000; 0: any free port)',
  )
  parser.add_argument(
    '--token',
    type=_token,
    default=os.environ.get(TOKEN),
    help='secret that requests to the API must send (default: the environment '
    f'variable {TOKEN}, which unlike a flag is hidden from other users of this '
    'machine; if it is not set, requests need no secret)',
  )
  parser.add_argument(
    '--threads',
    type=int,
    default=0,
    help='number of threads per model; 0 uses one per core (default: 0)',
  )


def _token(text: str) -> str:
  # HTTP strips spaces around headers, and clients encode non-ASCII differently.
  if not re.fullmatch('[!-~]+', text):
    raise argparse.ArgumentTypeError(
      'the token is empty, or has a character that HTTP headers may change. '
      'Use ASCII letters, digits and punctuation.'
    )
  return text


def _port(text: str) -> int:
  if not text.isdecimal() or int(text) > 65535:
    raise argparse.ArgumentTypeError(f'{text} is not a port. Use 0 to 65535.')
  return int(text)
