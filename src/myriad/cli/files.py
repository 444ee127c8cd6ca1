"""Pictures that a command writes where it is told: SVG as it is drawn, or PNG made of it."""

import os
from importlib.util import find_spec
from pathlib import Path

from myriad.errors import BadInputError
from myriad.whole_file import write_whole

__all__ = ["check_output", "check_picture", "write_picture"]

_PIXELS = 2.0
"""Of a PNG, for one of the SVG: for screens with fine pixels."""


def check_output(option: str, path: Path) -> None:
    """Find out before any work whether a file can be written. Raises `BadInputError`."""
    if not path.parent.is_dir():
        raise BadInputError(option, str(path), f"there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise BadInputError(option, str(path), "a regular file or a new one: this is neither")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BadInputError(option, str(path), f"the folder {path.parent} cannot be written to")


def check_picture(option: str, path: Path) -> None:
    """Raises `BadInputError` for a name that is no picture's, a file that cannot be written, and for a PNG
    that cannot be made."""
    if path.suffix not in (".svg", ".png"):
        raise BadInputError(option, str(path), "a file name that ends in .svg or .png")
    check_output(option, path)
    if path.suffix == ".png" and find_spec("resvg_py") is None:
        raise BadInputError(option, str(path), "a .svg, or for PNG: pip install 'myriad[png]'")


def write_picture(option: str, path: Path, svg: str) -> None:
    """Whole or not at all. Raises `BadInputError`."""
    check_picture(option, path)
    try:
        write_whole(path, _as_png(svg) if path.suffix == ".png" else svg)
    except OSError as error:
        raise BadInputError(option, str(path), f"cannot be written: {error.strerror}") from None


def _as_png(svg: str) -> bytes:
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, background="white", zoom=_PIXELS))
