"""VIVI's three levels from their formulas, and where its clips come from."""

import jax
import numpy as np
import pytest
from PIL import Image
from scipy import special

from tests.objectives import test_every
from vit_jax.data import sources
from vit_jax.experiment import CheckedConfig
from vit_jax.projects.few_labels.video import open_videos

B, GROUP, S, F, K = 6, 3, 3, 2, 2
FIELDS = {
  'objective.group': GROUP,
  'objective.shots': S,
  'objective.frames': F,
  'objective.copies': K,
  'objective.margin': 0.3,
  'objective.weight': 0.7,
  'objective.temperature': 0.2,
}


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.slow
def test_the_loss_is_that_of_the_formulas():
  """Copy by copy, shot by shot, each against all others of its group."""
  smoothing = {'loss.label_smoothing': 0.1}
  made = test_every.experiment_of('video', batch_size=B, **FIELDS | smoothing)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), made.new_params()
  )
  raw = {
    'image': rng.integers(0, 256, (B, 16, 16, 3), np.uint8),
    'label': rng.integers(0, 10, B, np.int32),
    'clip': rng.integers(0, 256, (B, S, F, K, 16, 16, 3), np.uint8),
    'video': np.array([7, 1, 7, 2, 3, 7], np.int32),  # one is drawn twice
  }
  apply = jax.jit(lambda x: made.objective.model.apply({'params': params}, x))

  def outputs(images):
    images = images.reshape(-1, 16, 16, 3)
    logits, aux = apply((images - 127.5) / np.float32(127.5))
    return [
      np.asarray(x, np.float64)
      for x in (logits, aux['pre_logits'], aux['next_shot'])
    ]

  logits = outputs(raw['image'])[0]
  wanted_BC = 0.9 * np.eye(10)[raw['label']] + 0.01
  classes = -np.sum(wanted_BC * special.log_softmax(logits, -1), -1)
  z, following = np.empty((2, B, S, F, K, 32))
  for b in range(B):
    _, y, guess = outputs(raw['clip'][b])
    z[b], following[b] = (x.reshape(S, F, K, 32) for x in (unit(y), guess))
  centres = z.mean((2, 3))
  frames, shots, videos, told = [], [], [], []
  for b in range(B):
    group = range(b // GROUP * GROUP, b // GROUP * GROUP + GROUP)
    others = [c for c in group if raw['video'][c] != raw['video'][b]]
    strangers = [x for c in others for x in z[c].reshape(-1, 32)]
    for s, f, k in np.ndindex(S, F, K):
      mine = z[b, s, f, k]
      far = max(np.sum((mine - x) ** 2) for x in z[b, s, f])
      near = min(np.sum((mine - x) ** 2) for x in strangers)
      frames.append(max(0, 0.3 + far - near))
      shots.append(np.sum((mine - centres[b, s]) ** 2))
    for s in range(S - 1):
      guess = unit(following[b, s].mean((0, 1)))
      scores = np.array([guess @ centres[c, s + 1] for c in (b, *others)])
      videos.append(-special.log_softmax(scores / 0.2)[0])
      told.append(scores.argmax() == 0)
  batch = made.objective.augment(raw, jax.random.key(1))
  loss, metrics = test_every.loss_of(made.objective, params, batch)
  # Distances of nearly equal directions are differences of float32.
  for name, want in (
    ('frame_loss', frames),
    ('shot_loss', shots),
    ('video_loss', videos),
    ('predicted', told),
    ('accuracy', logits.argmax(-1) == raw['label']),
  ):
    np.testing.assert_allclose(
      metrics[name], np.mean(want), rtol=1e-4, err_msg=name
    )
  levels = sum(np.mean(x) for x in (frames, shots, videos))
  np.testing.assert_allclose(loss, np.mean(classes) + 0.7 * levels, rtol=1e-4)


def test_clips_are_of_one_video_each():
  """Frames of a video in order, and those of a copy alike without crops."""
  objective = test_every.experiment_of(
    'video',
    **FIELDS | {'objective.group': 4, 'data.crop_min_area': 1.0},
  ).objective
  transform = objective.train_transform()
  source = sources.open_source('digits', 'train[:5]')
  make = objective.images.train_transform()
  frames = open_videos(objective.videos, 'error').frames
  known = [make(frames[i], None)['image'].tobytes() for i in range(96)]
  seen = set()
  for seed in range(20):
    example = transform(source[seed % 5], np.random.default_rng(seed))
    assert example['label'] == source[seed % 5]['label']
    copies = [x.tobytes() for x in example['clip'].reshape(-1, 16, 16, 3)]
    assert copies[::K] == copies[1::K]
    frames = [known.index(x) for x in copies[::K]]
    assert frames == sorted(frames)
    (video,) = {i // 24 for i in frames}
    assert example['video'] == video
    seen.add(video)
  assert seen == {0, 1, 2, 3}
  assert {k: np.shape(x) for k, x in example.items()} == {
    k: x.shape[1:] for k, x in objective.batch_shapes(8).items()
  }


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'objective.videos': ''}, 'objective.videos is empty. Name a folder'),
    ({'objective.shots': 1}, 'objective.shots is 1'),
    ({'objective.length': 1}, 'objective.length is 1; it must be at least'),
    ({'objective.temperature': 0.0}, 'objective.temperature is 0.0'),
    ({'model.name': 'deit'}, "objective.name=video needs 'vit'"),
  ],
)
def test_what_cannot_work_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    CheckedConfig(test_every.config_of('video', **changes))


def test_videos_that_are_not_there_or_too_short_are_refused(tmp_path):
  def open_with(**changes):
    test_every.experiment_of('video', **changes).objective.train_transform()

  with pytest.raises(ValueError, match=r'has 24 frames; objective.shots=9'):
    open_with(**{'objective.shots': 9, 'objective.frames': 3})
  for name, count in (('a', 5), ('b', 3)):
    (tmp_path / name).mkdir()
    for i in range(count):
      Image.new('RGB', (16, 16)).save(tmp_path / name / f'{i}.png')
  with pytest.raises(ValueError, match=r'/b/0.png has 3 frames; .* need 4'):
    open_with(**{'objective.videos': str(tmp_path)})
  (tmp_path / 'b/3.png').write_bytes((tmp_path / 'b/2.png').read_bytes())
  open_with(**{'objective.videos': str(tmp_path)})
  with pytest.raises(ValueError, match='/none has no folders'):
    open_with(**{'objective.videos': str(tmp_path / 'none')})


def test_a_shot_may_go_over_no_more_frames_than_it_has():
  fields = {'shots': 2, 'frames': 3, 'length': 3, 'group': 2}
  CheckedConfig(
    test_every.config_of(
      'video', **{f'objective.{k}': x for k, x in fields.items()}
    )
  )
