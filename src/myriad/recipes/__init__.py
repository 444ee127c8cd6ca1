"""Ready jobs, models, clusters, accelerators, faults and mixes of them as TOML; a recipe's name works
wherever a path does."""

import copy
import difflib
import functools
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from myriad.config import parse_toml
from myriad.errors import BadInputError
from myriad.system.whole_file import read_regular

__all__ = ["MODEL_JOB_TOKENS", "Kind", "read_recipe", "recipe_names"]

_MOST_BYTES = 2**24
"""A larger TOML file is refused."""
MODEL_JOB_TOKENS = 2**22
"""Tokens of a step in the job that a model's name stands for."""
Kind = Literal["accelerators", "clusters", "faults", "frameworks", "jobs", "mixes", "models"]


def recipe_names(kind: Kind) -> list[str]:
    """Names of the ready-made TOML files of one kind."""
    return list(_recipe_names(kind))


@functools.cache
def _recipe_names(kind: Kind) -> tuple[str, ...]:
    entries = (resources.files("myriad") / "recipes" / kind).iterdir()
    return tuple(sorted(one.name.removesuffix(".toml") for one in entries if one.name.endswith(".toml")))


def read_recipe(kind: Kind, name_or_path: str, key: str) -> dict[str, Any]:
    """Return a TOML file by path, or a recipe by name, as a tree; ``key`` is what the user gave it as.

    The name of a model is also that of a job, which trains it on ``corpora/text`` with `MODEL_JOB_TOKENS` a
    step. Raises `BadInputError`."""
    if name_or_path in recipe_names(kind):
        return copy.deepcopy(_recipe(kind, name_or_path))
    if kind == "jobs" and name_or_path in recipe_names("models"):
        return _job_of_model(name_or_path)
    try:
        return parse_toml(_text(kind, name_or_path, key))
    except UnicodeDecodeError:
        raise BadInputError(key, name_or_path, "not valid TOML: not UTF-8") from None
    except ValueError as error:
        raise BadInputError(key, name_or_path, f"not valid TOML: {error}") from None


@functools.cache
def _recipe(kind: Kind, name: str) -> dict[str, Any]:
    file = resources.files("myriad") / "recipes" / kind / f"{name}.toml"
    return parse_toml(file.read_text(encoding="utf-8"))


def _job_of_model(name: str) -> dict[str, Any]:
    sequence = int(read_recipe("models", name, "model")["sequence"])
    return {
        "name": name,
        "model": name,
        "data": {"corpus": "corpora/text"},
        "train": {"global_batch": max(1, MODEL_JOB_TOKENS // sequence), "steps": 10_000},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 500},
    }


def _text(kind: Kind, name_or_path: str, key: str) -> str:
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        try:
            return read_regular(Path(name_or_path), _MOST_BYTES).decode("utf-8")
        except FileNotFoundError:
            raise BadInputError(key, name_or_path, "no such file") from None
        except OSError as error:
            raise BadInputError(key, name_or_path, f"cannot be read: {error.strerror}") from None
    names = recipe_names(kind)
    models = set(recipe_names("models")) - {*names} if kind == "jobs" else set()
    near = difflib.get_close_matches(name_or_path, [*names, *models], 1)
    hint = f"did you mean {near[0]}? " if near else ""
    others = f", or a model: {', '.join(sorted(models))}" if models else ""
    others = ", or a number of accelerators such as 256xb200" if kind == "clusters" else others
    raise BadInputError(key, name_or_path, f"{hint}a .toml file or one of {', '.join(names)}{others}")
