"""Starts the server, on a workstation or a board."""

import argparse
import contextlib
import ctypes
import pathlib
import socket
import sys
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp

from vit_jax.tools.serve import protection
from vit_jax.tools.serve.engine import Engine, Explain
from vit_jax.tools.serve.flags import TOKEN, add_flags
from vit_jax.tools.serve.served_model import ServedModel, seconds_per_image
from vit_jax.tools.serve.server import PageServer


def serve(
  args: argparse.Namespace,
  paths: Sequence[pathlib.Path],
  explain: Explain | None = None,
) -> None:
  """Serves models, one file NAME.DTYPE.onnx each, until a signal.

  Raises:
    OSError: if the host or port cannot be used, or the decoder does not start.
    ValueError: if a file is not a model for serving.
  """
  is_local = args.host in protection.LOOPBACK
  if not is_local and not args.token:
    print(
      f'warning: Everyone who can reach {args.host}:{args.port} can use the '
      f'server. Set --token or ${TOKEN} to require a secret.',
      file=sys.stderr,
    )
  _give_memory_back()
  opened = [ServedModel(path, args.threads) for path in paths]
  models = {model.name: model for model in opened}
  hosts = protection.LOOPBACK if is_local else None
  engine = Engine(models, explain)
  app = PageServer(engine, args.token or '', hosts).app()
  family = socket.AF_INET6 if ':' in args.host else socket.AF_INET
  listener = socket.create_server((args.host, args.port), family=family)
  with contextlib.suppress(AttributeError, OSError):  # only Linux has it
    # The kernel keeps an unread response after the connection is closed.
    milliseconds = int(1000 * protection.BODY_SECONDS)
    listener.setsockopt(
      socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds
    )
  port = listener.getsockname()[1]
  host = f'[{args.host}]' if ':' in args.host else args.host
  print(f'serving   {", ".join(models)} at http://{host}:{port}', flush=True)
  try:
    uvicorn.Server(config_of(app)).run([listener])
  finally:
    engine.close()


def config_of(app: ASGIApp) -> uvicorn.Config:
  return uvicorn.Config(
    app,
    http=protection.ImpatientProtocol,
    loop='asyncio',
    ws='none',
    h11_max_incomplete_event_size=protection.MAX_HEADER_BYTES,
    # Keep it small: asyncio accepts the whole backlog before the server can
    # close connections.
    backlog=100,
    timeout_graceful_shutdown=5,
    headers=list(protection.HEADERS.items()),
    access_log=False,
    server_header=False,
    proxy_headers=False,
    # Otherwise strangers could write to the log through warnings.
    log_level='error',
  )


def _give_memory_back() -> None:
  """Makes glibc return the memory of large freed arrays to the system.

  Otherwise each thread keeps that memory (docs/results/serving.md).
  """
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'mallopt'):
    M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.mallopt(M_ARENA_MAX, 2)


def main() -> int:
  """Serves the folder models/ beside serve.py; returns the exit status."""
  parser = argparse.ArgumentParser(
    description='Serves the models of this folder, as a web page and an HTTP '
    'API.'
  )
  add_flags(parser)
  parser.add_argument(
    '--dtype',
    choices=('faster', 'float32', 'int8'),
    default='faster',
    help='dtype to use if a model has a file for float32 and one for int8 '
    '(default: faster, which times both)',
  )
  args = parser.parse_args()
  folder = pathlib.Path(sys.argv[0]).resolve().parent / 'models'
  found: dict[str, dict[str, pathlib.Path]] = {}
  for path in sorted(folder.glob('*.*.onnx')):
    name, _, dtype = path.stem.rpartition('.')
    found.setdefault(name, {})[dtype] = path
  try:
    if not found:
      raise FileNotFoundError(
        f'{folder} has no models. Write the folder again with '
        'python -m vit_jax.convert CHECKPOINT FOLDER --to=board.'
      )
    serve(args, [choose(x, args.dtype, args.threads) for x in found.values()])
  except (OSError, ValueError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  return 0


def choose(
  paths: dict[str, pathlib.Path], dtype: str, threads: int
) -> pathlib.Path:
  """Returns the file of a model in one dtype.

  `paths` has a file for 'float32', 'int8' or both. `dtype` chooses from two
  files; 'faster' runs both and takes the faster one, or raises ValueError if a
  file is not a model for serving.
  """
  if len(paths) == 1:
    return next(iter(paths.values()))
  if dtype == 'faster':
    _give_memory_back()
    times = {x: seconds_per_image(path, threads) for x, path in paths.items()}
    dtype = min(times, key=times.__getitem__)
    said = ', '.join(f'{x} {1e3 * s:.1f} ms' for x, s in times.items())
    print(f'timed     {paths[dtype].stem}: {said}', flush=True)
  return paths[dtype]
