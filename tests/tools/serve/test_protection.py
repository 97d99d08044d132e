"""What stands between the server and strangers, one request at a time."""

import asyncio
from unittest import mock

import pytest

protection = pytest.importorskip(
  'vit_jax.tools.serve.protection', reason='needs the extra `serve`'
)
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import Request  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from vit_jax.tools.serve import listening  # noqa: E402


def request_of(method='GET', **headers):
  """Returns a request without a body."""
  pairs = [
    (name.replace('_', '-').encode(), value.encode())
    for name, value in headers.items()
  ]
  return Request({'type': 'http', 'method': method, 'headers': pairs})


def test_scripts_and_styles_are_known_by_their_hashes():
  """Those that are in the documentation of the policy."""
  page = "<style></style><script>alert('Hello, world.');</script>"
  parts = protection.content_policy(page).split('; ')
  policy = dict(part.split(' ', 1) for part in parts)
  nothing = ('default-src', 'base-uri', 'form-action', 'frame-ancestors')
  assert policy == dict.fromkeys(nothing, "'none'") | {
    'script-src': "'sha256-qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng='",
    'style-src': "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",
    # Of photographs, and of what is drawn over them.
    'img-src': "'self' blob: data:",
    'connect-src': "'self'",
  }
  several = '<script>\n1\n</script> <script>2</script>'
  # Of each one every character counts, as `openssl dgst -sha256` has it.
  assert (
    "script-src 'sha256-PBL+VNcqg2ezLpeQ7yj8J15XmnKAnnIb2qth9B/WTJ4=' "
    "'sha256-1HNeOiZeFu7gP1lxi5tdAwGcB9i2xR+Q2jpmbuwTqzU=';"
  ) in protection.content_policy(several)


def test_hosts_are_those_of_this_machine_where_any_are_said():
  for host in ('localhost', '127.0.0.1:', '[::1]:8000'):
    protection.check_origin(request_of(host=host), protection.LOOPBACK)
  for host in ('localhost.evil.example', ''):
    protection.check_origin(request_of(host=host), None)
    with pytest.raises(HTTPException, match=f'host name {host!r}') as refused:
      protection.check_origin(request_of(host=host), protection.LOOPBACK)
    assert refused.value.status_code == 403


@pytest.mark.parametrize(
  ('method', 'site', 'mode', 'is_answered'),
  [
    ('POST', 'same-origin', 'cors', True),
    ('GET', 'cross-site', 'no-cors', False),
    ('GET', 'same-site', 'cors', False),
    # A link to the page is followed from anywhere.
    ('GET', 'cross-site', 'navigate', True),
    # A form that another site submits navigates too.
    ('POST', 'cross-site', 'navigate', False),
  ],
)
def test_pages_of_other_sites_may_only_link_here(
  method, site, mode, is_answered
):
  request = request_of(method, sec_fetch_site=site, sec_fetch_mode=mode)
  if is_answered:
    protection.check_origin(request, None)
    return
  with pytest.raises(HTTPException, match='other origins') as refused:
    protection.check_origin(request, None)
  assert refused.value.status_code == 403


def test_a_token_is_asked_for_where_there_is_one():
  protection.check_token(request_of(), '')
  protection.check_token(request_of(authorization='Bearer a'), '')
  protection.check_token(request_of(authorization='Bearer a'), 'a')
  protection.check_token(request_of(authorization='bearer a'), 'a')
  for wrong in ('', 'a', 'Bearer ', 'Bearer b', 'Basic a', 'Bearer aa'):
    with pytest.raises(HTTPException, match='Bearer TOKEN') as refused:
      protection.check_token(request_of(authorization=wrong), 'a')
    assert refused.value.status_code == 401
    assert refused.value.headers == {'WWW-Authenticate': 'Bearer'}


@pytest.mark.parametrize('has_begun', [True, False])
def test_only_requests_without_a_response_have_no_deadline(has_begun):
  """A client that does not read its response must not keep a connection."""

  async def app(scope, receive, send):
    if has_begun:
      await send({'type': 'http.response.start', 'status': 200})
      await send({'type': 'http.response.body', 'more_body': True})
    assert not (await receive())['more_body']
    if not has_begun:
      await send({'type': 'http.response.start', 'status': 200})
    await send({'type': 'http.response.body'})

  async def run():
    config = listening.config_of(app)
    config.load()
    protocol = protection.ImpatientProtocol(config, ServerState(), {})
    transport = mock.Mock()
    transport.get_extra_info.return_value = None
    protocol.connection_made(transport)
    protocol.data_received(
      b'POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n'
    )
    await asyncio.sleep(0)
    protocol.data_received(b'x')
    assert bool(protocol._deadline) == has_begun
    protocol.pause_writing()
    has_deadline_in_pause = bool(protocol._deadline)
    protocol.resume_writing()
    assert has_deadline_in_pause
    await asyncio.gather(*protocol.tasks)
    assert protocol._deadline
    protocol.connection_lost(None)

  asyncio.run(run())
