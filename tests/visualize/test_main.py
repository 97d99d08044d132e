"""The command, as users give it, in this process."""

import base64
import html.parser
import re

import jax
import numpy as np
import pytest
from PIL import Image

from tests.checkpoints.random_weights import random_checkpoint, random_images
from vit_jax.checkpoints import opening
from vit_jax.data import device_augmentation
from vit_jax.visualize import __main__ as command
from vit_jax.visualize import distance, draw, photos, rollout, sections
from vit_jax.visualize.attention_maps import Layers

SMALL = dict(patch_size=8, width=16, depth=2, mlp_dim=24, heads=2)
SIZE = (16, 24)
MODELS = {
  'cls': {},
  'gap': {'pool': 'gap'},
  'layers': {'posemb': 'learned2d', 'posemb_at': 'every_layer'},
  'headless': {'num_classes': 0},
  'segmentation': {'name': 'segmentation_vit', 'pool': 'gap'},
}


@pytest.fixture
def checkpoints(monkeypatch):
  """Makes the names of `MODELS`, and `resnet`, open."""
  made = {}

  def opened(path):
    if path not in made:
      fields = SMALL | MODELS.get(path, {})
      if path == 'resnet':
        fields = {'name': 'resnet', 'width': 32, 'layers': (1,)}
      made[path] = random_checkpoint(None, SIZE, **fields)
    return made[path]

  monkeypatch.setattr(opening, 'open_checkpoint', opened)
  return opened


@pytest.fixture
def files(tmp_path):
  """Three images of different shapes, two of them of one name."""
  (tmp_path / 'more').mkdir()
  paths = [tmp_path / name for name in ('a.png', 'more/a.png', 'more/b.png')]
  for i, (path, size) in enumerate(
    zip(paths, [(30, 40), (64, 32), (16, 24)], strict=True)
  ):
    Image.fromarray(random_images(size, 1, seed=i)[0]).save(path)
  return [str(path) for path in paths]


@pytest.fixture
def run(checkpoints, tmp_path, capsys):
  del checkpoints

  def run(what, *args):
    status = command.main([what, *args, f'--out={tmp_path / "out"}'])
    out, err = capsys.readouterr()
    return status, out, err, tmp_path / 'out'

  return run


def seen_by(checkpoint, files):
  """Returns the files, normalised; no crop, and no name, is involved."""
  photographs = photos.load(files, checkpoint)
  return np.asarray(
    device_augmentation.normalize(np.stack([p.seen_HWC for p in photographs]))
  )


def captured(checkpoint, files):
  """Returns the attention that the model itself gives of the files."""
  _, aux = jax.jit(checkpoint.model.apply, static_argnames='capture')(
    {'params': checkpoint.params},
    seen_by(checkpoint, files),
    capture=('attention',),
  )
  return aux['attention']


def layers_of(checkpoint, files):
  return Layers(checkpoint.model, checkpoint.params, seen_by(checkpoint, files))


def pictures(folder):
  return sorted(path.stem for path in folder.glob('*.png'))


def test_rollout_has_a_map_of_every_file(run, checkpoints, files):
  status, said, err, out = run('rollout', 'gap', *files)
  assert (status, err) == (0, '')
  assert f'written  {out}/rollout.png and 1 more' in said
  assert ', 16x24 pixels, ' in said
  assert pictures(out) == ['rollout']
  arrays = np.load(out / 'rollout.npz')
  assert list(arrays['files']) == files
  assert list(arrays['classes']) == ['']
  want = rollout.rollout(layers_of(checkpoints('gap'), files))
  np.testing.assert_allclose(arrays['maps'], want[None], rtol=1e-5)


def test_classes_by_name_or_index(run, checkpoints, files, monkeypatch):
  sheets = []
  monkeypatch.setattr(draw, 'sheet', lambda *args: sheets.append(args) or b'')
  how = ('--fusion=max', '--discard=0.5')
  status, said, err, out = run(
    'rollout', 'cls', files[0], '--class=class 4', '--class=2', *how
  )
  assert (status, err) == (0, '')
  assert 'by their max, the lowest 50% of the weights discarded, wei' in said
  arrays = np.load(out / 'rollout.npz')
  assert list(arrays['classes']) == ['class 4', 'class 2']
  layers = layers_of(checkpoints('cls'), files[:1])
  for i, index in enumerate((4, 2)):
    want = rollout.rollout(layers, 'max', 0.5, np.array([index]))
    np.testing.assert_allclose(arrays['maps'][i], want, rtol=1e-5)
  (((line,), names),) = sheets
  assert names == ['a']
  kinds = ('rollout', 'highest half')
  titles = [f'class {c}: {kind}' for c in (4, 2) for kind in kinds]
  assert [*line] == ['image', *titles]
  want = draw.overlay(line['image'], arrays['maps'][1, 0])
  np.testing.assert_array_equal(line['class 2: rollout'], want)


@pytest.mark.fast('1,2')
@pytest.mark.parametrize('query', [None, '1,2'])
def test_attention_is_the_row_of_the_query(query, run, checkpoints, files):
  options = [f'--query={query}'] if query else []
  status, said, _, out = run('attention', 'cls', *files, *options)
  assert status == 0
  assert ('patch 1,2' if query else 'the class token') in said
  assert pictures(out) == ['attention-a', 'attention-a-2', 'attention-b']
  row = 1 + 1 * 3 + 2 if query else 0
  attention = captured(checkpoints('cls'), files)
  want = np.moveaxis(attention[..., row, 1:], 0, 1)
  got = np.load(out / 'attention.npz')['maps']
  np.testing.assert_allclose(
    got, want.reshape(3, 2, 2, 2, 3), rtol=1e-5, atol=1e-7
  )


def test_distances_are_means_over_images(run, checkpoints, files):
  status, _, _, out = run('distance', 'cls', *files)
  assert status == 0
  assert pictures(out) == ['distance']
  checkpoint = checkpoints('cls')
  one_by_one = [
    distance.mean_distances(layers_of(checkpoint, [file]), 8) for file in files
  ]
  np.testing.assert_allclose(
    np.load(out / 'distance.npz')['all'], np.mean(one_by_one, 0), rtol=1e-4
  )


def test_filters_need_no_attention(run):
  status, said, _, out = run('filters', 'resnet')
  assert status == 0
  assert pictures(out) == ['filters']
  assert np.load(out / 'filters.npz')['components'].shape[1:] == (7, 7, 3)
  assert "filters of the ResNet's first convolution (7x7 pixels)" in said


def test_position_embeddings_of_every_layer(run):
  status, _, _, out = run('posemb', 'layers')
  assert status == 0
  assert pictures(out) == ['posemb']
  found = np.load(out / 'posemb.npz')['cosines']
  assert found.shape == (2, 2, 3, 2, 3)
  for table in found.reshape(-1, 6, 6):
    np.testing.assert_allclose(np.diag(table), 1, rtol=1e-6)
    np.testing.assert_allclose(table, table.T, rtol=1e-6)


@pytest.mark.slow
def test_another_image_size(run, checkpoints, files):
  status, said, _, out = run('rollout', 'cls', *files, '--image_size=32x40')
  assert status == 0
  assert ', 32x40 pixels, ' in said
  assert np.load(out / 'rollout.npz')['maps'].shape == (1, 3, 4, 5)


class Page(html.parser.HTMLParser):
  """Collects what a page shows."""

  def __init__(self, text):
    super().__init__()
    self.source = text
    self.sources, self.texts, self.tags, self.alts = [], [], [], []
    self.feed(text)

  def picture(self, i):
    """Returns the pixels of one of the sources."""
    return draw.pixels(base64.b64decode(self.sources[i].partition(',')[2]))

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.sources += [
      v for k, v in attrs if k in ('src', 'href') and not v.startswith('#')
    ]
    self.alts += [v for k, v in attrs if k == 'alt']

  def handle_data(self, data):
    self.texts.append(data)


@pytest.mark.slow
def test_the_report_has_all_and_needs_nothing(run, checkpoints, files):
  # As of folders whose names are no UTF-8.
  names = tuple(f'<b>{i}</b>\udcff' for i in range(7))
  checkpoint = checkpoints('cls')
  object.__setattr__(checkpoint, 'class_names', names)
  names = tuple(name.replace('\udcff', r'\udcff') for name in names)
  # The likeliest classes of the first image are the least likely of the second.
  seen = seen_by(checkpoint, files)
  apply = jax.jit(checkpoint.model.apply)
  logits_BC, _ = apply({'params': checkpoint.params}, seen)
  checkpoint.params['head']['bias'] -= np.mean(logits_BC[:2], axis=0)
  status, said, err, out = run(
    *('report', 'cls', *files, '--fusion=max', '--discard=0.5')
  )
  assert (status, err) == (0, '')
  assert f'written  {out}/report.html\n' in said
  assert [path.name for path in out.iterdir()] == ['report.html']
  page = Page((out / 'report.html').read_text())
  assert all(source.startswith('data:') for source in page.sources)
  # The icon; 3 images of 1 + 2 * 3 pictures; 3 of attention; 3 more.
  assert len(page.sources) == 1 + 21 + 3 + 3
  assert 'b' not in page.tags
  assert sum(text in names for text in page.texts) == 3 * 5
  shares = [float(t[:-1]) for t in page.texts if re.fullmatch(r'[\d.]+%', t)]
  assert len(shares) == 3 * 5
  assert shares[:5] == sorted(shares[:5], reverse=True)
  # Each part can be gone to, and that of every head is as wide as it is.
  links = re.findall('<a href="#(.*?)">(.*?)</a>', page.source)
  assert links == re.findall('<h2 id="(.*?)">(.*?)</h2>', page.source)
  assert [title for _, title in links] == [
    *('Images', 'Attention', 'Distance', 'Filters', 'Position embeddings'),
  ]
  kinds = re.findall('<figure class="(.*?)">', page.source)
  assert kinds == [''] * 21 + ['wide'] * 3 + ['fitting'] * 3
  assert re.findall('<h3>(.*?)</h3>', page.source) == ['a', 'a-2', 'b']
  assert page.source.count(f'<title>{checkpoint.path}</title>') == 1
  count = sum(x.size for x in jax.tree.leaves(checkpoint.params))
  assert f', {count:,} parameters, ' in page.source
  # The second image, whole and by the two likeliest of its classes.
  assert 'their max, the lowest 50% of the weights discarded' in page.source
  labels = [text for text in page.texts if text in names][5:7]
  shown = photos.load(files, checkpoint)[1].shown()
  np.testing.assert_array_equal(page.picture(8), shown)
  assert page.alts[7] == 'image'
  layers = layers_of(checkpoint, files)
  for k, label in enumerate(['whole image', *labels]):
    class_B = None if k == 0 else np.full(3, names.index(label))
    map_hw = np.asarray(rollout.rollout(layers, 'max', 0.5, class_B)[1])
    want = sections.over(shown, map_hw, label)
    at = 8 + 2 * k
    assert page.alts[at : at + 2] == [*want]
    for i, picture in enumerate(want.values()):
      # Where maps are rounded otherwise, colours are the next.
      got = page.picture(at + 1 + i).astype(int)
      assert np.mean(np.abs(got - picture) > 2) < 0.01


def test_the_report_says_what_there_is_not(run, files):
  status, _, _, out = run('report', 'resnet', files[0])  # one is enough
  assert status == 0
  text = html.unescape((out / 'report.html').read_text())
  for reason in ['ResNet. Attention needs a model', 'not a ViT that adds']:
    assert re.search(reason, text)


def test_the_report_of_segmentation_has_no_classes(run, files):
  status, _, _, out = run('report', 'segmentation', files[0])
  assert status == 0
  assert '<table>' not in (out / 'report.html').read_text()


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (('rollout', 'cls', '{image}', '--class=clas 4'), 'Did you mean class 4'),
    (('rollout', 'headless', '{image}', '--class=0'), 'has no head'),
    (('rollout', 'cls', '{text}'), 'text.jpg: not an image of a known format'),
    (('posemb', 'resnet'), 'not a ViT that adds position embeddings'),
    (
      ('attention', 'cls', '{image}', '--query=2,0'),
      'Patch 2,0 .*from 0 to 1 ',
    ),
    (('rollout', 'cls', '{missing}'), 'No file or folder at .*missing'),
    (('rollout', 'cls', '{image}', '--image_size=20'), '8x8.*20x20'),
  ],
)
def test_bad_input_is_one_message(args, message, run, files, tmp_path):
  (tmp_path / 'text.jpg').write_text('no image at all')
  places = {
    'image': files[0],
    'text': tmp_path / 'text.jpg',
    'missing': tmp_path / 'missing',
  }
  status, said, err, out = run(*(arg.format(**places) for arg in args))
  assert (status, said) == (2, '')
  assert err.count('\n') == 1
  assert re.search(message, err)
  assert not out.exists()


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (('rollout', 'cls', 'i.png', '--discard=1'), '1 is not a share'),
    (('attention', 'cls', 'i.png', '--query=3'), 'is not ROW,COLUMN'),
  ],
)
def test_wrong_options_are_refused(args, message, run, capsys):
  with pytest.raises(SystemExit) as stopped:
    run(*args)
  assert stopped.value.code == 2
  assert message in capsys.readouterr().err
