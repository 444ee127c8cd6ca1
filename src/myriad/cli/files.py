"""Pictures that a command writes where it is told."""

from pathlib import Path

from myriad.errors import BadInputError
from myriad.whole_file import write_whole

__all__ = ["check_picture", "write_picture"]


def check_picture(option: str, path: Path) -> None:
    """Raises `BadInputError` for a name that is no picture's."""
    if path.suffix != ".svg":
        raise BadInputError(option, str(path), "a file name that ends in .svg")


def write_picture(option: str, path: Path, svg: str) -> None:
    """Whole or not at all. Raises `BadInputError`."""
    check_picture(option, path)
    try:
        write_whole(path, svg)
    except OSError as error:
        raise BadInputError(option, str(path), f"cannot be written: {error.strerror}") from None
