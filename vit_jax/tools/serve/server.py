"""The page and the API as an application for any ASGI server."""

import asyncio
import contextlib
import functools
import pathlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vit_jax.tools.serve import protection
from vit_jax.tools.serve.engine import MAX_WAITING, Engine, Sights
from vit_jax.tools.serve.queries import DESCRIPTION, parse
from vit_jax.tools.serve.served_model import Answer, ServedModel, rollout
from vit_jax.tools.serve.uploads import UnreadableUpload

MAX_BODY_BYTES = 20 << 20
MAX_BODIES_BYTES = 64 << 20  # of all requests at once

_PAGE = pathlib.Path(__file__).with_name('page.html')

# Errors that are not HTTPExceptions: status, and message if it is not theirs.
_ERRORS: dict[type[Exception], tuple[int, str]] = {
  UnreadableUpload: (422, ''),
  ClientDisconnect: (400, 'The image ended too early.'),
  TimeoutError: (408, 'The image did not arrive in time.'),
  OSError: (503, ''),  # the decoder cannot be started
}

Endpoint = Callable[[Request], Awaitable[Response]]


class PageServer:
  """The routes, and counters of their answers."""

  def __init__(self, engine: Engine, token: str, hosts: tuple[str, ...] | None):
    """Reads the page; afterwards nothing is read from the disk.

    Args:
      engine: answers about images.
      token: needed for every route that tells something of the models; ''
        for none.
      hosts: see `protection.check_origin`.
    """
    self._engine = engine
    self._token = token
    self._hosts = hosts
    self._arriving_bytes = 0
    self._counts: Counter[tuple[str, int]] = Counter()
    self._page = _PAGE.read_text()
    self._policy = protection.content_policy(self._page)

  def app(self) -> ASGIApp:
    """Returns the application."""
    routes: list[tuple[str, str, Endpoint, bool]] = [
      ('/', 'GET', self._show_page, False),
      ('/healthz', 'GET', self._health, False),
      ('/openapi.json', 'GET', self._openapi, False),
      ('/api/models', 'GET', self._models, True),
      ('/api/predict', 'POST', self._predict, True),
      ('/metrics', 'GET', self._metrics, True),
    ]
    app = Starlette(
      routes=[
        Route(path, self._guarded(endpoint, secret), methods=[method])
        for path, method, endpoint, secret in routes
      ],
      exception_handlers=dict.fromkeys([HTTPException, *_ERRORS], self._error),
    )
    # It would redirect to whatever host a request names.
    app.router.redirect_slashes = False
    return protection.lingering(app)

  def _guarded(self, endpoint: Endpoint, secret: bool) -> Endpoint:
    """Returns an endpoint behind the checks of every request."""

    @functools.wraps(endpoint)
    async def guarded(request: Request) -> Response:
      protection.check_origin(request, self._hosts)
      if secret:
        protection.check_token(request, self._token)
      return self._counted(request, await endpoint(request))

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
    response = JSONResponse({'error': message}, status, headers=headers)
    return self._counted(request, response)

  def _counted(self, request: Request, response: Response) -> Response:
    path = request.scope['path'] if 'endpoint' in request.scope else 'other'
    self._counts[path, response.status_code] += 1
    for name, value in protection.HEADERS.items():
      response.headers[name] = value
    response.headers.setdefault(
      'Content-Security-Policy', "default-src 'none'; frame-ancestors 'none'"
    )
    return response

  async def _show_page(self, request: Request) -> Response:
    return HTMLResponse(
      self._page, headers={'Content-Security-Policy': self._policy}
    )

  async def _health(self, request: Request) -> Response:
    return JSONResponse({'status': 'ok'})

  async def _openapi(self, request: Request) -> Response:
    return JSONResponse(DESCRIPTION)

  async def _models(self, request: Request) -> Response:
    engine = self._engine
    models = [
      model.about | {'explains_classes': bool(engine.explain and model.grid)}
      for model in engine.models.values()
    ]
    return JSONResponse({'models': models})

  async def _predict(self, request: Request) -> Response:
    query = parse(request.query_params, self._engine)
    if digest := query['image']:
      known = self._engine.known(digest)
      if known is None:
        raise HTTPException(
          404, f'The image {digest} is not remembered: send it again.'
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
    """Reads a body, which counts towards the limit of all while it is used."""
    too_large = HTTPException(
      413, f'Images have at most {MAX_BODY_BYTES >> 20} MiB: send a smaller.'
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
            raise HTTPException(
              503, 'Too many images arrive at once.', {'Retry-After': '5'}
            )
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

  async def _metrics(self, request: Request) -> Response:
    engine = self._engine
    lines = ['# TYPE vit_requests_total counter']
    for (path, status), count in sorted(self._counts.items()):
      labels = f'path="{path}",status="{status}"'
      lines.append(f'vit_requests_total{{{labels}}} {count}')
    for what in ('images', 'seconds'):
      lines.append(f'# TYPE vit_model_{what}_total counter')
      for name in engine.models:
        total = engine.counts[what, name]
        labels = f'model="{_escaped(name)}"'
        lines.append(f'vit_model_{what}_total{{{labels}}} {total}')
    gauges = {
      'waiting': engine.waiting,
      'waiting_most': MAX_WAITING,
      'remembered_bytes': engine.remembered_bytes,
      'arriving_bytes': self._arriving_bytes,
    }
    for name, value in gauges.items():
      lines += [f'# TYPE vit_{name} gauge', f'vit_{name} {value}']
    return Response(
      '\n'.join(lines) + '\n', media_type='text/plain; version=0.0.4'
    )


def _escaped(label: str) -> str:
  return label.replace('\\', r'\\').replace('"', r'\"').replace('\n', r'\n')


def _likeliest(
  probability_C: np.ndarray, model: ServedModel, top: int
) -> list[dict[str, Any]]:
  """Returns classes, the likeliest first."""
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
  """Returns DETR's objects, the likeliest first; None for other models."""
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
