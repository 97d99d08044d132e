"""The web page and the HTTP API, as an ASGI application."""

import asyncio
import contextlib
import json
import math
import pathlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vit_jax.tools.serve import protection
from vit_jax.tools.serve.decoder import UnreadableUpload
from vit_jax.tools.serve.engine import Engine, Sights, busy
from vit_jax.tools.serve.served_model import Answer, ServedModel, rollout

MAX_BODY_BYTES = 20 << 20
MAX_BODIES_BYTES = 64 << 20  # of all requests at once

_FOLDER = pathlib.Path(__file__).parent
DESCRIPTION = json.loads((_FOLDER / 'openapi.json').read_text())
_PREDICT = DESCRIPTION['paths']['/api/predict']['post']

# Status and message of the responses to expected errors besides HTTPException.
# If the message is empty, the response has the error's own message.
_ERRORS: dict[type[Exception], tuple[int, str]] = {
  UnreadableUpload: (422, ''),
  ClientDisconnect: (400, 'The image ended too early. Send it again.'),
  TimeoutError: (408, 'The image did not arrive in time. Send a smaller one.'),
  OSError: (503, ''),  # the decoder cannot be started
}

Endpoint = Callable[[Request], Awaitable[Response]]


class PageServer:
  """The routes of the page and the API."""

  def __init__(self, engine: Engine, token: str, hosts: tuple[str, ...] | None):
    """Takes the token for /api/, or '', and the hosts of `check_origin`."""
    self._engine = engine
    self._token = token
    self._hosts = hosts
    self._arriving_bytes = 0

  def app(self) -> ASGIApp:
    """Returns the application, which never reads the disk."""
    models = [
      model.about
      | {'explains_classes': bool(self._engine.explain and model.grid)}
      for model in self._engine.models.values()
    ]
    page = (_FOLDER / 'page.html').read_text()
    policy = {'Content-Security-Policy': protection.content_policy(page)}
    routes: list[tuple[str, str, Endpoint | Response]] = [
      ('/', 'GET', HTMLResponse(page, headers=policy)),
      ('/healthz', 'GET', JSONResponse({'status': 'ok'})),
      ('/openapi.json', 'GET', JSONResponse(DESCRIPTION)),
      ('/api/models', 'GET', JSONResponse({'models': models})),
      ('/api/predict', 'POST', self._predict),
    ]
    app = Starlette(
      routes=[
        Route(path, self._guarded(endpoint), methods=[method])
        for path, method, endpoint in routes
      ],
      exception_handlers=dict.fromkeys([HTTPException, *_ERRORS], self._error),
    )
    # A redirect would lead to the host in the header Host, which may be wrong.
    app.router.redirect_slashes = False
    return protection.lingering(app)

  def _guarded(self, endpoint: Endpoint | Response) -> Endpoint:
    """Returns an endpoint that checks requests before it responds."""

    async def guarded(request: Request) -> Response:
      protection.check_origin(request, self._hosts)
      # `request.url` would depend on the header Host.
      if request.scope['path'].startswith('/api/'):
        protection.check_token(request, self._token)
      if isinstance(endpoint, Response):
        return endpoint
      return await endpoint(request)

    return guarded

  async def _error(self, request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
      status, message, headers = error.status_code, error.detail, error.headers
      if 'endpoint' not in request.scope:
        message += '. See /openapi.json.'
    else:
      known = (x for kind, x in _ERRORS.items() if isinstance(error, kind))
      status, message = next(known)
      message = message or str(error)
      headers = {'Retry-After': '60'} if status == 503 else None
    return JSONResponse({'error': message}, status, headers=headers)

  async def _predict(self, request: Request) -> Response:
    query = parse(request.query_params, self._engine)
    if digest := query['image']:
      known = self._engine.images.get(digest)
      if known is None:
        raise HTTPException(
          404, f'The image {digest} is not cached. Send it again.'
        )
      with self._engine.place():
        return await self._answered(query, digest, known, 0.0)
    self._engine.refuse_if_full()  # before the image arrives
    async with self._body(request) as body:
      with self._engine.place():
        start = time.perf_counter()
        future = self._engine.add(body)
        digest, sights = await asyncio.wrap_future(future)
        decode_seconds = time.perf_counter() - start
        return await self._answered(query, digest, sights, decode_seconds)

  @contextlib.asynccontextmanager
  async def _body(self, request: Request) -> AsyncIterator[bytearray]:
    """Yields the body of a request; counts it towards `MAX_BODIES_BYTES`."""
    too_large = HTTPException(
      413,
      f'The image exceeds {MAX_BODY_BYTES >> 20} MiB. Send a smaller one.',
    )
    if int(request.headers.get('content-length', '0')) > MAX_BODY_BYTES:
      raise too_large
    body = bytearray()
    try:
      async with asyncio.timeout(protection.BODY_SECONDS):
        async for chunk in request.stream():
          body += chunk
          self._arriving_bytes += len(chunk)
          if len(body) > MAX_BODY_BYTES:
            raise too_large
          if self._arriving_bytes > MAX_BODIES_BYTES:
            raise busy('Too many images arrive at once')
      yield body
    finally:
      self._arriving_bytes -= len(body)

  async def _answered(
    self,
    query: dict[str, Any],
    digest: str,
    sights: Sights,
    decode_seconds: float,
  ) -> Response:
    model = self._engine.models[query['model']]
    seen = sights[model.view]
    future = self._engine.answer(digest, seen, query['model'])
    answer: Answer = await asyncio.wrap_future(future)
    start = time.perf_counter()
    found = None
    if model.grid and query['map'] == '1':
      if query['class'] is not None:
        job = self._engine.explained(
          seen, *(query[x] for x in ('model', 'class', 'fusion', 'discard'))
        )
        map_hw = await asyncio.wrap_future(job)
      else:
        assert answer.read_L is not None
        map_hw = await asyncio.to_thread(
          rollout,
          answer.fused[query['fusion']],
          answer.read_L,
          model.grid,
          query['discard'],
          query['layer'],
        )
      found = {
        'values': np.round(map_hw.astype(float), 6).tolist(),
        **{x: query[x] for x in ('fusion', 'discard', 'layer', 'class')},
      }
    return JSONResponse(
      {
        'model': query['model'],
        'image': digest,
        'box': seen.box,
        'classes': []
        if model.finds_objects
        else _likeliest(answer.probability_C, model, query['top']),
        'objects': _objects(answer, model, query['threshold']),
        'map': found,
        'seconds': {
          'decode': round(decode_seconds, 4),
          'model': round(answer.seconds, 4),
          'map': round(time.perf_counter() - start, 4),
        },
      }
    )


def parse(given: Mapping[str, str], engine: Engine) -> dict[str, Any]:
  """Returns the values of all parameters of /api/predict.

  A missing or empty parameter gets its default, or None without a default.
  Raises HTTPException if a parameter is unknown, a value is outside of
  openapi.json's or the model's limits, `class` and `layer` are both given, or
  the server cannot compute the map of a class.
  """
  given = {name: text for name, text in given.items() if text}
  schemas = {x['name']: dict(x['schema']) for x in _PREDICT['parameters']}
  for name, text in given.items():
    if name not in schemas:
      raise _invalid(name, text, f'the parameters are {", ".join(schemas)}')
  names = list(engine.models)
  schemas['model'] = {'enum': names, 'default': names[0]}
  model = engine.models[_value(given, 'model', schemas['model'])]
  classes = len(model.class_names)
  schemas['top'] |= {'maximum': classes, 'default': min(5, classes)}
  schemas['layer'] |= {'maximum': model.layers - 1}
  schemas['class'] |= {'maximum': classes - 1}
  query = {name: _value(given, name, x) for name, x in schemas.items()}
  if query['class'] is not None and not (engine.explain and model.grid):
    raise HTTPException(
      400,
      'The map of a class needs gradients and attention maps, which this '
      'server cannot compute for this model. Leave out class, or run python -m '
      'vit_jax.serve with a ViT where JAX is installed.',
    )
  if query['class'] is not None and query['layer'] is not None:
    raise HTTPException(
      400, 'The map of a class always uses all layers. Leave out layer.'
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
      way_out = f'leave out {name}, which this model does not support'
  else:
    try:
      value = float(text)
    except ValueError:
      value = math.nan
    valid, way_out = 0 <= value < 1, 'use a number from 0 to below 1'
  if not valid:
    raise _invalid(name, text, way_out)
  return value


def _invalid(name: str, text: str, way_out: str) -> HTTPException:
  return HTTPException(400, f'{name:.40}={text:.80} is invalid: {way_out}.')


def _likeliest(
  probability_C: np.ndarray, model: ServedModel, top: int
) -> list[dict[str, Any]]:
  """Returns the `top` likeliest classes, the likeliest first."""
  order = np.argsort(-probability_C, kind='stable')[:top]
  return [
    {
      'index': int(c),
      'name': model.class_names[c],
      'probability': float(probability_C[c]),
    }
    for c in order
  ]


def _objects(
  answer: Answer, model: ServedModel, threshold: float
) -> list[dict[str, Any]] | None:
  """Returns the likely objects, the likeliest first; None for classifiers."""
  if answer.boxes_Q4 is None:
    return None
  found = []
  order_Q = np.argsort(-answer.probability_C.max(1), kind='stable')
  for q in order_Q:
    (likeliest,) = _likeliest(answer.probability_C[q], model, 1)
    if likeliest['probability'] >= threshold:
      box = [round(float(x), 5) for x in answer.boxes_Q4[q]]
      found.append(likeliest | {'box': box})
  return found
