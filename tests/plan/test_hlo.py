"""Costs of a program written by hand, in the way that libtpu writes them."""

import pytest

from tests.conftest import ROOT
from vit_jax.plan import hlo

TEXT = (ROOT / 'tests/plan/step.hlo').read_text()


def test_loops_count_as_often_as_they_run():
  program = hlo.read(TEXT)
  assert program.cycles == {
    'added by the compiler': 1000,
    'jvp(ViT)/dot': 20 + 3 * 100,
    'jvp(ViT)/deep': 3 * 5 * 7,
  }
  assert program.total_cycles == 1425


def test_collectives_and_what_each_device_sends():
  gather, scatter, reduce = hlo.read(TEXT).collectives
  size = 8 * 128 * 4
  assert gather == hlo.Collective('all-gather', 2, size, 1)
  assert gather.sent_bytes() == size / 2
  assert scatter == hlo.Collective('reduce-scatter', 4, size, 1)
  assert scatter.sent_bytes() == size * 3 / 4
  assert reduce == hlo.Collective('all-reduce', 4, 8 * 128 * 2 + 3 * 2, 3)
  assert reduce.sent_bytes() == 3 * 2 * 3 / 4 * (8 * 128 * 2 + 3 * 2)


@pytest.mark.parametrize(
  ('operation', 'size'),
  [
    ('(f32[4,128], f32[8,128]) all-gather-start(%c)', 8 * 128 * 4),
    ('f32[8,128] all-reduce-start(%c)', 8 * 128 * 4),
    ('(f32[8,128], bf16[6]) all-reduce-start(%c, %d)', 8 * 128 * 4 + 12),
    ('(f32[8,128], f32[8,128]) collective-permute-start(%c)', 8 * 128 * 4),
  ],
)
def test_what_is_started_is_counted_once(operation, size):
  """By the shapes of these operations in XLA's shape inference."""
  old = 'f32[8,128]{1,0:T(8,128)} all-gather(%c)'
  assert old in TEXT
  found = hlo.read(TEXT.replace(old, operation)).collectives[0]
  assert (found.bytes, found.count) == (size, 1)


def test_a_reduce_scatter_as_libtpu_writes_it():
  computation = (
    '%all-reduce-scatter.1 (i: f32[8,128]) -> f32[2,128] {\n'
    '  %i = f32[8,128]{1,0:T(8,128)} parameter(0)\n'
    '  %r.1 = f32[8,128]{1,0:T(8,128)} all-reduce(%i), '
    'replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add\n'
    '  ROOT %l = f32[2,128]{1,0:T(8,128)} dynamic-slice(%r.1, %n)\n'
    '}\n\n'
  )
  old = 'f32[2,128]{1,0:T(8,128)} reduce-scatter(%c), channel_id=3, '
  assert old in TEXT
  fusion = (
    'f32[2,128]{1,0:T(8,128)} fusion(%c), kind=kCustom, '
    'calls=%all-reduce-scatter.1, '
  )
  text = TEXT.replace(old, fusion).replace('ENTRY', computation + 'ENTRY')
  assert hlo.read(text).collectives == hlo.read(TEXT).collectives


@pytest.mark.parametrize(
  ('groups', 'devices'),
  [
    ('[2,16]<=[32]', 16),
    ('{{0,1},{2,3}}', 2),
    ("mesh['a'=4,'b'=8] {'b'}", 8),
    ("mesh['a'=4,'b'=8] {'a','b'}", 32),
    ("mesh['a'=4,'b'=8] {'b':(2)4}", 4),
    ("mesh['a'=4,'b'=8], device_ids=([8,4]T(1,0)) {'b'}", 8),
  ],
)
def test_groups_of_devices(groups, devices):
  old = 'replica_groups=[4,2]<=[8]'
  assert old in TEXT
  program = hlo.read(TEXT.replace(old, f'replica_groups={groups}'))
  assert program.collectives[0].devices == devices


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'no ENTRY'),
    (TEXT.replace('estimated_cycles', 'cycles'), 'not one for TPU'),
  ],
)
def test_other_text_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    hlo.read(text)
