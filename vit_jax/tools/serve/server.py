"""The page and the API as an application for any ASGI server."""

import asyncio
import contextlib
import functools
import pathlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vit_jax.tools.serve import openapi, protection
from vit_jax.tools.serve.engine import MAX_WAITING, Busy, Engine, Sights
from vit_jax.tools.serve.protection import Refusal
from vit_jax.tools.serve.queries import Query, parse
from vit_jax.tools.serve.served_model import Answer, ServedModel, rollout
from vit_jax.tools.serve.uploads import UnreadableUpload

PAGE = pathlib.Path(__file__).with_name('page.html')

Endpoint = Callable[[Request], Awaitable[Response]]


class PageServer:
  """The routes, and what they count."""

  def __init__(self, engine: Engine, token: str, hosts: tuple[str, ...] | None):
    """Reads the page, the last that is read of the disk.

    Args:
      engine: that answers.
      token: that all but the page, /healthz and /openapi.json, which say
        nothing of the models, asks for; '' for none.
      hosts: see `protection.check_origin`.
    """
    self._engine = engine
    self._token = token
    self._hosts = hosts
    self._bodies = protection.Bodies()
    self._counts: Counter[tuple[str, int]] = Counter()
    self._page = PAGE.read_text()
    self._policy = protection.content_policy(self._page)
    self._description = openapi.describe()

  def app(self) -> Starlette:
    """Returns the application."""
    routes: list[tuple[str, str, Callable[[Request], Any], bool]] = [
      ('/', 'GET', self._show_page, False),
      ('/healthz', 'GET', self._health, False),
      ('/openapi.json', 'GET', self._openapi, False),
      ('/api/models', 'GET', self._models, True),
      ('/api/predict', 'POST', self._predict, True),
      ('/metrics', 'GET', self._metrics, True),
    ]
    return Starlette(
      routes=[
        Route(path, self._guarded(path, endpoint, secret), methods=[method])
        for path, method, endpoint, secret in routes
      ],
      exception_handlers={HTTPException: self._no_route},
      lifespan=self._lifespan,
    )

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
    yield
    self._engine.close()

  def _guarded(self, path: str, endpoint: Endpoint, secret: bool) -> Endpoint:
    """Returns an endpoint behind what every request passes."""

    @functools.wraps(endpoint)
    async def guarded(request: Request) -> Response:
      try:
        protection.check_origin(request, self._hosts)
        if secret:
          protection.check_token(request, self._token)
        response = await endpoint(request)
      except Refusal as e:
        response = _error(e.status, e.message, e.headers)
      except Busy as e:
        response = _error(
          503,
          f'All {MAX_WAITING} places are taken: ask again in {e.seconds} s.',
          {'Retry-After': str(e.seconds)},
        )
      except UnreadableUpload as e:
        response = _error(422, str(e))
      except OSError as e:  # no process to decode
        response = _error(503, str(e), {'Retry-After': '60'})
      return self._counted(path, response)

    return guarded

  async def _no_route(self, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
      f'There is nothing of the kind: {error.detail}. See /openapi.json.'
    )
    response = _error(error.status_code, message, error.headers)
    return self._counted('other', response)

  def _counted(self, path: str, response: Response) -> Response:
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
    return JSONResponse(self._description)

  async def _models(self, request: Request) -> Response:
    engine = self._engine
    models = [
      model.about | {'explains_classes': bool(engine.explain and model.grid)}
      for model in engine.models.values()
    ]
    return JSONResponse({'models': models})

  async def _predict(self, request: Request) -> Response:
    query = parse(request.query_params, self._engine)
    if query.image:
      known = self._engine.known(query.image)
      if known is None:
        raise Refusal(
          404, f'The image {query.image} is not remembered: send it again.'
        )
      with self._engine.place():
        return await self._answered(query, query.image, known, 0.0)
    self._engine.refuse_if_full()  # before it is read
    async with self._bodies.held(request) as body:
      with self._engine.place():
        start = time.perf_counter()
        digest, sights = await asyncio.to_thread(self._engine.add, body)
        decode_seconds = time.perf_counter() - start
        return await self._answered(query, digest, sights, decode_seconds)

  async def _answered(
    self, query: Query, digest: str, sights: Sights, decode_seconds: float
  ) -> Response:
    model = self._engine.models[query.model]
    seen = sights[model.view]
    future = self._engine.answer(digest, seen, query.model)
    answer: Answer = await asyncio.wrap_future(future)
    start = time.perf_counter()
    found = None
    if model.grid and query.with_map:
      if query.number is not None:
        job = self._engine.explained(
          seen, query.model, query.number, query.fusion, query.discard
        )
        map_hw = await asyncio.wrap_future(job)
      else:
        assert answer.read_L is not None
        map_hw = await asyncio.to_thread(
          rollout,
          answer.fused[query.fusion],
          answer.read_L,
          model.grid,
          query.discard,
          query.layer,
        )
      found = {
        'values': np.round(map_hw.astype(float), 6).tolist(),
        'fusion': query.fusion,
        'discard': query.discard,
        'layer': query.layer,
        'class': query.number,
      }
    return JSONResponse(
      {
        'model': query.model,
        'image': digest,
        'box': seen.box,
        'classes': []
        if model.finds_objects
        else _likeliest(answer.probability_C, model, query.top),
        'objects': _objects(answer, model, query.threshold),
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
    for what in ('images', 'batches', 'seconds'):
      lines.append(f'# TYPE vit_model_{what}_total counter')
      for name in engine.models:
        total = engine.counts[what, name]
        labels = f'model="{_escaped(name)}"'
        lines.append(f'vit_model_{what}_total{{{labels}}} {total}')
    gauges = {
      'waiting': engine.waiting,
      'waiting_most': MAX_WAITING,
      'remembered_bytes': engine.remembered_bytes,
      'arriving_bytes': self._bodies.held_bytes,
    }
    for name, value in gauges.items():
      lines += [f'# TYPE vit_{name} gauge', f'vit_{name} {value}']
    return Response(
      '\n'.join(lines) + '\n', media_type='text/plain; version=0.0.4'
    )


def _error(
  status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
  return JSONResponse({'error': message}, status, headers=headers)


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
  """Returns what DETR finds, the likeliest first; None for other models."""
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
