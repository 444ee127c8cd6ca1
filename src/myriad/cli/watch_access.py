"""Access to the page of ``myriad watch``: its token, the file that keeps it, and the way into a browser."""

import html
import os
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path

import typer

from myriad.errors import BadInputError
from myriad.telemetry.shipping import page_token
from myriad.telemetry.shipping.page_token import TOKEN, keep_private

__all__ = [
    "entry_page",
    "forget_token",
    "given_token",
    "has_browser",
    "keep_token",
    "open_in_browser",
    "remote_entry_page",
    "shown_path",
]

_LEAST_TOKEN = 16


def given_token(token: str | None, file: Path | None) -> str | None:
    """Return the token that the user gives; ``None`` if a new one is wanted. Raises `BadInputError`."""
    if token is not None:
        typer.echo(
            f"--token is deprecated: other users see it in lists of processes; use --token-file or {TOKEN}",
            err=True,
        )
        return _checked("--token", token)
    if file is None:
        return _checked(TOKEN, given) if (given := os.environ.get(TOKEN)) else None
    try:
        return _checked("--token-file", file.read_text(errors="replace").strip(), str(file))
    except OSError as error:
        raise BadInputError("--token-file", str(file), f"a file with a token ({error.strerror})") from None


def _checked(key: str, token: str, value: str = "") -> str:
    """Return the token. The error does not have it: its text can end in a log."""
    letters = token.replace("-", "").replace("_", "")
    if len(token) < _LEAST_TOKEN or not (letters.isascii() and letters.isalnum()):
        allowed = f"at least {_LEAST_TOKEN} letters, digits, - and _"
        raise BadInputError(key, value or f"{len(token)} characters", allowed)
    return token


def keep_token(port: int, token: str) -> Path | None:
    """Write the token into the user's file for this port. Return the file, or ``None`` if that fails."""
    try:
        file = page_token.token_file(port)
        keep_private(file, f"{token}\n")
    except OSError as error:
        typer.echo(f"the token is in no file: {error}", err=True)
        return None
    return file


def forget_token(file: Path | None) -> None:
    """Delete the file and the one that leads a browser to the page."""
    for path in () if file is None else (file, file.with_suffix(".html")):
        with suppress(OSError):
            path.unlink()


def entry_page(file: Path | None) -> Path | None:
    """Return the file that leads a browser to the page."""
    return None if file is None else file.with_suffix(".html")


def remote_entry_page() -> Path | None:
    """Return the same for another machine's page. It stays, because this process ends before the browser
    reads it."""
    with suppress(OSError):
        return page_token.token_file(0).with_name("watch-remote.html")
    return None


def shown_path(file: Path | None) -> str:
    """Return the file's name for a client, without the name of the user."""
    if file is None:
        return ""
    with suppress(ValueError, RuntimeError):
        return f"~/{file.relative_to(Path.home())}"
    return str(file)


def open_in_browser(page: str, entry: Path | None, has_token: bool) -> None:
    """Open the page. One with a token is opened through ``entry``: a browser's arguments are visible to all
    users of the machine."""
    if has_token:
        refresh = f'<meta http-equiv="refresh" content="0; url={html.escape(page)}">'
        try:
            if entry is None:
                raise OSError("its address would show the token in lists of processes")
            keep_private(entry, f'<!doctype html><meta charset="utf-8">{refresh}\n')
        except OSError as error:
            return typer.echo(f"no browser is opened: {error}", err=True)
        page = entry.as_uri()
    # In a thread: a browser in the terminal blocks until it is closed; the server keeps serving.
    threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()


def has_browser() -> bool:
    """Return whether a window can open here. Without one, Python starts any installed text browser in this
    terminal."""
    named = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in named)
