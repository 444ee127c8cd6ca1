"""Ready jobs, models, clusters, accelerators, faults and mixes of them as TOML; a recipe's name works
wherever a path does."""

import difflib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from myriad.config import parse_toml
from myriad.errors import BadInputError
from myriad.system.whole_file import read_regular

__all__ = ["Kind", "read_recipe", "recipe_names"]

_MOST_BYTES = 2**24
"""A larger TOML file is refused."""
Kind = Literal["accelerators", "clusters", "faults", "jobs", "mixes", "models"]


def recipe_names(kind: Kind) -> list[str]:
    """Names of the ready-made TOML files of one kind."""
    entries = (resources.files("myriad") / "recipes" / kind).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def read_recipe(kind: Kind, name_or_path: str, key: str) -> dict[str, Any]:
    """A TOML file by path, or a recipe by name, as a tree; ``key`` is what the user gave it as."""
    try:
        return parse_toml(_text(kind, name_or_path, key))
    except UnicodeDecodeError:
        raise BadInputError(key, name_or_path, "not valid TOML: not UTF-8") from None
    except ValueError as error:
        raise BadInputError(key, name_or_path, f"not valid TOML: {error}") from None


def _text(kind: Kind, name_or_path: str, key: str) -> str:
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        try:
            return read_regular(Path(name_or_path), _MOST_BYTES).decode("utf-8")
        except FileNotFoundError:
            raise BadInputError(key, name_or_path, "no such file") from None
        except OSError as error:
            raise BadInputError(key, name_or_path, f"cannot be read: {error.strerror}") from None
    names = recipe_names(kind)
    if name_or_path not in names:
        near = difflib.get_close_matches(name_or_path, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(key, name_or_path, f"{hint}a .toml file or one of {', '.join(names)}")
    return (resources.files("myriad") / "recipes" / kind / f"{name_or_path}.toml").read_text(encoding="utf-8")
