"""Authorize requests, and restrict what a browser may do with the answers.

Every request needs a token, also on the loopback, where other users of the machine could ask:

    GET /?token=TOKEN        sets a cookie and leads on to /, so that the token leaves the address bar
    Cookie                   HttpOnly, SameSite=Strict, with TLS Secure; the port is in its name: cookies
                             ignore ports
    Authorization: Bearer    for programs; senders of spans use a token that opens only their own route

The first answer leads on with a Refresh header, not with status 303: a browser that follows a redirect after
a link of another site, or of a file, does not send a strict cookie; it sends it from a page of its own.

A page of another site is refused: its Origin differs, or its Host, if its name was made to lead here.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from myriad.telemetry.shipping.page_token import LOOPBACK

__all__ = ["SPANS_PATH", "Access", "Guard", "cookie_name"]

_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
SPANS_PATH = "/api/spans"
_ENTERED = """<!doctype html><title>Myriad</title><link rel="icon" href="/static/icon.svg">
<p><a href="/">Open the dashboard</a>
"""


@dataclass(frozen=True)
class Access:
    """What opens one page."""

    token: str
    """The token that opens every route."""
    place: str = ""
    """File that has the token, for the line that refuses a request."""
    is_local: bool = True
    """Whether only names of the loopback are accepted as Host."""
    span_token: Callable[[], str | None] = lambda: None
    """Returns the token that opens the route for spans; ``None`` if there is none yet."""


class Guard:
    """Middleware that checks every request."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access
        token = f"the token in {access.place}" if access.place else "its token"
        ways = f"open the address that `myriad watch` printed, or send {token} as Authorization: Bearer"
        self._advice = f"a token is needed: {ways}\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # the page has no WebSocket
            return await send({"type": "websocket.close", "code": 1008})

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and _place(origin) != host:
            return PlainTextResponse("a page of another site may not ask\n", 403)
        if self._access.is_local and _host_name(host) not in LOOPBACK:
            return PlainTextResponse("this server is for its own machine: see --host\n", 403)
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        asked = [value for key, value in parse_qsl(scope["query_string"].decode("latin-1")) if key == "token"]
        name, token = cookie_name(headers.get("host", "")), self._access.token
        if scope["path"] == "/" and asked and _same(asked[0], token):
            answer = HTMLResponse(_ENTERED, headers={"refresh": "0; url=/"})
            is_secure = scope["scheme"] == "https"
            answer.set_cookie(name, token, httponly=True, samesite="strict", secure=is_secure)
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = cookie_parser(headers.get("cookie", "")).get(name, "")
        if _same(bearer, token) or _same(cookie, token):
            return None
        sends_spans = scope["path"] == SPANS_PATH and bearer
        if sends_spans and (other := self._access.span_token()) and _same(bearer, other):
            return None
        return PlainTextResponse(self._advice, 401, {"www-authenticate": "Bearer"})


def cookie_name(host: str) -> str:
    """Return the name of the cookie for a Host header. It has the port as the browser sees it, which differs
    from the server's behind an ssh tunnel."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return f"myriad_token_{port or 80}"


def _same(given: str, token: str) -> bool:
    """Compare in constant time, so that the duration reveals nothing of the token."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _place(origin: str) -> str | None:
    """Return host and port of an Origin header; ``None`` if it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host_name(host: str) -> str:
    """Return the host without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
