"""Accuracy after hiding the pixels that an attention map rates highest."""

import collections
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import ROOT, XLA_FLAGS_GIVEN
from vit_jax.checkpoints import opening
from vit_jax.data import sources
from vit_jax.visualize import draw
from vit_jax.visualize.attention_maps import Layers
from vit_jax.visualize.rollout import rollout

SHARE = 0.3


def hidden_accuracy(checkpoint, source):
  """Returns the accuracy without `SHARE` of the pixels, by how they are chosen.

  The deletion check of Petsiuk et al. (1806.07421). Hidden pixels take the mean
  colour. Random maps have a value for each patch, or for each pixel.
  """
  transform = checkpoint.images.eval_transform()
  examples = [transform(source[i]) for i in range(len(source))]
  images_BHWC = np.stack([np.asarray(x['image']) for x in examples])
  labels_B = np.array([x['label'] for x in examples])
  layers = Layers(
    checkpoint.model,
    checkpoint.on_device,
    checkpoint.normalize(jnp.asarray(images_BHWC)),
  )
  whole_Bhw = np.asarray(rollout(layers))
  seen_B = layers.logits_BC.argmax(-1)
  rng = np.random.default_rng(0)
  maps = {
    'highest': whole_Bhw,
    'lowest': -whole_Bhw,
    'class': np.asarray(rollout(layers, class_B=seen_B)),
    'patches': rng.random(whole_Bhw.shape),
    'pixels': rng.random(images_BHWC.shape[:3]),
  }
  mean = np.array(checkpoint.preprocessing.mean)
  gray_C = np.round(255 * mean).astype(np.uint8)
  found = {}
  for kind, maps_Bhw in maps.items():
    pixels_BHWC = images_BHWC.copy()
    for image_HWC, map_hw in zip(pixels_BHWC, maps_Bhw, strict=True):
      map_HW = draw.enlarge(map_hw, image_HWC.shape[:2])
      image_HWC[draw.highest(map_HW, SHARE)] = gray_C
    right_B = checkpoint.logits(pixels_BHWC).argmax(-1) == labels_B
    found[kind] = 100 * float(np.mean(right_B))
  return found


@pytest.mark.slow
def test_a_trained_model_misses_what_its_maps_point_at(tmp_path):
  """Digits: what is hidden at random leaves more to recognise them by.

  The mean of three models: of one, rounding moves these shares by ten points.
  """
  subprocess.run(
    [
      *(sys.executable, '-m', 'vit_jax.main', f'--workdir={tmp_path}'),
      '--config=configs/digits.py',
      '--config.model.width=48',
      '--config.model.depth=2',
      '--config.model.mlp_dim=96',
      '--config.model.heads=3',
      '--config.total=15 epochs',
      '--config.eval_every=100%',
      '--sweep=seed=0,1,2',
    ],
    cwd=ROOT,
    env=os.environ | {'XLA_FLAGS': XLA_FLAGS_GIVEN},
    check=True,
  )
  share = collections.Counter()
  for seed in range(3):
    found = hidden_accuracy(
      opening.open_checkpoint(f'{tmp_path}/runs/seed={seed}'),
      sources.open_source('digits', 'test'),
    )
    for kind, accuracy in found.items():
      share[kind] += accuracy / 3
  print(dict(share))
  # Two standard deviations of a difference of two shares of 360 are 7.
  for of_rollout in ('highest', 'class'):
    for at_random in ('patches', 'pixels'):
      assert share[of_rollout] < share[at_random] - 3
    assert share[of_rollout] < share['lowest'] - 10
