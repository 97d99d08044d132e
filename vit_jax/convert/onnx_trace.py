"""Translates a JAX program, traced with a symbolic batch size, to ONNX nodes.

Results that depend only on parameters and lack a batch axis become constants.
The operations of a known function, such as LayerNorm, become one node or a few.

The package jax2onnx 0.13 cannot replace this module: it fails for ResNets and
gives wrong numbers for hybrids.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.core import Literal

from vit_jax.convert.onnx_graph import Graph, Tensor, Value, is_static
from vit_jax.convert.onnx_operations import ELEMENTWISE, OPERATIONS


@dataclasses.dataclass(frozen=True)
class Pattern:
  """A function that becomes one ONNX node or a few.

  Attributes:
    function: function of x and further arguments of shape [C], where C is the
      size of x's last axis.
    arguments: number of arguments after x.
    emit: function of a graph, x and the arguments. It adds nodes to the graph
      and returns their result.
    fits: whether the pattern supports a shape of x.
  """

  function: Callable[..., jax.Array]
  arguments: int
  emit: Callable[..., Value]
  fits: Callable[[tuple[Any, ...]], bool] = lambda shape: True


def trace(
  function: Callable[..., dict[str, jax.Array]],
  params: Any,
  inputs: Mapping[str, tuple[tuple[int, ...], Any]],
  patterns: Sequence[Pattern],
) -> tuple[Graph, dict[str, Value]]:
  """Returns a graph with the nodes of a function, and its outputs by name.

  The function takes `params`, a tree of NumPy arrays, and the inputs. `inputs`
  maps each name to a shape without the batch axis, and a dtype.

  Raises NotImplementedError if an operation is not supported; the message is a
  noun phrase that names it.
  """
  (batch,) = export.symbolic_shape('batch')
  given = [
    Tensor(name, (batch, *shape), np.dtype(dtype))
    for name, (shape, dtype) in inputs.items()
  ]
  traced, outputs = jax.make_jaxpr(function, return_shape=True)(
    params, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)
  )
  graph = Graph(given)
  known = [np.asarray(x) for x in jax.tree.leaves(params)]
  values = _Reader(graph, patterns).run(
    traced.jaxpr, traced.consts, [*known, *given]
  )
  return graph, dict(zip(sorted(outputs), values, strict=True))


class _Reader:
  def __init__(self, graph: Graph, patterns: Sequence[Pattern]):
    self._graph = graph
    self._patterns = patterns
    self._traced = functools.cache(_traced)

  def run(
    self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value]
  ) -> list[Value]:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values: list[Value] = [*map(np.asarray, consts), *inputs]
    env = dict(zip(variables, values, strict=True))

    def read(atom: Any) -> Value:
      if isinstance(atom, Literal):
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)
      return env[atom]

    i = 0
    while i < len(jaxpr.eqns):
      eqn = jaxpr.eqns[i]
      self._graph.scope = str(eqn.source_info.name_stack)
      found = self._find(jaxpr, i)
      if found is not None:
        pattern, length, atoms, out = found
        env[out] = pattern.emit(self._graph, *map(read, atoms))
        i += length
        continue
      results = self._apply(eqn, [read(atom) for atom in eqn.invars])
      env |= zip(eqn.outvars, results, strict=True)
      i += 1
    return [
      self._graph.expand(read(atom), atom.aval.shape) for atom in jaxpr.outvars
    ]

  def _apply(self, eqn: Any, inputs: list[Value]) -> list[Value]:
    name, params = eqn.primitive.name, eqn.params
    if name in ('jit', 'custom_jvp_call', 'custom_vjp_call'):
      inner = params.get('jaxpr') or params['call_jaxpr']
      return self.run(inner.jaxpr, inner.consts, inputs)
    if name in ('stop_gradient', 'copy', 'name'):
      return inputs
    out = eqn.outvars[0].aval
    if name == 'broadcast_in_dim':
      # Axes keep size 1 as long as possible, because ONNX broadcasts them.
      shape = [1] * len(out.shape)
      for axis, size in zip(
        params['broadcast_dimensions'], inputs[0].shape, strict=True
      ):
        shape[axis] = size
      return [self._graph.reshape(inputs[0], shape)]
    shapes = [atom.aval.shape for atom in eqn.invars]
    arrays = [x for x in inputs if isinstance(x, np.ndarray)]
    fixed = all(map(is_static, [*shapes, out.shape]))
    if len(arrays) == len(inputs) and fixed:
      arrays = list(map(np.broadcast_to, arrays, shapes))
      return [np.asarray(eqn.primitive.bind(*arrays, **params))]
    if name in ELEMENTWISE:
      op = ELEMENTWISE[name]
      return [self._graph.elementwise(op, *inputs, dtype=out.dtype)]
    if name not in OPERATIONS:
      raise NotImplementedError(f'the operation {name}')
    repeated = map(self._graph.expand, inputs, shapes)
    return [OPERATIONS[name](self._graph, out, params, *repeated)]

  def _find(
    self, jaxpr: Any, start: int
  ) -> tuple[Pattern, int, list[Any], Any] | None:
    """Finds a pattern that matches the operations that begin at `start`.

    Returns the pattern, the number of operations, their inputs and output.
    """
    first = jaxpr.eqns[start]
    x = next((a for a in first.invars if not isinstance(a, Literal)), None)
    if x is None or x.aval.dtype.kind != 'f' or not x.aval.shape:
      return None
    for pattern in self._patterns:
      if not pattern.fits(x.aval.shape):
        continue
      wanted = self._traced(pattern, tuple(x.aval.shape), x.aval.dtype)
      if wanted.eqns[0].primitive != first.primitive:
        continue
      length = len(wanted.eqns)
      found = _part(jaxpr, start, length)
      # In printed programs, variables are named by their order. Therefore equal
      # operations give equal text.
      if str(found) == str(_part(wanted, 0, length)):
        order = [_inputs(wanted.eqns).index(v) for v in wanted.invars]
        atoms = [found.invars[n] for n in order]
        return pattern, length, atoms, found.outvars[0]
    return None


def _traced(pattern: Pattern, shape: tuple[Any, ...], dtype: Any) -> Any:
  """Returns the operations of a pattern, for the shape and dtype of x."""
  more = [
    jax.ShapeDtypeStruct(shape[-1:], np.float32)
    for _ in range(pattern.arguments)
  ]
  x = jax.ShapeDtypeStruct(shape, dtype)
  return jax.make_jaxpr(pattern.function)(x, *more).jaxpr


def _part(jaxpr: Any, start: int, length: int) -> Any:
  """Returns `length` operations that begin at `start`, as a program."""
  eqns = jaxpr.eqns[start : start + length]
  return jaxpr.replace(
    constvars=[],
    invars=_inputs(eqns),
    outvars=eqns[-1].outvars,
    eqns=eqns,
    debug_info=jaxpr.debug_info.with_unknown_names(),
  )


def _inputs(eqns: Sequence[Any]) -> list[Any]:
  """Returns the variables that operations read but do not compute, in order."""
  made = {v for eqn in eqns for v in eqn.outvars}
  taken = (a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal))
  return [v for v in dict.fromkeys(taken) if v not in made]
