"""What a compiled TPU program will cost, read off its HLO text.

libtpu's compiler writes its own estimate, `estimated_cycles`, beside every
operation that it has scheduled. Operations in the body of a loop count as often
as the loop runs. Collectives have no such estimate; their bytes are counted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-permute',
  'reduce-scatter',
)

_NAME = r'%?([\w.\-]+)'
_COMPUTATION = re.compile(rf'(ENTRY )?{_NAME} \(.*\{{\s*$')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LOOP = re.compile(rf' while\(.*condition={_NAME}, body={_NAME}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
  r'(?:to_apply|calls|true_computation|false_computation|branch_computations)='
  r'\{?(%?[\w.\-]+(?:, %?[\w.\-]+)*)'
)
_ASYNC = re.compile(rf' = (\(?.*?) ({"|".join(COLLECTIVES)})(-start)?\(')
# Bits of an element, and the sizes; `pred` takes a byte.
_ARRAY = re.compile(r'\b(?:pred|(?:[sufc]|bf)(\d+))\[([\d,]*)\]')
_GROUPS = re.compile(r'replica_groups=\[(\d+),(\d+)\]')
_GROUP = re.compile(r'replica_groups=\{\{([\d,]*)\}')
# Axes of a mesh, or parts of them as in 'data':(2)4; between the mesh and the
# axes may stand in which order its devices lie.
_MESH = re.compile(r'replica_groups=mesh\[([^\]]*)\][^{]* \{([^}]*)\}')
# How libtpu writes a reduce-scatter: a fusion of an all-reduce and a slice.
_SCATTER = re.compile(r' calls=%?(all-reduce-scatter[\w.\-]*)')
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
  """Communication that a step does, perhaps many times.

  Attributes:
    kind: of `COLLECTIVES`.
    devices: that take part, in each of the groups.
    bytes: of the whole array, which a gather or a reduction is about.
    count: times in a step.
  """

  kind: str
  devices: int
  bytes: int
  count: int

  def sent_bytes(self) -> float:
    """Bytes that every device at least has to send, in all of its times.

    Rings reach the bound: each device passes on (n - 1) / n of the array, and
    twice that where it is summed and then gathered.
    """
    share = (self.devices - 1) / self.devices
    if self.kind == 'all-reduce':
      share *= 2
    elif self.kind == 'collective-permute':
      share = 1.0
    return share * self.bytes * self.count


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """The costs of a program.

  Attributes:
    cycles: of one core, by the operation of the model that asked for them.
    collectives: in the order of the program.
  """

  cycles: Mapping[str, int]
  collectives: tuple[Collective, ...]

  @property
  def total_cycles(self) -> int:
    return sum(self.cycles.values())


def read(text: str) -> CompiledProgram:
  """Reads the text of a compiled program, `Compiled.as_text()`.

  Raises:
    ValueError: if it is not that of a program for TPU.
  """
  computations, entry = _computations(text)
  if not entry:
    raise ValueError('This is no text of a compiled program: it has no ENTRY.')
  cycles: collections.Counter[str] = collections.Counter()
  collectives = []
  for line, times in _walk(computations, entry, 1):
    if match := _CYCLES.search(line):
      cycles[_source(line)] += times * int(match[1])
    if found := _collective(line, times):
      collectives.append(found)
    elif scatter := _SCATTER.search(line):
      collectives += [
        dataclasses.replace(found, kind='reduce-scatter')
        for inner in computations[scatter[1]]
        if (found := _collective(inner, times))
      ]
  if not cycles:
    raise ValueError('The program has no estimates: it is not one for TPU.')
  return CompiledProgram(cycles, tuple(collectives))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns the lines of every computation, and the name of the entry."""
  computations: dict[str, list[str]] = {}
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


def _walk(
  computations: Mapping[str, list[str]], name: str, times: int
) -> Iterator[tuple[str, int]]:
  """Yields every line that is run, and how often."""
  for line in computations[name]:
    yield line, times
    if match := _LOOP.search(line):
      condition, body = match.groups()
      trips = _trips(line, computations[condition])
      yield from _walk(computations, body, times * trips)
    elif ' call(' in line or ' conditional(' in line or '-start(' in line:
      # Of branches one is run; the first stands for all.
      if match := _CALLED.search(line):
        called = match[1].split(', ')[0].removeprefix('%')
        yield from _walk(computations, called, times)


def _trips(loop: str, condition: list[str]) -> int:
  """Returns how often a loop runs.

  Loops of `jax.lax.scan` count from 0 to a constant in their condition.
  """
  if match := _TRIPS.search(loop):
    return int(match[1])
  limits = re.findall(r' constant\((\d+)\)', '\n'.join(condition))
  return max(map(int, limits), default=1)


def _source(line: str) -> str:
  """Returns the operation of the model that a line comes from."""
  match = _SOURCE.search(line)
  if not match:
    return 'added by the compiler'
  # Without the functions that are traced around it.
  return re.sub(r'^(jit\([^)]*\)/)+', '', match[1])


def _collective(line: str, times: int) -> Collective | None:
  match = _ASYNC.search(line)
  if not match:
    return None
  shapes, kind, started = match.groups()
  sizes = [
    int(bits or 8) * math.prod(map(int, filter(None, dims.split(',')))) // 8
    for bits, dims in _ARRAY.findall(shapes)
  ]
  devices, size = _devices(line), sum(sizes)
  # A gather or permutation that is started has its operands in the tuple, too.
  if started and kind == 'all-gather':
    size = size * devices // (devices + 1)
  elif started and kind == 'collective-permute':
    size //= 2
  elif kind == 'reduce-scatter':
    size *= devices
  return Collective(kind, devices, size, times)


def _devices(line: str) -> int:
  if match := _GROUPS.search(line):
    return int(match[2])
  if match := _GROUP.search(line):
    return max(1, len(match[1].split(',')))
  if match := _MESH.search(line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  return 2  # of a permutation's pairs
