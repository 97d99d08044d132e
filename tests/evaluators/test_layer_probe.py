"""What is said and drawn of probes on every layer."""

import pytest

from vit_jax.evaluators import layer_probe
from vit_jax.evaluators.fewshot_curves import ProbeResult
from vit_jax.training import plots


def probes(count):
  """Results of so many blocks and the head, the last block the best."""
  names = [*(f'block_{i}' for i in range(count)), 'pre_logits']
  return {
    name: ProbeResult(2.0, 0.9 - 0.01 * abs(i + 1 - count))
    for i, name in enumerate(names)
  }


def test_the_table_and_the_file_have_every_layer_and_the_best():
  found = probes(2)
  assert layer_probe.table(found).splitlines() == [
    'block_0      89.00%',
    'block_1      90.00%  best',
    'pre_logits   89.00%',
  ]
  assert layer_probe.csv_text(found) == (
    'layer,l2,accuracy\nblock_0,2.0,0.89\nblock_1,2.0,0.9\npre_logits,2.0,0.89\n'
  )


@pytest.mark.parametrize(
  ('count', 'ticks'),
  [
    (2, ['0', '1', 'out']),
    (18, [*map(str, range(18)), 'out']),
    (24, [str(i) if i % 2 == 0 else '' for i in range(24)] + ['out']),
  ],
)
def test_the_picture_has_as_many_ticks_as_there_is_room_for(
  count, ticks, monkeypatch
):
  drawn = []
  monkeypatch.setattr(plots, 'png', drawn.append)
  found = probes(count)
  layer_probe.plot(found, 'a title')
  (axes,) = drawn[0].axes
  (line,) = axes.get_lines()
  assert [*line.get_xdata()] == [*axes.get_xticks()] == [*range(count + 1)]
  assert [*line.get_ydata()] == [x.accuracy for x in found.values()]
  assert [x.get_text() for x in axes.get_xticklabels()] == ticks
