"""Few-shot of another framework's checkpoint is that of its own features."""

import csv

import numpy as np
import pytest

from vit_jax.checkpoints import opening
from vit_jax.cli.fewshot import main
from vit_jax.data import sources
from vit_jax.evaluators.shots import Shots

DINOV2 = {
  'hidden_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 3,
  'image_size': 16,
  'patch_size': 4,
}


@pytest.mark.slow
def test_dinov2_of_transformers(tmp_path, transformers, torch):
  """Random, with registers, as it comes and as it is read here."""
  torch.manual_seed(0)
  config = transformers.Dinov2WithRegistersConfig(
    **DINOV2, num_register_tokens=3
  )
  model = transformers.Dinov2WithRegistersModel(config).eval()
  with torch.no_grad():
    for x in model.parameters():
      x += 0.1 * torch.randn(x.shape)
  model.save_pretrained(tmp_path / 'x')

  status = main(
    [
      *(str(tmp_path / 'x'), 'digits', '--shots=1,5', '--seeds=2'),
      f'--output={tmp_path}/out',
    ]
  )
  assert status == 0
  with (tmp_path / 'out/fewshot.csv').open() as f:
    rows = list(csv.DictReader(f))

  train, test = (sources.open_source('digits', x) for x in ('train', 'test'))
  shots = Shots(
    train.labels(),
    test.labels(),
    train.class_names,
    shots=(1, 5),
    seeds=2,
    l2='choose',
  )
  checkpoint = opening.open_checkpoint(str(tmp_path / 'x'))
  transform, p = checkpoint.transform(), checkpoint.preprocessing

  def theirs(source, rows):
    images = np.stack([transform(source[i])['image'] for i in rows])
    pixels = ((images / 255 - p.mean) / p.std).astype(np.float32)
    with torch.inference_mode():
      images_BCHW = torch.from_numpy(pixels.transpose(0, 3, 1, 2)).contiguous()
      return model(pixel_values=images_BCHW).pooler_output.numpy()

  want = shots.evaluate(
    theirs(train, shots.rows_R), theirs(test, range(len(test)))
  )
  got = {(int(r['shots']), int(r['seed'])): float(r['accuracy']) for r in rows}
  # The last bits of features may decide about an image in a tie.
  assert got == pytest.approx(
    {(x.shots, x.seed): x.accuracy for x in want}, abs=1.5 / 360
  )
  assert np.mean([x.accuracy for x in want if x.shots == 5]) > 0.25
