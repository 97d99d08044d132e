"""The API as OpenAPI describes it."""

from typing import Any

from vit_jax.tools.serve.protection import MAX_BODY_BYTES
from vit_jax.tools.serve.served_model import FUSIONS
from vit_jax.tools.serve.uploads import FORMATS, MAX_PIXELS

# As of `predict`.
THRESHOLD = 0.7

_NUMBER, _INTEGER = {'type': 'number'}, {'type': 'integer'}
_TEXT, _ANYTHING = {'type': 'string'}, {'type': 'object'}

# By name, the schema of a parameter of /api/predict, and what it is.
PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
  'model': (_TEXT, 'of /api/models; default: the first'),
  'image': (_TEXT, 'digest of one sent before, instead of a body'),
  'top': (_INTEGER | {'minimum': 1, 'default': 5}, 'classes'),
  'threshold': (
    _NUMBER | {'minimum': 0, 'exclusiveMaximum': 1, 'default': THRESHOLD},
    'least probability of an object, where a model finds objects',
  ),
  'map': ({'enum': ['0', '1'], 'default': '1'}, 'whether with map'),
  'fusion': (_TEXT | {'enum': list(FUSIONS), 'default': 'mean'}, 'of heads'),
  'discard': (
    _NUMBER | {'minimum': 0, 'exclusiveMaximum': 1, 'default': 0},
    'share of the lowest weights of each layer',
  ),
  'layer': (_INTEGER | {'minimum': 0}, 'the only one; default: all'),
  'class': (_INTEGER | {'minimum': 0}, 'index of one to explain'),
}
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
  parameters = [
    {'name': name, 'in': 'query', 'schema': schema, 'description': what}
    for name, (schema, what) in PARAMETERS.items()
  ]
  errors = {
    status: _response(what, {'error': _TEXT})
    for status, what in _ERRORS.items()
  }
  named = {'index': _INTEGER, 'name': _TEXT, 'probability': _NUMBER}
  answer = {
    'model': _TEXT,
    'image': _TEXT | {'description': 'SHA-256 of its bytes'},
    'box': _many(_NUMBER)
    | {'description': 'part that is seen: top, left, height, width as shares'},
    'classes': _many(_ANYTHING | {'properties': named}),
    'objects': {'type': ['array', 'null']}
    | {'items': _ANYTHING | {'properties': named | {'box': _many(_NUMBER)}}}
    | {'description': 'with boxes x0, y0, x1, y1 as shares; empty classes'},
    'map': {'type': ['object', 'null']}
    | {'properties': {'values': _many(_many(_NUMBER))}},
    'seconds': _ANYTHING
    | {'properties': {'decode': _NUMBER, 'model': _NUMBER, 'map': _NUMBER}},
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
        'get': _get('The models.', {'models': _many(_ANYTHING)}),
      },
      '/healthz': {'get': _get('Whether it runs.', {'status': _TEXT})},
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
