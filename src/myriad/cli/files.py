"""Pictures that a command writes where it is told."""

import os
from pathlib import Path

from myriad.errors import BadInputError

__all__ = ["check_picture", "write_picture"]


def check_picture(option: str, path: Path) -> None:
    """Raises `BadInputError` for a name that is no picture's."""
    if path.suffix != ".svg":
        raise BadInputError(option, str(path), "a file name that ends in .svg")


def write_picture(option: str, path: Path, svg: str) -> None:
    """Whole or not at all. Raises `BadInputError`."""
    check_picture(option, path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(svg)
        beside.replace(path)
    except OSError as error:
        raise BadInputError(option, str(path), f"cannot be written: {error.strerror}") from None
