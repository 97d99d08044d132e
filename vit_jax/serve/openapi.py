"""The API as OpenAPI describes it."""

from typing import Any

from vit_jax.serve.protection import MAX_BODY_BYTES
from vit_jax.serve.queries import THRESHOLD
from vit_jax.serve.served_model import FUSIONS
from vit_jax.serve.uploads import FORMATS, MAX_PIXELS

_ERRORS = {
  '400': 'A parameter is not possible.',
  '401': 'The token is missing or wrong.',
  '403': 'Another host or site asks.',
  '404': 'The image is not remembered: send it again.',
  '408': 'The image arrives too slowly.',
  '413': f'The image has more than {MAX_BODY_BYTES >> 20} MiB.',
  '422': f'It is no image, damaged, or has more than {MAX_PIXELS:,} pixels.',
  '503': 'The queue is full, or nothing can be decoded: ask again after '
  'Retry-After seconds.',
}


def describe() -> dict[str, Any]:
  """Returns the description, for JSON."""
  number, integer = {'type': 'number'}, {'type': 'integer'}
  text, anything = {'type': 'string'}, {'type': 'object'}
  parameters = [
    _parameter('model', text, 'of /api/models; default: the first'),
    _parameter('image', text, 'digest of one sent before, instead of a body'),
    _parameter('top', integer | {'minimum': 1, 'default': 5}, 'classes'),
    _parameter(
      'threshold',
      number | {'minimum': 0, 'exclusiveMaximum': 1, 'default': THRESHOLD},
      'least probability of an object, where a model finds objects',
    ),
    _parameter('map', {'enum': ['0', '1'], 'default': '1'}, 'whether with map'),
    _parameter(
      'fusion', text | {'enum': list(FUSIONS), 'default': 'mean'}, 'of heads'
    ),
    _parameter(
      'discard',
      number | {'minimum': 0, 'exclusiveMaximum': 1, 'default': 0},
      'share of the lowest weights of each layer',
    ),
    _parameter('layer', integer | {'minimum': 0}, 'the only one; default: all'),
    _parameter('class', integer | {'minimum': 0}, 'index of one to explain'),
  ]
  errors = {
    status: _response(what, {'error': text}) for status, what in _ERRORS.items()
  }
  named = {'index': integer, 'name': text, 'probability': number}
  answer = {
    'model': text,
    'image': text | {'description': 'SHA-256 of its bytes'},
    'box': _many(number)
    | {'description': 'part that is seen: top, left, height, width as shares'},
    'classes': _many(anything | {'properties': named}),
    'objects': {'type': ['array', 'null']}
    | {'items': anything | {'properties': named | {'box': _many(number)}}}
    | {'description': 'with boxes x0, y0, x1, y1 as shares; empty classes'},
    'map': {'type': ['object', 'null']}
    | {'properties': {'values': _many(_many(number))}},
    'seconds': anything
    | {'properties': {'decode': number, 'model': number, 'map': number}},
  }
  predict = {
    'summary': 'The likeliest classes of an image, or objects, and a map.',
    'parameters': parameters,
    'requestBody': {
      'description': f'One of {", ".join(FORMATS)}; empty with `image`.',
      'content': {'application/octet-stream': {}},
    },
    'responses': {'200': _response('The answer.', answer)} | errors,
  }
  return {
    'openapi': '3.1.0',
    'info': {'title': 'Vision Transformers', 'version': '1'},
    'components': {
      'securitySchemes': {'token': {'type': 'http', 'scheme': 'bearer'}}
    },
    'security': [{}, {'token': []}],
    'paths': {
      '/api/predict': {'post': predict},
      '/api/models': {
        'get': _get('The models.', {'models': _many(anything)}),
      },
      '/healthz': {'get': _get('Whether it runs.', {'status': text})},
      '/metrics': {
        'get': {
          'summary': 'Counters for Prometheus.',
          'responses': {
            '200': {'description': 'Text.', 'content': {'text/plain': {}}}
          },
        }
      },
    },
  }


def _parameter(name: str, schema: dict[str, Any], what: str) -> dict[str, Any]:
  return {'name': name, 'in': 'query', 'schema': schema, 'description': what}


def _many(schema: dict[str, Any]) -> dict[str, Any]:
  return {'type': 'array', 'items': schema}


def _response(what: str, properties: dict[str, Any]) -> dict[str, Any]:
  schema = {'type': 'object', 'properties': properties}
  return {
    'description': what,
    'content': {'application/json': {'schema': schema}},
  }


def _get(what: str, properties: dict[str, Any]) -> dict[str, Any]:
  return {'summary': what, 'responses': {'200': _response(what, properties)}}
