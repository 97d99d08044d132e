"""Protects the server with headers, tokens, and limits of size and time."""

import asyncio
import base64
import hashlib
import hmac
import re
from typing import Any, cast

import h11
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
MAX_HEADER_BYTES = 16 << 10
HEADER_SECONDS = 10.0
BODY_SECONDS = 30.0
LOOPBACK = ('localhost', '127.0.0.1', '::1')

# Headers of every response, except to malformed HTTP.
HEADERS = {
  'Connection': 'close',
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Permissions-Policy': 'camera=(self), microphone=(), geolocation=()',
  'Referrer-Policy': 'no-referrer',
  'X-Content-Type-Options': 'nosniff',
  'Cache-Control': 'no-store',
}


def content_policy(page: str) -> str:
  """Returns the Content-Security-Policy of a page.

  It allows the page's script and style by their hashes, images from this server
  or made by the page, and requests to this server.
  """

  def hashed(tag: str) -> str:
    found = re.findall(f'<{tag}>(.*?)</{tag}>', page, re.DOTALL)
    return ' '.join(
      f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'"
      for x in found
    )

  return (
    f"default-src 'none'; script-src {hashed('script')}; "
    f"style-src {hashed('style')}; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
  )


def check_origin(request: Request, hosts: tuple[str, ...] | None) -> None:
  """Raises HTTPException for a wrong host name or request origin.

  Links pass, and so do requests without the header Sec-Fetch-Site. `hosts` are
  the accepted names, without ports; None accepts every name. Refusing other
  names protects against DNS rebinding: a foreign name that resolves to this
  machine.
  """
  host = request.headers.get('host', '').lower()
  name = re.sub(r':\d*$', '', host).strip('[]')
  if hosts is not None and name not in hosts:
    raise HTTPException(
      403, f'This server does not accept the host name {host!r:.100}.'
    )
  if request.headers.get('sec-fetch-site') in ('cross-site', 'same-site'):
    # Accept links, which navigate by GET. Forms may navigate by POST.
    mode = request.headers.get('sec-fetch-mode')
    if mode != 'navigate' or request.method != 'GET':
      raise HTTPException(
        403, 'This server does not accept requests from pages of other origins.'
      )


def check_token(request: Request, token: str) -> None:
  """Raises HTTPException if a token is set and a request does not have it."""
  scheme, _, text = request.headers.get('authorization', '').partition(' ')
  given = text.encode('latin-1')  # as Starlette decodes headers
  same = hmac.compare_digest(given, token.encode())
  if token and not (same and scheme.lower() == 'bearer'):
    raise HTTPException(
      401,
      'A token is needed. Send the header Authorization: Bearer TOKEN.',
      {'WWW-Authenticate': 'Bearer'},
    )


def lingering(app: ASGIApp) -> ASGIApp:
  """Delays the end of a response until the whole request has arrived.

  The end closes the connection, so a client that is still sending its image
  would see a broken connection instead of the response.
  """

  async def lingering_app(scope: Scope, receive: Receive, send: Send) -> None:
    arriving = True

    async def receive_part() -> Message:
      nonlocal arriving
      message = await receive()
      arriving = message.get('more_body', False)
      return message

    async def send_part(message: Message) -> None:
      if message['type'] == 'http.response.body' and arriving:
        await send({**message, 'more_body': True})
        while arriving:
          await receive_part()
        message = {'type': 'http.response.body'}
      await send(message)

    await app(scope, receive_part, send_part)

  return lingering_app


class ImpatientProtocol(H11Protocol):
  """HTTP with time limits for slow clients.

  A client has `HEADER_SECONDS` to send headers, `BODY_SECONDS` to send a body
  and `BODY_SECONDS` to read the response. Beyond `MAX_CONNECTIONS`, the oldest
  connection that does not wait for the model is closed, so idle clients cannot
  block others. Every response closes its connection.
  """

  _deadline: asyncio.TimerHandle | None = None
  _start = 0.0

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._start = self.loop.time()
    self._wait(HEADER_SECONDS)
    if len(self.connections) > MAX_CONNECTIONS:
      # Keep connections without a deadline: they wait for the model.
      every = cast(set[ImpatientProtocol], self.connections)
      waiting = [x for x in every if x._deadline]
      oldest = min(waiting, key=lambda x: x._start)
      self.connections.discard(oldest)
      oldest.transport.abort()

  def data_received(self, data: bytes) -> None:
    was_head = self.cycle is None
    super().data_received(data)
    if self.cycle and not self.cycle.more_body:
      # A response that began before the body ended may wait for the client.
      if not self.cycle.response_started:
        self._stop()
    elif self.cycle and was_head:
      # The application answers a late body with an error 5 s before this limit.
      self._wait(BODY_SECONDS + 5)

  def send_400_response(self, msg: str) -> None:
    """Responds to malformed HTTP, unless a response has started."""
    if self.cycle:
      self.cycle.disconnected = True
    if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
      super().send_400_response(msg)
    else:
      self.transport.abort()

  def pause_writing(self) -> None:
    super().pause_writing()
    self._wait(BODY_SECONDS)

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._wait(BODY_SECONDS)

  def connection_lost(self, exc: Exception | None) -> None:
    self._stop()
    super().connection_lost(exc)

  def _wait(self, seconds: float) -> None:
    self._stop()
    self._deadline = self.loop.call_later(seconds, self.transport.abort)

  def _stop(self) -> None:
    if self._deadline:
      self._deadline.cancel()
      self._deadline = None
