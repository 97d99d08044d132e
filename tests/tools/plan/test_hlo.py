"""Costs of a program written by hand, in the way that libtpu writes them."""

import pytest

from tests.conftest import ROOT
from vit_jax.tools.plan import hlo

TEXT = (ROOT / 'tests/tools/plan/step.hlo').read_text()


def test_loops_count_as_often_as_they_run():
  program = hlo.read(TEXT)
  assert program.cycles == {
    'added by the compiler': 1000,
    'jvp(ViT)/dot': 20 + 3 * 100,
    'jvp(ViT)/deep': 3 * 5 * 7,
  }
  assert program.total_cycles == 1425


def test_collectives_with_their_devices_and_bytes():
  gather, scatter, *reductions = hlo.read(TEXT).collectives
  size = 8 * 128 * 4
  assert gather == hlo.Collective('all-gather', 2, size)
  assert scatter == hlo.Collective('reduce-scatter', 4, size)
  reduction = hlo.Collective('all-reduce', 4, 8 * 128 * 2 + 3 * 2)
  assert reductions == 3 * [reduction]


@pytest.mark.parametrize(
  ('operation', 'size'),
  [
    ('(f32[4,128], f32[8,128]) all-gather-start(%c)', 8 * 128 * 4),
    ('(f32[8,128], bf16[6]) all-reduce-start(%c, %d)', 8 * 128 * 4 + 12),
    (
      '(f32[8,128], f32[8,128], u32[]{:S(2)}, u32[]{:S(2)}) '
      'collective-permute-start(%c)',
      8 * 128 * 4,
    ),
  ],
)
def test_what_is_started_is_counted_once(operation, size):
  """By the shapes of these operations in XLA's shape inference."""
  old = 'f32[8,128]{1,0:T(8,128)} all-gather(%c)'
  assert old in TEXT
  found = hlo.read(TEXT.replace(old, operation)).collectives
  assert len(found) == 5 and found[0].bytes == size


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
    ("mesh['a'=4,'b'=8] {'a','b'}", 32),
    ("mesh['a'=4,'b'=8] {'b':(2)4}", 4),
    ("mesh['a'=4,'b'=8], device_ids=([8,4]T(1,0)) {'b'}", 8),
  ],
)
def test_groups_of_devices_as_axes_of_a_mesh(groups, devices):
  old = 'replica_groups=[4,2]<=[8]'
  assert old in TEXT
  program = hlo.read(TEXT.replace(old, f'replica_groups={groups}'))
  assert program.collectives[0].devices == devices


def test_an_operation_without_an_estimate_is_counted_but_takes_no_time():
  text = BETWEEN.replace('SLICES', '1:2').replace(
    '"estimated_cycles":"5"', f'"estimated_cycles":"{2**63 - 1}"'
  )
  program = hlo.read(text)
  assert program.total_cycles == 7
  assert len(program.unknown) == 1


@pytest.mark.edge
def test_text_without_a_program_for_tpu_is_refused():
  with pytest.raises(ValueError, match='lacks estimated_cycles'):
    hlo.read('')


SENT_S = 10.0  # of every collective below, at a clock of one cycle a second


def seconds(*events):
  program = hlo.CompiledProgram(events)
  return program.seconds(1.0, lambda collective: SENT_S)


def test_what_the_schedule_hides():
  gather = hlo.Collective('all-gather', 2, 64)
  start, done = hlo.Start('g', gather), hlo.Done('g')
  other, other_done = hlo.Start('h', gather), hlo.Done('h')
  work = hlo.Compute(4, 'a')
  assert seconds(work, start, done, work) == 4 + SENT_S + 4
  assert seconds(start, work, done) == SENT_S
  assert seconds(start, work, work, work, done) == 12
  # Two share the links: the second begins when the first has arrived.
  assert seconds(start, other, work, done, other_done) == 2 * SENT_S
  # What nobody waits for has to arrive, too.
  assert seconds(start, work) == SENT_S
  # Nor is anything waited for that is no collective, such as a copy.
  assert seconds(work, hlo.Done('copy'), work) == 8
  assert seconds(*3 * (start, work, done, work)) == 3 * (SENT_S + 4)


BETWEEN = """
ENTRY %main (p: bf16[6,8,128]) -> bf16[6,8,128] {
  %p = bf16[6,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %t = token[] after-all()
  %recv.2 = (bf16[6,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}, token[]) recv(%t), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{SLICES}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.2 = (bf16[6,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}, token[]) send(%p, %t), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{SLICES}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send-done.2 = token[] send-done(%send.2), channel_id=4
  %f = f32[8,128] fusion(%p), kind=kLoop, "estimated_cycles":"7"
  %recv-done.2 = (bf16[6,8,128]{2,1,0:T(8,128)(2,1)}, token[]) recv-done(%recv.2), channel_id=3
  ROOT %g = bf16[6,8,128] fusion(%p), kind=kLoop, "estimated_cycles":"5"
}
"""  # noqa: E501


@pytest.mark.parametrize(('slices', 'count'), [('1,2,3,4', 4), ('1:16', 16)])
def test_slices_sum_their_parts_of_the_gradients(slices, count):
  program = hlo.read(BETWEEN.replace('SLICES', slices))
  (found,) = program.collectives
  size = 6 * 8 * 128 * 2
  assert found == hlo.Collective('all-reduce', count, size, between_slices=True)
  assert found.sent_bytes() == 2 * (count - 1) / count * size
  # From the `send` on, beside the first 7 cycles.
  assert program.seconds(1.0, lambda _: 10.0) == 10 + 5


def test_links_and_network_do_not_wait_for_each_other():
  inside = hlo.Collective('all-gather', 2, 64)
  start, done = hlo.Start('g', inside), hlo.Done('g')
  between = hlo.Start('h', inside._replace(between_slices=True))
  assert seconds(start, between, done, hlo.Done('h')) == SENT_S


FUSED = """
%start.1 (x: f32[8,128]) -> (f32[8,128], f32[16,128]) {
  %g.1 = f32[16,128] all-gather(%x), channel_id=9, replica_groups=[4,2]<=[8]
  ROOT %y = (f32[8,128], f32[16,128]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%beside.1 (x: f32[8,128]) -> (f32[8,128], f32[16,128]) {
  %g.2 = f32[16,128] all-gather(%x), channel_id=9, replica_groups=[4,2]<=[8]
  ROOT %y = (f32[8,128], f32[16,128]) tuple(%x, %g.2)
}

%end.1 (x: f32[8,128]) -> f32[16,128] {
  %g.3 = f32[16,128] all-gather(%x), channel_id=9, replica_groups=[4,2]<=[8]
  ROOT %y = f32[16,128] custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: f32[8,128]) -> f32[16,128] {
  %p = f32[8,128] parameter(0)
  %async-collective-start = (f32[8,128], f32[16,128]) fusion(%p), kind=kCustom, calls=%start.1
  %f = (f32[8,128], f32[16,128]) fusion(%p), kind=kOutput, calls=%beside.1, backend_config={"estimated_cycles":"7"}
  ROOT %async-collective-done = f32[16,128] fusion(%f), kind=kCustom, calls=%end.1
}
"""  # noqa: E501

STARTED = """
%inside.1 (x: f32[8,128]) -> f32[16,128] {
  ROOT %g = f32[16,128] all-gather(%x), channel_id=9, replica_groups=[4,2]<=[8]
}

ENTRY %main (p: f32[8,128]) -> f32[16,128] {
  %p = f32[8,128] parameter(0)
  %s = ((f32[8,128]), f32[16,128]) OPERATION(%p)ATTRIBUTES
  %f = f32[8,128] fusion(%p), kind=kLoop, "estimated_cycles":"7"
  ROOT %d = f32[16,128] KIND-done(%s)
}
"""


@pytest.mark.parametrize(
  'text',
  [
    FUSED,
    STARTED.replace('OPERATION', 'all-gather-start')
    .replace('KIND', 'all-gather')
    .replace('ATTRIBUTES', ', replica_groups=[4,2]<=[8]'),
    STARTED.replace('OPERATION', 'async-start')
    .replace('KIND', 'async')
    .replace('ATTRIBUTES', ', calls=%inside.1'),
  ],
  ids=['fusions', 'start and done', 'async call'],
)
def test_a_gather_beside_other_work(text):
  program = hlo.read(text)
  assert program.collectives == (hlo.Collective('all-gather', 2, 16 * 512),)
  (start,) = (x for x in program.events if isinstance(x, hlo.Start))
  assert program.events[-1] == hlo.Done(start.name)
  for sent_s, whole_s in ((5, 7), (9, 9)):
    assert program.seconds(1.0, lambda _, s=sent_s: s) == whole_s


# As libtpu 0.0.51 writes it for TPU7x.
OFFLOADED = """
%sent (x: f32[8,128]) -> f32[16,128] {
  %c = f32[8,128] copy(%x), "estimated_cycles":"77777"
  ROOT %g = f32[16,128] all-gather(%c), channel_id=9, replica_groups=[4,2]<=[8]
}

%offloaded (x: f32[8,128]) -> f32[16,128] {
  ROOT %x = f32[16,128] custom-call(%x), called_computations={%sent}
}
"""


def test_what_sparse_cores_send_is_sent_from_its_update_on():
  """The cycles of sparse cores do not count as time of the main core."""
  updates = (
    ', calls=%offloaded\n'
    '  %before = f32[8,128] add(%p, %p), "estimated_cycles":"2"\n'
    '  %u = ((f32[8,128]), f32[16,128]) async-update(%s)\n'
    '  %v = ((f32[8,128]), f32[16,128]) async-update(%u)'
  )
  text = STARTED.replace('OPERATION(%p)', 'async-start()')
  text = text.replace('%s)', '%v)')
  text = text.replace('KIND', 'async').replace('ATTRIBUTES', updates)
  program = hlo.read(OFFLOADED + text)
  assert program.collectives == (hlo.Collective('all-gather', 2, 16 * 512),)
  assert program.total_cycles == 2 + 7
  assert program.seconds(1.0, lambda _: 9.0) == 2 + 9


def test_what_is_not_started_hides_nothing():
  """The step by hand: a gather, a scatter and, in a loop, a sum of 10 s."""
  program = hlo.read(TEXT)
  assert program.seconds(1.0, lambda _: SENT_S) == 1425 + 5 * SENT_S


def program(operation, *computations):
  """Returns the program of one operation, in a text around it."""
  entry = (
    'ENTRY %main (p: f32[8,128]) -> f32[8,128] {\n'
    '  %p = f32[8,128] parameter(0), "estimated_cycles":"3"\n'
    f'  ROOT %x = {operation}\n'
    '}\n'
  )
  return hlo.read('\n'.join([*computations, entry]))


BRANCHES = [
  f'%branch.{i} (b: f32[8]) -> f32[8] {{\n'
  f'  ROOT %r = f32[8] add(%b, %b), "estimated_cycles":"{10**i}"\n'
  '}\n'
  for i in (1, 2)
]


@pytest.mark.parametrize(
  ('operation', 'cycles'),
  [
    ('f32[8] conditional(%p), branch_computations={%branch.1, %branch.2}', 13),
    ('f32[8] call(%p), to_apply=%branch.2', 103),
    # A reduction's is gone through inside of its own cycles.
    ('f32[8] reduce(%p), to_apply=%branch.2', 3),
    # On another core.
    ('f32[8] custom-call(%p), called_computations={%branch.2}', 3),
    # What names no computation.
    ('(f32[8], f32[8], u32[]) copy-start(%p)', 3),
  ],
)
def test_of_what_is_called_the_first_counts(operation, cycles):
  assert program(operation, *BRANCHES).total_cycles == cycles


@pytest.mark.parametrize(
  ('shape', 'size'),
  [
    ('s4[10]', 5),
    ('c64[5]', 40),
    ('(f32[2], pred[3])', 11),
  ],
)
def test_bytes_of_arrays(shape, size):
  operation = f'{shape} all-reduce(%p), replica_groups={{{{0,1,2}}}}'
  (found,) = program(operation).collectives
  assert (found.bytes, found.devices) == (size, 3)


@pytest.mark.parametrize(
  ('kind', 'groups', 'devices', 'share'),
  [
    ('all-gather', '{{0,1,2,3}}', 4, 3 / 4),
    ('all-to-all', '{{0,1,2,3}}', 4, 3 / 4),
    ('reduce-scatter', '{{0,1,2,3}}', 4, 3 / 4 * 4),
    ('all-reduce', '{{0,1,2,3}}', 4, 2 * 3 / 4),
    ('all-reduce', '{{}}', 1, 0),
    ('collective-permute', '', 2, 1),
  ],
)
def test_what_each_kind_sends(kind, groups, devices, share):
  """Of what comes out, an array of 4,096 bytes: a scatter's is a part."""
  given = f', replica_groups={groups}' if groups else ', source_target_pairs={}'
  (found,) = program(f'f32[8,128] {kind}(%p){given}').collectives
  assert (found.kind, found.devices) == (kind, devices)
  assert found.sent_bytes() == share * 4096


def test_a_loop_without_a_limit_runs_once():
  computations = [
    BRANCHES[1],
    '%condition (c: f32[8]) -> pred[] {\n  ROOT %l = pred[] parameter(0)\n}\n',
  ]
  operation = 'f32[8] while(%p), condition=%condition, body=%branch.2'
  assert program(operation, *computations).total_cycles == 103


def test_what_is_computed_within_an_asynchronous_call_counts():
  """Its own cycles, and those of what runs beside what it sends."""
  inside = STARTED.replace('OPERATION', 'async-start').replace('KIND', 'async')
  text = inside.replace('ATTRIBUTES', ', calls=%inside.1').replace(
    '  ROOT %g = ',
    '  %e = f32[8] add(%x, %x), "estimated_cycles":"2"\n  ROOT %g = ',
  )
  found = hlo.read(text)
  assert found.total_cycles == 7 + 2
  assert found.seconds(1.0, lambda _: 20.0) == 2 + 20
