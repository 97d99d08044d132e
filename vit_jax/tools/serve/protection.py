"""What stands between the server and strangers."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
from collections.abc import AsyncIterator
from typing import Any

import h11
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 16 << 10
MAX_BODY_BYTES = 20 << 20
# Of all requests at once.
MAX_BODIES_BYTES = 64 << 20
HEADER_SECONDS = 10.0
BODY_SECONDS = 30.0
LOOPBACK = ('localhost', '127.0.0.1', '::1')

HEADERS = {
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Permissions-Policy': 'camera=(self), microphone=(), geolocation=()',
  'Referrer-Policy': 'no-referrer',
  'X-Content-Type-Options': 'nosniff',
  'Cache-Control': 'no-store',
}


class Refusal(Exception):
  """Ends a request with a status and a message."""

  def __init__(self, status: int, message: str, **headers: str):
    super().__init__(message)
    self.status = status
    self.message = message
    self.headers = headers


def content_policy(page: str) -> str:
  """Returns the Content-Security-Policy of a page and nothing but it.

  Its one script and style are allowed by their hashes, its images are its own.
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
  """Refuses what other sites make a browser ask.

  Args:
    request: from anywhere.
    hosts: by which the server is asked, without ports; None for any. Given,
      a name that somebody points at this machine is none of them.
  """
  host = request.headers.get('host', '').lower()
  name = re.sub(r':\d*$', '', host).strip('[]')
  if hosts is not None and name not in hosts:
    raise Refusal(403, f'The host {host!r:.100} is not served here.')
  if request.headers.get('sec-fetch-site') in ('cross-site', 'same-site'):
    if request.headers.get('sec-fetch-mode') != 'navigate':
      raise Refusal(403, 'Pages of other sites are not answered.')


def check_token(request: Request, token: str) -> None:
  """Refuses a request without `Authorization: Bearer TOKEN`, if there is one.

  The comparison takes as long for any wrong one.
  """
  # As which Starlette decodes headers.
  given = request.headers.get('authorization', '').encode('latin-1')
  if token and not hmac.compare_digest(given, f'Bearer {token}'.encode()):
    raise Refusal(
      401,
      'A token is needed, as the header Authorization: Bearer TOKEN.',
      **{'WWW-Authenticate': 'Bearer'},
    )


class Bodies:
  """Reads bodies of requests, within limits of size and time."""

  def __init__(self) -> None:
    """Holds none yet."""
    self.held_bytes = 0

  @contextlib.asynccontextmanager
  async def held(self, request: Request) -> AsyncIterator[bytearray]:
    """Gives a body, which counts until the end.

    Raises:
      Refusal: if it is too large, too slow, or too many are sent at once.
    """
    said = request.headers.get('content-length', '0')
    if not said.isdecimal() or int(said) > MAX_BODY_BYTES:
      raise _too_large()
    body = bytearray()
    try:
      await self._read(request, body)
      yield body
    finally:
      self.held_bytes -= len(body)

  async def _read(self, request: Request, body: bytearray) -> None:
    try:
      async with asyncio.timeout(BODY_SECONDS):
        async for chunk in request.stream():
          body += chunk
          self.held_bytes += len(chunk)
          if len(body) > MAX_BODY_BYTES:
            raise _too_large()
          if self.held_bytes > MAX_BODIES_BYTES:
            raise Refusal(
              503, 'Too many images are sent at once.', **{'Retry-After': '5'}
            )
    except TimeoutError:
      raise Refusal(
        408, f'The image did not arrive within {BODY_SECONDS:g} seconds.'
      ) from None
    except ClientDisconnect:
      raise Refusal(400, 'The image ended too early.') from None


def _too_large() -> Refusal:
  return Refusal(
    413, f'Images have at most {MAX_BODY_BYTES >> 20} MiB: send a smaller one.'
  )


class ImpatientProtocol(H11Protocol):
  """HTTP that waits only so long for the head of a request.

  And for the rest of a body that nobody reads, as the request is answered: the
  server itself would wait for ever.
  """

  _deadline: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._wait(HEADER_SECONDS)

  def data_received(self, data: bytes) -> None:
    was_answered = self._is_answered()
    super().data_received(data)
    if self._is_answered():
      return
    if self.conn.their_state is not h11.IDLE:
      self._stop()
    elif was_answered or self._deadline is None:
      self._wait(HEADER_SECONDS)

  def on_response_complete(self) -> None:
    if self._is_answered():
      self._wait(BODY_SECONDS)
    super().on_response_complete()

  def connection_lost(self, exc: Exception | None) -> None:
    self._stop()
    super().connection_lost(exc)

  def _is_answered(self) -> bool:
    return (self.conn.our_state, self.conn.their_state) == (
      h11.DONE,
      h11.SEND_BODY,
    )

  def _wait(self, seconds: float) -> None:
    self._stop()
    self._deadline = self.loop.call_later(seconds, self.transport.abort)

  def _stop(self) -> None:
    if self._deadline:
      self._deadline.cancel()
      self._deadline = None
