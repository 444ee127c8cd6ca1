"""Authorize requests, and restrict what a browser may do with the answers.

On the loopback, all users of this machine are allowed, but no page of another site, whose Host or Origin
differs. On other addresses a token is required: `Authorization: Bearer`, or once `/?token=`, which sets a
cookie."""

import hmac
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["COOKIE", "Guard"]

COOKIE = "myriad_token"
_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Middleware that checks every request."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Protect ``app`` with ``token``; ``None`` on the loopback, where no token is needed."""
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return PlainTextResponse("a page of another site may not ask\n", 403)
        if self._token is None:
            if _host_name(host) not in _LOOPBACK:
                return PlainTextResponse("this server is for its own machine: see --host\n", 403)
            return None
        return self._without_token(scope, headers, self._token)

    def _without_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        asked = [value for key, value in parse_qsl(scope["query_string"].decode("latin-1")) if key == "token"]
        if scope["path"] == "/" and asked and _same(asked[0], token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return answer
        given = [headers.get("authorization", "").removeprefix("Bearer "), *asked[:1]]
        given.append(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))
        if any(_same(each, token) for each in given):
            return None
        words = "a token is needed: open the address that `myriad watch` has printed\n"
        return PlainTextResponse(words, 401, {"www-authenticate": "Bearer"})


def _same(given: str, token: str) -> bool:
    """Compare in constant time, so that the duration reveals nothing of the token."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _host_name(host: str) -> str:
    """Return the host without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
