"""The rate of an input pipeline, on a clock of its own."""

import types

from vit_jax.bench import input as input_bench


def test_images_a_second_by_hand(monkeypatch):
  ticks, batches = iter([10.0, 14.0]), iter('abcdef')
  clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
  monkeypatch.setattr(input_bench, 'time', clock)
  monkeypatch.setattr(input_bench, '_BATCHES', 3)
  monkeypatch.setattr(input_bench, '_BATCH_SIZE', 8)
  assert input_bench._rate(batches) == 6
  assert next(batches) == 'd'
