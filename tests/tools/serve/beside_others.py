"""Memory and speed of the server beside Flask and Gradio, in one run.

  pip install flask gradio timm torch
  python -m tests.tools.serve.beside_others ti16 s16 b16 --threads 1 2

All serve a model with random weights: a board's folder in float32 and in int8,
a Gradio page with the same float32 file, and Flask with timm's model in
PyTorch, which has no map. They are asked one after the other, in turn, for new
JPEGs of 400x300 pixels. Memory is that of a server and its children.
"""

import argparse
import contextlib
import dataclasses
import http.client
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

from tests.checkpoints.random_weights import random_checkpoint
from tests.tools.serve.pictures_to_send import encoded, pixels
from vit_jax.tools.serve import board

TIMM = {'ti16': 'tiny', 's16': 'small', 'b16': 'base'}
# Both take a model, a port and a number of threads.
GRADIO = """
import sys
import gradio, numpy, onnxruntime
path, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
session = onnxruntime.InferenceSession(path, options)
def predict(image):
  x = numpy.asarray(image.convert('RGB').resize((224, 224), 2), numpy.float32)
  logits, *_ = session.run(['logits'], {'images': x[None] / 127.5 - 1})
  p = numpy.exp(logits[0] - logits[0].max())
  return {str(c): float(p[c] / p.sum()) for c in (-p).argsort()[:5]}
page = gradio.Interface(
  predict, gradio.Image(type='pil'), gradio.Label(), api_name='predict'
)
page.launch(server_name='127.0.0.1', server_port=port, quiet=True)
"""
FLASK = """
import io, sys
import flask, numpy, torch
# As tests/conftest.py: beside a CPU build, torchvision may lack operators.
try:
  import torchvision
except RuntimeError:
  for name in ('nms', 'qnms'):
    torch.library.define(
      f'torchvision::{name}', '(Tensor a, Tensor b, float c) -> Tensor'
    )
import timm
from PIL import Image
name, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
model = timm.create_model(f'vit_{name}_patch16_224', num_classes=1000).eval()
app = flask.Flask('page')
@app.post('/')
def predict():
  image = Image.open(io.BytesIO(flask.request.get_data())).convert('RGB')
  x = numpy.asarray(image.resize((224, 224), 2), numpy.float32) / 127.5 - 1
  with torch.inference_mode():
    p = model(torch.from_numpy(x.transpose(2, 0, 1)[None].copy())).softmax(1)
  values, indices = p[0].topk(5)
  return {str(int(c)): float(v) for c, v in zip(indices, values)}
app.run('127.0.0.1', port)
"""


def post(port: int, path: str, data: bytes) -> None:
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=300)
  connection.request('POST', path, data, {'Content-Type': 'image/jpeg'})
  response = connection.getresponse()
  body = response.read()
  connection.close()
  if response.status != 200:
    raise RuntimeError(f'{response.status}: {body[:200]!r}')


class Server:
  """One of them, in a process of its own."""

  def __init__(self, command: list[str], ask: str):
    """Starts it; {port} in the command is a free one."""
    with socket.create_server(('127.0.0.1', 0)) as free:
      self._port = free.getsockname()[1]
    self._ask = ask
    self._client = None
    self._process = subprocess.Popen(
      [x.replace('{port}', str(self._port)) for x in command],
      stdout=subprocess.DEVNULL,
    )
    self.seconds: list[float] = []
    while True:
      try:
        socket.create_connection(('127.0.0.1', self._port)).close()
        break
      except ConnectionError:
        if self._process.poll() is not None:
          raise RuntimeError(f'{command} has ended') from None
        time.sleep(0.2)

  def ask(self, data: bytes) -> None:
    """Sends an image, waits for the answer and remembers how long it took."""
    if self._ask != 'gradio':
      start = time.perf_counter()
      post(self._port, self._ask, data)
    else:
      import gradio_client

      if self._client is None:
        self._client = gradio_client.Client(
          f'http://127.0.0.1:{self._port}', verbose=False
        )
      with tempfile.NamedTemporaryFile(suffix='.jpg') as file:
        file.write(data)
        file.flush()
        start = time.perf_counter()
        image = gradio_client.handle_file(file.name)
        self._client.predict(image, api_name='/predict')
    self.seconds.append(time.perf_counter() - start)

  def memory_mb(self) -> tuple[float, float]:
    """Returns what it has now, and its part that is of no file."""
    total = private = 0.0
    for path in pathlib.Path('/proc').glob('[0-9]*/status'):
      try:
        lines = path.read_text().splitlines()
      except OSError:
        continue
      found = dict(line.split(':', 1) for line in lines)
      if self._process.pid in (int(found['Pid']), int(found['PPid'])):
        total += int(found['VmRSS'].split()[0]) / 1e3
        private += int(found['RssAnon'].split()[0]) / 1e3
    return total, private

  def close(self) -> None:
    self._process.kill()
    self._process.wait()


def main() -> None:
  """Prints a row a server."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('models', nargs='+', choices=TIMM)
  parser.add_argument('--threads', type=int, nargs='+', default=[1])
  parser.add_argument('--rounds', type=int, default=10)
  args = parser.parse_args()
  print('model threads server           MB  no file  images/s', flush=True)
  for name in args.models:
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch) / 'board'
      checkpoint = random_checkpoint(name, num_classes=1000)
      checkpoint = dataclasses.replace(checkpoint, path=f'/{name}')
      board.write(checkpoint, str(folder), 'int8')
      del checkpoint
      for threads in args.threads:
        compare(folder, name, threads, args.rounds)


def compare(folder: pathlib.Path, name: str, threads: int, rounds: int) -> None:
  """Starts all, asks them in turn and prints what came out."""
  python, count = sys.executable, str(threads)
  start = [python, str(folder / 'serve.py'), '--port={port}']
  start.append(f'--threads={count}')
  path = str(folder / 'models' / f'{name}.float32.onnx')
  ours = '/api/predict'
  commands = {
    'ours, float32': ([*start, '--dtype=float32'], ours),
    'ours, int8': ([*start, '--dtype=int8'], ours),
    'Gradio, float32': (
      [python, '-c', GRADIO, path, '{port}', count],
      'gradio',
    ),
    'Flask, PyTorch': (
      [python, '-c', FLASK, TIMM[name], '{port}', count],
      '/',
    ),
  }
  with contextlib.ExitStack() as stack:
    servers = {}
    for what, (command, ask) in commands.items():
      servers[what] = Server(command, ask)
      stack.callback(servers[what].close)
    for i in range(rounds + 1):
      for server in servers.values():
        image = Image.fromarray(pixels(300, 400, seed=np.random.randint(1e9)))
        server.ask(encoded(image, 'JPEG', quality=90))
        if not i:  # what is loaded then counts no more
          server.seconds.clear()
    for what, server in servers.items():
      total, private = server.memory_mb()
      rate = 1 / statistics.median(server.seconds)
      print(
        f'{name:5} {threads:7} {what:15} {total:5.0f} {private:8.0f} '
        f'{rate:9.2f}',
        flush=True,
      )


if __name__ == '__main__':
  main()
