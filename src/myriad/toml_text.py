"""Configs as TOML text, and dotted overrides of TOML trees. What is written reads back as an equal config."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from myriad.config import OFF
from myriad.errors import BadInputError

__all__ = ["dump_toml", "parse_override", "parse_toml", "set_dotted"]


def dump_toml(config: BaseModel) -> str:
    """Every value of a config. What is off is written as ``"off"``: the default may be something else."""
    return "\n".join(_lines(config.model_dump(mode="json"), "")) + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{key} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{key}]"
            yield from _lines(value, f"{prefix}{key}.")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings are TOML's, but for one character that TOML wants escaped
    return json.dumps(OFF if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_toml(text: str) -> dict[str, Any]:
    """Return a file's tree. Raises ``ValueError`` for whatever is no TOML, or more than anyone means."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit on the digits of a whole number
        raise ValueError("a number has thousands of digits") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_override(override: str) -> tuple[str, Any]:
    """``"layout.tp=2"`` to ``("layout.tp", 2)``: the value as TOML where it is, else as text."""
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise BadInputError("override", override, "written as KEY=VALUE, for example layout.tp=2")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return dotted, OFF if text.lower() in ("none", OFF) else text
    return dotted, value if isinstance(value, bool | int | float | str | list | dict) else text


def set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets ``tree["a"]["b"]`` for ``"a.b"``, making sections on the way; text becomes a section's recipe."""
    *parents, last = dotted.split(".")
    for depth, parent in enumerate(parents, 1):
        child = tree.setdefault(parent, {})
        if isinstance(child, str):
            child = tree[parent] = {"recipe": child}
        elif not isinstance(child, dict):
            raise BadInputError(
                ".".join(parents[:depth]), child, f"is a section: it has keys such as {dotted}"
            )
        tree = child
    tree[last] = value
