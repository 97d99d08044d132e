"""What is asked of an image, from the query of a request."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.tools.serve.engine import Engine
from vit_jax.tools.serve.openapi import PARAMETERS, THRESHOLD
from vit_jax.tools.serve.protection import Refusal
from vit_jax.tools.serve.served_model import FUSIONS


class Query(NamedTuple):
  """What is asked.

  Attributes:
    model: its name.
    image: the digest of one that was sent before; '' if it comes along.
    top: how many classes.
    threshold: the least probability of an object that is told of.
    with_map: whether there is to be a map.
    fusion: of the heads.
    discard: share of each layer's weights.
    layer: the only one to look at, from 0; None for all.
    number: of the class to explain; None for what the image passes on.
  """

  model: str
  image: str
  top: int
  threshold: float
  with_map: bool
  fusion: str
  discard: float
  layer: int | None
  number: int | None


def parse(given: Mapping[str, str], engine: Engine) -> Query:
  """Returns what a request's parameters ask for.

  Raises:
    Refusal: naming the parameter, its value and the way out.
  """
  for name in given:
    known = name in PARAMETERS
    _check(known, name, given[name], f'use {", ".join(PARAMETERS)}')
  names = list(engine.models)
  name = given.get('model', names[0])
  _check(name in names, 'model', name, f'use {", ".join(names)}')
  model = engine.models[name]
  image = given.get('image', '')
  _check(
    bool(re.fullmatch('([0-9a-f]{64})?', image)),
    'image',
    image,
    'use what an earlier answer says',
  )
  fusion = given.get('fusion', 'mean')
  _check(fusion in FUSIONS, 'fusion', fusion, f'use {", ".join(FUSIONS)}')
  wanted = given.get('map', '1')
  _check(wanted in ('0', '1'), 'map', wanted, 'use 0 or 1')
  query = Query(
    model=name,
    image=image,
    top=_integer(given, 'top', 1, len(model.class_names))
    or min(5, len(model.class_names)),
    threshold=_share(given, 'threshold', THRESHOLD),
    with_map=wanted == '1',
    fusion=fusion,
    discard=_share(given, 'discard', 0.0),
    layer=_integer(given, 'layer', 0, model.layers - 1),
    number=_integer(given, 'class', 0, len(model.class_names) - 1),
  )
  if query.number is not None:
    if not (engine.explain and model.grid):
      raise Refusal(
        400,
        'A map for a class takes gradients, which are not served here: leave '
        'class out, or run python -m vit_jax.serve where JAX is installed.',
      )
    if query.layer is not None:
      raise Refusal(
        400, 'A map for a class is one of all layers: leave out layer.'
      )
  return query


def _share(given: Mapping[str, str], name: str, otherwise: float) -> float:
  text = given.get(name, str(otherwise))
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  _check(0 <= value < 1, name, text, 'use a number from 0 to below 1')
  return value


def _integer(
  given: Mapping[str, str], name: str, low: int, high: int
) -> int | None:
  text = given.get(name, '')
  if not text:
    return None
  valid = bool(re.fullmatch('[0-9]{1,6}', text)) and low <= int(text) <= high
  way_out = f'use a number from {low} to {high}'
  if high < low:
    way_out = 'leave it out, the model has none'
  _check(valid, name, text, way_out)
  return int(text)


def _check(valid: bool, name: str, value: str, way_out: str) -> None:
  if not valid:
    raise Refusal(400, f'{name:.40}={value:.80} is not possible: {way_out}.')
