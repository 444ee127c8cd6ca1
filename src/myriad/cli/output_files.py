"""Output files of commands: texts, and pictures as SVG or PNG."""

import os
from importlib.util import find_spec
from pathlib import Path

from myriad.errors import BadInputError
from myriad.system.whole_file import read_regular, write_whole

__all__ = ["check_output", "check_picture", "read_earlier", "write_output", "write_picture"]

_MOST_BYTES = 2**20
"""Largest size of an output that is replaced; every written one is smaller."""
_PIXELS = 2.0
"""Pixels of a PNG for one pixel of the SVG, for high-resolution screens."""


def check_output(option: str, path: Path) -> None:
    """Raise `BadInputError` before any work where a file cannot be written."""
    if not path.parent.is_dir():
        raise BadInputError(option, str(path), f"there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise BadInputError(option, str(path), "must be a regular file, or not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BadInputError(option, str(path), f"the folder {path.parent} cannot be written to")


def read_earlier(option: str, path: Path, starts: str, what: str) -> str:
    """Return the text of an earlier output that is to be replaced; "": there is none.

    Raises `BadInputError` for a file that cannot be written, and for one whose text does not begin with
    ``starts``, which Myriad did not write. ``what``: how errors name the output."""
    check_output(option, path)
    if not path.exists():
        return ""
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        text = ""
    if not text.startswith(starts):
        raise BadInputError(option, str(path), f"must be a new file, or {what}: this file is neither")
    return text


def check_picture(option: str, path: Path) -> None:
    """Raise `BadInputError` for a name without .svg or .png, a file that cannot be written, and a PNG without
    its package."""
    if path.suffix not in (".svg", ".png"):
        raise BadInputError(option, str(path), "a file name that ends in .svg or .png")
    check_output(option, path)
    if path.suffix == ".png" and find_spec("resvg_py") is None:
        raise BadInputError(option, str(path), "a .svg, or for PNG: pip install 'myriad-train[png]'")


def write_picture(option: str, path: Path, svg: str) -> None:
    """Write a picture atomically. Raises `BadInputError`."""
    check_picture(option, path)
    write_output(option, path, _as_png(svg) if path.suffix == ".png" else svg)


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write a file atomically. Raises `BadInputError`."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise BadInputError(option, str(path), f"cannot be written: {error.strerror}") from None


def _as_png(svg: str) -> bytes:
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, background="white", zoom=_PIXELS))
