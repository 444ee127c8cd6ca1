"""The page's files, read and compressed once when a server starts: all of them are less than a photograph.

A first visit asks for thirty of them. From memory they cost a server a fraction of what opening them does,
and no name that is asked for ever reaches the file system.
"""

import gzip
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["PageFiles"]

_PAGE = Path(__file__).parent / "page"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class PageFiles:
    """By their names inside the page's folder."""

    def __init__(self, folder: Path = _PAGE) -> None:
        """Reads ``folder``."""
        paths = (path for path in folder.rglob("*") if path.suffix in _TYPES)
        self._files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self._zipped = {name: gzip.compress(data, 9) for name, data in self._files.items()}

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        """One of what it consists of."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404, "the page has no such file")
        zips = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if zips else {})
        kind = _TYPES[Path(name).suffix]
        return Response((self._zipped if zips else self._files)[name], media_type=kind, headers=headers)
