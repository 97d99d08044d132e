"""How a workstation and a board start the server."""

import argparse
import ctypes
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

import uvicorn

from vit_jax.tools.serve import options, protection
from vit_jax.tools.serve.engine import Engine, Explain
from vit_jax.tools.serve.served_model import ServedModel, seconds_an_image
from vit_jax.tools.serve.server import PageServer

# Connections at once, idle ones too.
_MAX_CONNECTIONS = 256


def serve(
  args: argparse.Namespace,
  paths: Sequence[pathlib.Path],
  explain: Explain | None = None,
) -> None:
  """Serves models until it is told to end.

  Args:
    args: of `options.add_flags`.
    paths: of files NAME.DTYPE.onnx, one a name.
    explain: see `Engine`.
  """
  _give_memory_back()
  opened = [ServedModel(path, args.threads) for path in paths]
  models = {model.name: model for model in opened}
  hosts = protection.LOOPBACK if args.host in protection.LOOPBACK else None
  engine = Engine(models, explain)
  config = uvicorn.Config(
    PageServer(engine, args.token or '', hosts).app(),
    host=args.host,
    port=args.port,
    http=protection.ImpatientProtocol,
    ws='none',
    h11_max_incomplete_event_size=protection.MAX_HEADER_BYTES,
    limit_concurrency=_MAX_CONNECTIONS,
    timeout_keep_alive=5,
    timeout_graceful_shutdown=5,
    access_log=False,
    server_header=False,
    proxy_headers=False,
    # Not warnings, one for each request that is no HTTP: strangers would fill
    # the log.
    log_level='error',
  )
  family = socket.AF_INET6 if ':' in args.host else socket.AF_INET
  listener = socket.create_server((args.host, args.port), family=family)
  port = listener.getsockname()[1]
  host = f'[{args.host}]' if ':' in args.host else args.host
  print(f'serving   {", ".join(models)} at http://{host}:{port}', flush=True)
  uvicorn.Server(config).run([listener])


def _give_memory_back() -> None:
  """Makes glibc return large arrays to the system when they are freed.

  It would keep them, for every thread: a third of all memory with ViT-B/16.
  """
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'mallopt'):
    M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.mallopt(M_ARENA_MAX, 2)


def main() -> int:
  """Serves models/ beside a board's serve.py; returns the exit status."""
  parser = argparse.ArgumentParser(
    description='Serves the models of this folder, as a page and an API.'
  )
  options.add_flags(parser)
  parser.add_argument(
    '--dtype',
    choices=('faster', 'float32', 'int8'),
    default='faster',
    help='of models that are there in both (default: both are timed)',
  )
  args = parser.parse_args()
  folder = pathlib.Path(sys.argv[0]).resolve().parent / 'models'
  found: dict[str, list[pathlib.Path]] = {}
  for path in sorted(folder.glob('*.*.onnx')):
    found.setdefault(path.stem.rpartition('.')[0], []).append(path)
  if not found:
    print(f'error: There are no models in {folder}.', file=sys.stderr)
    return 2
  try:
    serve(args, [choose(x, args.dtype, args.threads) for x in found.values()])
  except (OSError, ValueError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  return 0


def choose(
  paths: Sequence[pathlib.Path], dtype: str, threads: int
) -> pathlib.Path:
  """Returns the file of a model in one dtype or the other.

  Args:
    paths: of the same model.
    dtype: 'float32', 'int8', or 'faster' to time them.
    threads: that it will run in.

  Raises:
    ValueError: if there is none in that dtype, or none runs that is timed.
  """
  by_dtype = {path.stem.rpartition('.')[2]: path for path in paths}
  if len(paths) == 1:
    return paths[0]
  if dtype != 'faster':
    if dtype not in by_dtype:
      raise ValueError(
        f'{paths[0].parent} has no {dtype} of this model: choose --dtype of '
        f'{", ".join(by_dtype)}.'
      )
    return by_dtype[dtype]
  seconds = {}
  for name, path in by_dtype.items():
    try:
      seconds[name] = _timed(path, threads)
    except ValueError as e:
      print(f'left out  {e}', file=sys.stderr, flush=True)
  if not seconds:
    raise ValueError(f'{paths[0]} runs in none of {", ".join(by_dtype)}.')
  fastest = min(seconds, key=lambda name: seconds[name])
  said = ', '.join(f'{name} {s * 1e3:.1f} ms' for name, s in seconds.items())
  print(f'timed     {paths[0].stem.rpartition(".")[0]}: {said}', flush=True)
  return by_dtype[fastest]


def _timed(path: pathlib.Path, threads: int) -> float:
  """Times a model in a process of its own, whose memory ends with it."""
  program = (
    'import sys, pathlib\n'
    f'from {seconds_an_image.__module__} import seconds_an_image\n'
    'print(seconds_an_image(pathlib.Path(sys.argv[1]), int(sys.argv[2])))'
  )
  root = pathlib.Path(__file__).parents[3]
  result = subprocess.run(
    [sys.executable, '-c', program, path, str(threads)],
    cwd=root,
    capture_output=True,
    text=True,
  )
  if result.returncode:
    said = result.stderr.strip().splitlines() or [
      f'its process ended with status {result.returncode}'
    ]
    raise ValueError(f'{path} does not run: {said[-1]}')
  return float(result.stdout)
