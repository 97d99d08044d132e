"""The benchmark of few-shot fits."""

import re

from vit_jax.bench import output, solving


def test_seconds_and_their_ratio(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(solving, '_ROUNDS', 2)
  files = output.Output(str(tmp_path / 'a.csv'), str(tmp_path / 'a.png'))
  solving.bench_fewshot(files, classes=4, width=16, shots=(1, 5), seeds=2)
  out = capsys.readouterr().out
  assert '4 classes, 16 features, shots 1, 5, 2 seeds, 31 penalties' in out
  for name in ('ours', 'numpy.linalg.solve'):
    assert re.search(rf'^  {name} +[\d.]+  \([\d.]+ to [\d.]+\)$', out, re.M)
  assert re.search(r'^numpy.linalg.solve / ours: [\d.]+$', out, re.M)
  assert (tmp_path / 'a.csv').read_text().startswith('contender,seconds,')
  assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG')
