"""Names become paths, and an error says how to fetch a file by hand.

Nothing here needs the network: buckets and the hub are folders, and a server
of this process stands for the storage of published checkpoints.
"""

import base64
import functools
import http.server
import os
import pathlib
import socket
import subprocess
import sys
import threading

import google_crc32c
import pytest

import vit_jax
from tests.checkpoints.random_weights import random_checkpoint
from tests.conftest import ROOT
from vit_jax.checkpoints import fetch, opening
from vit_jax.checkpoints.catalogue import PUBLISHED
from vit_jax.checkpoints.formats import npz
from vit_jax.convert import __main__ as convert

FILE = 'gs://vit_models/augreg/Ti_16.npz'
BY_HAND = 'https://storage.googleapis.com/vit_models/augreg/Ti_16.npz'


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache/vit_jax/checkpoints'


class Bar:
  """The part of tqdm that `fetch` uses; records its numbers."""

  def __init__(self, **options):
    self.options, self.done = options, 0

  def __enter__(self):
    return self

  def __exit__(self, *args):
    pass

  def update(self, count):
    self.done += count


@pytest.fixture
def bars(monkeypatch):
  """A list of all progress bars that were shown."""
  shown = []
  monkeypatch.setattr(
    fetch, 'tqdm', lambda **options: shown.append(Bar(**options)) or shown[-1]
  )
  return shown


class Bucket:
  """A bucket as a folder that counts opened files."""

  def __init__(self, folder):
    self.folder = folder
    self.opened = 0
    self.error = None
    self.missing_bytes = 0

  def put(self, name, data):
    place = self.folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return f'gs://{name}'

  def path(self, source):
    return _Remote(self, self.folder / source.removeprefix('gs://'))


class _Remote:
  """The methods of `epath.Path` that `fetch` uses."""

  def __init__(self, bucket, place):
    self.bucket, self.place = bucket, place

  def stat(self):
    size = self.place.stat().st_size + self.bucket.missing_bytes
    return type('Stat', (), {'length': size})

  def open(self, mode):
    self.bucket.opened += 1
    if self.bucket.error:
      raise self.bucket.error
    return self.place.open(mode)


@pytest.fixture
def bucket(tmp_path, cache, monkeypatch):
  bucket = Bucket(tmp_path / 'buckets')
  monkeypatch.setattr(fetch.epath, 'Path', bucket.path)
  return bucket


def files_in(folder):
  return [path for path in folder.rglob('*') if path.is_file()]


@pytest.mark.parametrize('path', ['/a/b', '~/c', 'gs:/a.npz'])
def test_a_path_is_returned_as_it_is(path):
  assert fetch.local(path) == path


@pytest.mark.parametrize('name', ['', 'x/checkpoints/100'])
def test_a_folder_of_a_bucket_is_read_where_it_is(bucket, name):
  source = f'gs://mine/{name}'
  assert fetch.local(source) == source
  assert bucket.opened == 0


@pytest.mark.parametrize('scheme', ['s3', ''])
def test_other_schemes_are_refused_with_the_valid_ones(scheme):
  source = f'{scheme}://host/model.npz'
  with pytest.raises(
    ValueError, match='begins with gs://, hf:// or timm://'
  ) as e:
    fetch.local(source)
  assert str(e.value).startswith(f'{source} cannot be fetched. Give a path')


def test_a_file_of_a_bucket_is_copied_once(bucket, cache, monkeypatch, bars):
  monkeypatch.setattr(fetch, '_CHUNK_BYTES', 7)
  bucket.put('vit_models/augreg/Ti_16.npz', b'some weights')
  path = fetch.local(FILE)
  assert path == str(cache / 'gs/vit_models/augreg/Ti_16.npz')
  assert pathlib.Path(path).read_bytes() == b'some weights'
  assert list(files_in(cache)) == [pathlib.Path(path)]
  bucket.error = OSError('no network')
  assert fetch.local(FILE) == path
  assert bucket.opened == 1
  (bar,) = bars
  assert bar.options['desc'] == f'fetching {FILE}'
  assert bar.done == bar.options['total'] == 12


@pytest.mark.parametrize('name', ['x.npz', 'x.safetensors'])
def test_all_kinds_of_files_are_copied_here(bucket, name):
  source = bucket.put(f'mine/{name}', b'x')
  assert fetch.is_name(source)
  assert pathlib.Path(fetch.local(source)).read_bytes() == b'x'


def test_files_of_one_name_are_kept_apart(bucket):
  for name in ('a/model.npz', 'b/model.npz', 'a/x/model.npz'):
    bucket.put(name, name.encode())
  for name in ('a/model.npz', 'b/model.npz', 'a/x/model.npz'):
    path = fetch.local(f'gs://{name}')
    assert pathlib.Path(path).read_text() == name


@pytest.mark.parametrize('missing_bytes', [1, -1])
def test_a_copy_of_another_size_is_not_kept(bucket, cache, missing_bytes):
  bucket.put('vit_models/augreg/Ti_16.npz', b'some weights')
  bucket.missing_bytes = missing_bytes
  of = f'it ends at 12 of {12 + missing_bytes} bytes'
  with pytest.raises(ConnectionError, match=of):
    fetch.local(FILE)
  assert files_in(cache) == []
  bucket.missing_bytes = 0
  assert os.path.getsize(fetch.local(FILE)) == 12


def test_a_copy_that_is_broken_off_is_not_kept(bucket, cache, monkeypatch):
  bucket.put('vit_models/augreg/Ti_16.npz', b'some weights')

  class Interrupted(Bar):
    def update(self, count):
      raise KeyboardInterrupt

  monkeypatch.setattr(fetch, 'tqdm', Interrupted)
  with pytest.raises(KeyboardInterrupt):
    fetch.local(FILE)
  assert files_in(cache) == []


def test_a_file_that_is_not_in_the_bucket(bucket, cache):
  with pytest.raises(FileNotFoundError, match=f'{FILE} does not exist'):
    fetch.local(FILE)
  assert files_in(cache) == []


def test_a_bucket_that_cannot_be_reached(bucket, cache):
  error = OSError('Cannot connect to host storage.googleapis.com')
  bucket.put('vit_models/augreg/Ti_16.npz', b'some weights')
  bucket.error = error
  with pytest.raises(ConnectionError) as e:
    fetch.local(FILE)
  message = str(e.value)
  assert message.startswith(f'{FILE} cannot be fetched (')
  said = str(error).strip().splitlines()[0]
  assert f'({type(error).__name__}: {said})' in message
  assert '\n' not in message
  by_hand = f'Download {BY_HAND} and give the path.'
  assert f'). {by_hand} If the bucket' in message
  assert 'gcloud auth application-default login' in message
  assert files_in(cache) == []


@pytest.mark.parametrize('source', ['gs://x.npz', 'gs://a/../../x.npz'])
def test_names_that_lead_out_of_the_cache_are_refused(bucket, source):
  with pytest.raises(
    ValueError, match='is not a file in a bucket. Give gs://BUCKET/'
  ):
    fetch.local(source)


def test_the_reader_opens_a_file_of_a_bucket(bucket, tmp_path):
  checkpoint = random_checkpoint(
    None, (16, 16), patch_size=8, width=32, depth=1, mlp_dim=48, heads=4
  )
  npz.write(checkpoint.weights(), str(tmp_path / 'vit.npz'), 'float32')
  source = bucket.put('mine/vit.npz', (tmp_path / 'vit.npz').read_bytes())
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(opening.saving, 'absolute', pathlib.Path)
    opened = opening.open_checkpoint(source)
  assert opened.model.width == 32


NAME = 'augreg/ti16-224'
ADDRESS = PUBLISHED[NAME].address


class Storage:
  """Answers as storage.googleapis.com does, and worse.

  Attributes:
    files: bytes by path.
    has_length: whether it states the length of a file.
    flipped: whether it flips a bit of a file whose checksum it states.
    cut_bytes: after how many bytes it closes the connection, or None.
    status: of every answer, if not 200.
    asked: the number of requests.
  """

  def __init__(self):
    self.files, self.has_length, self.cut_bytes = {}, True, None
    self.status, self.asked, self.flipped = None, 0, False

  def put(self, address, data):
    self.files[address.removeprefix('gs:/')] = data

  def answer(self, request):
    """Answers an `http.server` request."""
    self.asked += 1
    path = request.path.replace('%2B', '+')
    if self.status or path not in self.files:
      request.send_error(self.status or 404)
      return
    data = self.files[path]
    request.send_response(200)
    if self.has_length:
      request.send_header('Content-Length', str(len(data)))
    crc = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
    request.send_header('x-goog-hash', f'crc32c={crc},md5=AAAA')
    request.end_headers()
    if self.flipped:
      data = bytes([data[0] ^ 1]) + data[1:]
    request.wfile.write(data[: self.cut_bytes])


class _Handler(http.server.BaseHTTPRequestHandler):
  def __init__(self, storage, *args):
    self.storage = storage
    super().__init__(*args)

  def do_GET(self):  # noqa: N802
    self.storage.answer(self)

  def log_message(self, *args):
    pass


@pytest.fixture
def storage(cache, monkeypatch):
  storage = Storage()
  server = http.server.ThreadingHTTPServer(
    ('127.0.0.1', 0), functools.partial(_Handler, storage)
  )
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  address = f'http://127.0.0.1:{server.server_port}'
  monkeypatch.setattr(fetch, '_STORAGE', address)
  monkeypatch.setenv('no_proxy', '127.0.0.1')
  storage.address = address
  yield storage
  server.shutdown()
  thread.join()
  server.server_close()


def test_a_published_checkpoint_is_fetched_once(storage, cache):
  storage.put(ADDRESS, b'some weights')
  path = fetch.local(NAME)
  assert path == str(cache / 'gs' / ADDRESS.removeprefix('gs://'))
  assert pathlib.Path(path).read_bytes() == b'some weights'
  assert fetch.local(NAME) == fetch.local(ADDRESS) == path
  assert storage.asked == 1


def test_a_plus_in_an_address(storage):
  storage.put(PUBLISHED['vit/r50+b16-384'].address, b'hybrid')
  path = fetch.local('vit/r50+b16-384')
  assert path.endswith('/imagenet21k+imagenet2012/R50+ViT-B_16.npz')


def test_a_path_of_that_name_wins(storage, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert fetch.is_name(NAME)
  (tmp_path / NAME).mkdir(parents=True)
  assert fetch.local(NAME) == NAME and not fetch.is_name(NAME)
  assert storage.asked == 0


@pytest.mark.parametrize(
  ('change', 'error', 'message'),
  [
    ({'files': {}}, FileNotFoundError, f'{ADDRESS} does not exist.'),
    ({'status': 503}, ConnectionError, 'HTTP Error 503'),
    ({'cut_bytes': 100}, ConnectionError, 'it ends at 100 of 1,000 bytes'),
    ({'flipped': True}, ConnectionError, 'its CRC32C differs'),
  ],
)
def test_what_is_not_the_file_is_not_kept(
  storage, cache, change, error, message
):
  storage.put(ADDRESS, b'w' * 1000)
  for name, value in change.items():
    setattr(storage, name, value)
  with pytest.raises(error) as e:
    fetch.local(NAME)
  text = str(e.value)
  assert message in text and '\n' not in text
  if error is ConnectionError:
    assert text.startswith(f'{ADDRESS} cannot be fetched (')
    by_hand = f'{storage.address}{ADDRESS.removeprefix("gs:/")}'
    assert text.endswith(f'Download {by_hand} and give the path.')
  assert files_in(cache) == []


def test_a_length_that_the_server_does_not_state_is_not_checked(storage, bars):
  storage.put(ADDRESS, b'some weights')
  storage.has_length = False
  assert pathlib.Path(fetch.local(NAME)).read_bytes() == b'some weights'
  (bar,) = bars
  assert bar.options['total'] is None


@pytest.fixture
def nobody():
  """The address of a port that is taken, but not listened on."""
  with socket.socket() as taken:
    taken.bind(('127.0.0.1', 0))
    yield f'http://127.0.0.1:{taken.getsockname()[1]}'


def test_python_and_commands_open_a_published_checkpoint(storage, tmp_path):
  checkpoint = random_checkpoint(
    None, (16, 16), patch_size=8, width=32, depth=1, mlp_dim=48, heads=4
  )
  npz.write(checkpoint.weights(), str(tmp_path / 'vit.npz'), 'float32')
  storage.put(ADDRESS, (tmp_path / 'vit.npz').read_bytes())
  assert vit_jax.load(NAME).checkpoint.model.width == 32
  assert convert.main([NAME, str(tmp_path / 'again.npz'), '--to=npz']) == 0
  assert (tmp_path / 'again.npz').read_bytes() == (
    tmp_path / 'vit.npz'
  ).read_bytes()


class Hub:
  """A replacement of `snapshot_download` that creates files by name."""

  def __init__(self, folder):
    self.folder, self.files, self.calls = folder, [], []
    self.error = None

  def snapshot_download(self, repository, **options):
    import fnmatch

    self.calls.append((repository, options['revision']))
    if self.error:
      raise self.error
    self.folder.mkdir(exist_ok=True)
    for name in self.files:
      allowed, ignored = (
        any(fnmatch.fnmatch(name, pattern) for pattern in options[key])
        for key in ('allow_patterns', 'ignore_patterns')
      )
      if allowed and not ignored:
        (self.folder / name).touch()
    return str(self.folder)

  def fetched(self):
    return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def hub(tmp_path, monkeypatch):
  library = pytest.importorskip(
    'huggingface_hub', reason='needs the extra `hub`'
  )
  hub = Hub(tmp_path / 'snapshot')
  hub.files = [
    'config.json',
    'preprocessor_config.json',
    'model.safetensors',
    'pytorch_model.bin',
    'training_args.bin',
    'tf_model.h5',
    'README.md',
    'onnx/config.json',
    'onnx/model.safetensors',
  ]
  monkeypatch.setattr(library, 'snapshot_download', hub.snapshot_download)
  return hub


@pytest.mark.parametrize(
  ('source', 'repository', 'revision'),
  [
    ('hf://google/vit-base', 'google/vit-base', None),
    ('hf://a/b.c_d@refs/pr/1', 'a/b.c_d', 'refs/pr/1'),
    ('timm://vit_tiny.augreg_in21k', 'timm/vit_tiny.augreg_in21k', None),
  ],
)
def test_a_model_of_the_hub_is_its_folder(hub, source, repository, revision):
  assert fetch.local(source) == str(hub.folder)
  assert hub.calls == [(repository, revision)]
  assert hub.fetched() == [
    'config.json',
    'model.safetensors',
    'preprocessor_config.json',
  ]


def test_parts_of_weights_are_fetched(hub):
  hub.files.remove('model.safetensors')
  parts = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
  hub.files += [*parts, 'open_clip_model.safetensors']
  fetch.local('hf://google/vit-base')
  assert hub.fetched() == [
    'config.json',
    *parts,
    'preprocessor_config.json',
  ]


@pytest.mark.parametrize('other', ['', 'adapter_'])
def test_pickles_are_fetched_only_without_safetensors(hub, other):
  hub.files.remove('model.safetensors')
  if other:
    hub.files.append(f'{other}model.safetensors')
  assert fetch.local('hf://google/vit-base') == str(hub.folder)
  assert hub.fetched() == [
    'config.json',
    'preprocessor_config.json',
    'pytorch_model.bin',
  ]


@pytest.mark.parametrize('source', ['hf://vit', 'hf://a/b@', 'timm://a/b.c'])
def test_what_is_no_name_of_a_model(hub, source):
  with pytest.raises(
    ValueError, match='is not a valid model name. Give hf://ORG/'
  ):
    fetch.local(source)
  assert not hub.calls


def test_a_model_of_timm_needs_its_tag(hub):
  with pytest.raises(ValueError, match='timm://vit_base has no tag. Add it'):
    fetch.local('timm://vit_base')
  assert not hub.calls


def hub_error(name):
  """Returns an error of huggingface_hub that holds a response."""
  httpx = pytest.importorskip('httpx2')
  from huggingface_hub import errors

  request = httpx.Request('GET', 'https://huggingface.co')
  response = httpx.Response(401, request=request)
  return getattr(errors, name)('401 Client Error.\nlong', response=response)


@pytest.mark.parametrize(
  ('name', 'error', 'message'),
  [
    (
      'GatedRepoError',
      FileNotFoundError,
      'or the model is gated or private. See .* and run `hf auth login`. Or: ',
    ),
    (
      'HfHubHTTPError',
      ConnectionError,
      'is not in the cache and cannot be fetched',
    ),
  ],
)
def test_answers_of_the_hub_are_one_sentence(hub, name, error, message):
  hub.error = hub_error(name)
  with pytest.raises(error, match=message) as e:
    fetch.local('hf://google/vit@v9')
  assert '\n' not in str(e.value)
  assert ('huggingface.co/google/vit' in str(e.value)) == (
    name != 'RepositoryNotFoundError'
  )


FETCH = (
  'import sys; from vit_jax.checkpoints import fetch; fetch.local(sys.argv[1])'
)


@pytest.mark.slow
def test_without_network_the_real_library_says_what_to_do(tmp_path, nobody):
  pytest.importorskip('huggingface_hub', reason='needs the extra `hub`')
  proxies = {name: '' for name in os.environ if name.lower().endswith('_proxy')}
  done = subprocess.run(
    [sys.executable, '-c', FETCH, 'hf://google/vit-base-patch16-224'],
    cwd=ROOT,
    env=os.environ
    | proxies
    | {
      'HF_HUB_OFFLINE': '1',
      'HF_ENDPOINT': nobody,
      'HF_HOME': str(tmp_path),
    },
    capture_output=True,
    text=True,
  )
  last = done.stderr.splitlines()[-1]
  assert last.startswith(
    'ConnectionError: hf://google/vit-base-patch16-224 is not in the cache and '
    'cannot be fetched (LocalEntryNotFoundError: '
  )
  assert last.endswith(
    'Download it from https://huggingface.co/google/vit-base-patch16-224 and '
    'give the path of the folder.'
  )


@pytest.mark.slow
def test_a_model_fetched_before_needs_no_network(tmp_path):
  pytest.importorskip('huggingface_hub', reason='needs the extra `hub`')
  commit = '0123456789' * 4
  folder = tmp_path / 'hub/models--google--vit'
  snapshot = folder / 'snapshots' / commit
  snapshot.mkdir(parents=True)
  for name in ('config.json', 'model.safetensors'):
    (snapshot / name).touch()
  (folder / 'refs').mkdir()
  (folder / 'refs/main').write_text(commit)
  done = subprocess.run(
    [sys.executable, '-c', f'{FETCH}; print("fetched")', 'hf://google/vit'],
    cwd=ROOT,
    env=os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path)},
    capture_output=True,
    text=True,
  )
  assert (done.stdout, done.returncode) == ('fetched\n', 0), done.stderr
