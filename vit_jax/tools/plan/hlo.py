"""Reads the cost of a compiled TPU program from its HLO text.

libtpu's compiler annotates scheduled operations with an estimate of their cost,
`estimated_cycles`. Operations in a loop count once per iteration. Collectives
lack the estimate, so this module counts their bytes. The schedule shows which
computation runs between the start and the end of a collective.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

_NAME = r'%?([\w.\-]+)'
_COMPUTATION = re.compile(rf'(ENTRY )?{_NAME} \(.*\{{\s*$')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**63 - 1  # stands for an operation without an estimate
_LOOP = re.compile(rf' while\(.*condition={_NAME}, body={_NAME}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
  r'(?:to_apply|calls|called_computations|true_computation|'
  r'branch_computations)=\{?%?([\w.\-]+)'
)
_ASYNC = re.compile(
  r' = (\(?.*?) (all-gather|all-reduce|all-to-all|collective-permute|'
  r'reduce-scatter)(-start)?\('
)
# Matches an array's bits per element and its shape. A `pred` takes a byte.
_ARRAY = re.compile(r'\b(?:pred|(?:[sufc]|bf)(\d+))\[([\d,]*)\]')
_GROUPS = re.compile(r'replica_groups=\[(\d+),(\d+)\]')
_GROUP = re.compile(r'replica_groups=\{\{([\d,]*)\}')
# Matches a mesh and some of its axes. A group may use a part of an axis:
# 'data':(2)4 is a part of size 4. The order of the devices may stand between
# the mesh and the axes.
_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\][^{]* \{([^}]*)\}')
_CHANNEL = re.compile(r' channel_id=(\d+)')
_DONE = re.compile(rf'-done\({_NAME}')
_UPDATE = re.compile(rf' async-update\({_NAME}')
_SOURCE = re.compile(r'op_name="([^"]*)"')
# Matches the exchange of arrays between slices: a pair of `send` and `recv`
# with the same name. Both lines list the slices, as in {1,2}, and the transfer
# type.
_BETWEEN = re.compile(
  r' (send|recv)\(.*_xla_host_transfer_rendezvous="([^"]*)".*'
  r'_xla_megascale_target="\{([^}]*)\}.*_xla_megascale_transfer_type="(\w+)"'
)


class Collective(NamedTuple):
  """Communication between devices, or between slices over their network."""

  kind: str  # name of the operation in HLO, such as 'all-reduce'
  devices: int  # devices in each group, or slices if `between_slices`
  bytes: int  # size of the whole array that is communicated
  between_slices: bool = False

  def sent_bytes(self) -> float:
    """Returns the minimal number of bytes that each device sends.

    In a ring of n devices, each sends (n - 1) / n of the array. An all-reduce
    sends twice as much: a reduce-scatter and an all-gather. A permutation sends
    the whole array.
    """
    share = (self.devices - 1) / self.devices
    if self.kind == 'all-reduce':
      share *= 2
    elif self.kind == 'collective-permute':
      share = 1.0
    return share * self.bytes


class Compute(NamedTuple):
  """Computation of a core."""

  cycles: int  # estimated; 0 if there is no estimate
  source: str  # the operation of the model that it belongs to
  is_known: bool = True  # whether there is an estimate


class Start(NamedTuple):
  """The start of a collective, which the `Done` of the same name waits for."""

  name: str
  collective: Collective


class Done(NamedTuple):
  """The wait for the end of a collective, or of a copy (without a `Start`)."""

  name: str


Event = Compute | Start | Done


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """The scheduled events of a core, with loops unrolled."""

  events: tuple[Event, ...]

  @functools.cached_property
  def cycles(self) -> Mapping[str, int]:
    """The cycles of one core, by operation of the model."""
    cycles: collections.Counter[str] = collections.Counter()
    for event in self.events:
      if isinstance(event, Compute):
        cycles[event.source] += event.cycles
    return cycles

  @functools.cached_property
  def collectives(self) -> tuple[Collective, ...]:
    """All collectives, in the order of the program."""
    return tuple(x.collective for x in self.events if isinstance(x, Start))

  @property
  def total_cycles(self) -> int:
    return sum(self.cycles.values())

  @property
  def unknown(self) -> tuple[str, ...]:
    """The sources of the computations without an estimate."""
    computations = (x for x in self.events if isinstance(x, Compute))
    return tuple(x.source for x in computations if not x.is_known)

  def seconds(
    self, clock_hz: float, sent_s: Callable[[Collective], float]
  ) -> float:
    """Returns the run time if collectives overlap with computation.

    The links of a slice run one collective at a time, in order, and so does the
    network between slices. `sent_s` returns the seconds that a collective
    takes. Collectives are assumed not to slow down computation.
    """
    now = 0.0
    free = {False: 0.0, True: 0.0}  # when links and network become free
    ends: dict[str, float] = {}
    for event in self.events:
      match event:
        case Compute():
          now += event.cycles / clock_hz
        case Start():
          found = event.collective
          end = max(now, free[found.between_slices]) + sent_s(found)
          free[found.between_slices] = ends[event.name] = end
        case Done():
          now = max(now, ends.get(event.name, now))
    return max(now, *free.values())


def read(text: str) -> CompiledProgram:
  """Reads the HLO text of a program; raises ValueError if it is not for TPU."""
  computations, entry = _computations(text)
  program = CompiledProgram(tuple(_events(computations, entry)))
  if not program.cycles:
    raise ValueError(
      'The text lacks estimated_cycles. Give the text of a program compiled '
      'for TPU.'
    )
  return program


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of each computation, and the entry computation's name."""
  computations: dict[str, list[str]] = {'': []}
  entry, lines = '', None
  for line in text.splitlines():
    if not line.startswith(' '):
      match = _COMPUTATION.match(line)
      lines = computations.setdefault(match[2], []) if match else None
      if match and match[1]:
        entry = match[2]
    elif lines is not None:
      lines.append(line)
  return computations, entry


def _events(
  computations: Mapping[str, list[str]], computation: str
) -> Iterator[Event]:
  """Yields the events of a computation."""
  # On SparseCores, a collective starts without its array. A later update
  # provides the array.
  unsent: dict[str, list[Start]] = {}
  started: dict[str, str] = {}  # maps an update or recv to its start
  for line in computations[computation]:
    if match := _CYCLES.search(line):
      cycles = int(match[1])
      is_known = cycles != _UNKNOWN
      yield Compute(cycles * is_known, _source(line), is_known)
    called = _CALLED.search(line)
    inner = called[1] if called else ''
    if match := _LOOP.search(line):
      condition, body = match.groups()
      trips = _trips(line, computations[condition])
      yield from trips * tuple(_events(computations, body))
    elif found := _collective(line):
      yield Start(_name(line), found)
      if '-start(' not in line:
        yield Done(_name(line))
    elif match := _BETWEEN.search(line):
      operation, name, *_ = match.groups()
      if operation == 'send':
        yield Start(name, _exchange(line, match))
      else:
        started[_name(line)] = name
    elif match := _DONE.search(line):
      yield Done(started.get(match[1], match[1]))
    elif ' fusion(' in line:
      yield from _fused(computations.get(inner, []), inner)
    elif match := _UPDATE.search(line):
      name = started[_name(line)] = started.get(match[1], match[1])
      for start in unsent.pop(name, ()):
        yield Start(name, start.collective)
    elif called and '-start(' in line:
      for event in _events(computations, inner):
        if isinstance(event, Start) and ' async-start()' in line:
          unsent.setdefault(_name(line), []).append(event)
        elif isinstance(event, Start):
          yield Start(_name(line), event.collective)
        elif not isinstance(event, Done):
          yield event
    elif called and ' custom-call(' in line:
      # The custom call runs on another core, so its cycles do not count.
      for event in _events(computations, inner):
        if isinstance(event, Start | Done):
          yield event
    elif called and (' call(' in line or ' conditional(' in line):
      # Only one branch of a conditional runs. Count the first.
      yield from _events(computations, inner)


def _fused(lines: list[str], computation: str) -> Iterator[Start | Done]:
  """Yields the collectives that a fusion starts or waits for.

  libtpu writes a reduce-scatter as a fusion of an all-reduce and a slice. A
  gather that overlaps with several fusions appears in each of them, with the
  same channel. The first fusion starts the gather, and the last one waits for
  it.
  """
  is_scatter = computation.startswith('all-reduce-scatter')
  is_start, is_end = (
    any(f'"AsyncCollective{end}"' in line for line in lines)
    for end in ('Start', 'Done')
  )
  if not (is_scatter or is_start or is_end):
    return
  for line in lines:
    if found := _collective(line):
      if is_scatter:
        found = found._replace(kind='reduce-scatter')
      channel = _CHANNEL.search(line)
      name = f'channel {channel[1]}' if channel else _name(line)
      if not is_end:
        yield Start(name, found)
      if not is_start:
        yield Done(name)


def _name(line: str) -> str:
  """Returns the name of the value that a line computes."""
  return line.partition(' = ')[0].split()[-1].removeprefix('%')


def _trips(loop: str, condition: list[str]) -> int:
  """Returns the number of iterations of a loop."""
  if match := _TRIPS.search(loop):
    return int(match[1])
  # `jax.lax.scan` counts from 0 to a constant, which is in the condition.
  limits = re.findall(r' constant\((\d+)\)', '\n'.join(condition))
  return max(map(int, limits), default=1)


def _source(line: str) -> str:
  """Returns the operation of the model from which a line was compiled."""
  match = _SOURCE.search(line)
  if not match:
    return 'added by the compiler'
  # Remove the names of enclosing jitted functions.
  return re.sub(r'^(jit\([^)]*\)/)+', '', match[1])


def _exchange(line: str, match: re.Match[str]) -> Collective:
  _, _, target, transfer = match.groups()
  first, *last = map(int, re.split('[,:]', target))
  slices = last[-1] - first + 1 if last else 1
  kind = transfer.lower().replace('_', '-')
  shapes, _, _ = line.partition(' = (')[2].partition(', u32[]')
  size = sum(_sizes(shapes)) * (slices if kind == 'all-gather' else 1)
  return Collective(kind, slices, size, between_slices=True)


def _sizes(shapes: str) -> list[int]:
  """Returns the bytes of each array in a type such as '(f32[8,4], u32[])'."""
  return [
    int(bits or 8) * math.prod(map(int, filter(None, dims.split(',')))) // 8
    for bits, dims in _ARRAY.findall(shapes)
  ]


def _collective(line: str) -> Collective | None:
  match = _ASYNC.search(line)
  if not match:
    return None
  shapes, kind, started = match.groups()
  devices, size = _devices(line), sum(_sizes(shapes))
  # The result of an async gather or permutation is a tuple that also contains
  # the operands.
  if started and kind == 'all-gather':
    size = size * devices // (devices + 1)
  elif started and kind == 'collective-permute':
    # On TPUs, the tuple also has contexts of type u32[].
    size = (size - 4 * shapes.count('u32[]')) // 2
  elif kind == 'reduce-scatter':
    size *= devices
  return Collective(kind, devices, size)


def _devices(line: str) -> int:
  if match := _GROUPS.search(line):
    return int(match[2])
  if match := _GROUP.search(line):
    return len(match[1].split(','))
  if match := _MESH.search(line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  return 2  # a collective-permute sends between pairs of devices
