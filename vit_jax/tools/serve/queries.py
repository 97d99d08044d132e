"""The parameters of /api/predict, checked by the schemas of openapi.json."""

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from vit_jax.tools.serve.engine import Engine

DESCRIPTION = json.loads(
  pathlib.Path(__file__).with_name('openapi.json').read_text()
)
_PARAMETERS = DESCRIPTION['paths']['/api/predict']['post']['parameters']


def parse(given: Mapping[str, str], engine: Engine) -> dict[str, Any]:
  """Returns the values of all parameters; without a default None.

  An empty parameter counts as left out.

  Raises:
    HTTPException: naming the parameter, its value and the way out.
  """
  given = {name: text for name, text in given.items() if text}
  schemas = {x['name']: x['schema'] for x in _PARAMETERS}
  for name, text in given.items():
    if name not in schemas:
      raise _impossible(name, text, f'use {", ".join(schemas)}')
  names = list(engine.models)
  schemas['model'] = {'enum': names, 'default': names[0]}
  model = engine.models[_value(given, 'model', schemas['model'])]
  classes = len(model.class_names)
  for name, limits in {
    'top': {'maximum': classes, 'default': min(5, classes)},
    'layer': {'maximum': model.layers - 1},
    'class': {'maximum': classes - 1},
  }.items():
    schemas[name] = schemas[name] | limits
  query = {name: _value(given, name, x) for name, x in schemas.items()}
  if query['class'] is not None and not (engine.explain and model.grid):
    raise HTTPException(
      400,
      'A map for a class takes gradients, which are not served here: leave '
      'class out, or run python -m vit_jax.serve where JAX is installed.',
    )
  if query['class'] is not None and query['layer'] is not None:
    raise HTTPException(
      400, 'A map for a class is one of all layers: leave out layer.'
    )
  return query


def _value(given: Mapping[str, str], name: str, schema: dict[str, Any]) -> Any:
  """Returns the value of a parameter, or its default."""
  if (text := given.get(name)) is None:
    return schema.get('default')
  value: Any = text
  if options := schema.get('enum'):
    valid, way_out = text in options, f'use {", ".join(options)}'
  elif schema['type'] == 'string':
    valid = bool(re.fullmatch(schema['pattern'], text))
    way_out = 'use the digest of an earlier answer'
  elif schema['type'] == 'integer':
    value = int(text) if re.fullmatch('[0-9]{1,6}', text) else -1
    low, high = schema['minimum'], schema['maximum']
    valid, way_out = low <= value <= high, f'use a number from {low} to {high}'
    if high < low:
      way_out = 'leave it out, the model has none'
  else:
    try:
      value = float(text)
    except ValueError:
      value = math.nan
    valid, way_out = 0 <= value < 1, 'use a number from 0 to below 1'
  if not valid:
    raise _impossible(name, text, way_out)
  return value


def _impossible(name: str, text: str, way_out: str) -> HTTPException:
  return HTTPException(
    400, f'{name:.40}={text:.80} is not possible: {way_out}.'
  )
