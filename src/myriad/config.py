"""The base of every section of a job: frozen, typed, unknown keys refused, help under the field.

Each component declares its section beside itself, and `myriad.job.job_values` combines them. No config module
imports torch. A config that `dump_toml` writes reads back as an equal config; an override is ``KEY=VALUE``
with a dotted key.
"""

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import ErrorDetails

from myriad.errors import BadInputError, toml_value
from myriad.units import parse_bytes, parse_count, parse_rate

__all__ = [
    "OFF",
    "Config",
    "Count",
    "Rate",
    "Seconds",
    "Size",
    "dump_toml",
    "explain",
    "may_be_off",
    "parse_override",
    "parse_toml",
    "read_help",
    "set_dotted",
]

Size = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=2**62)]
"""Bytes, as a number or as text such as ``"64 MiB"``."""

Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1, le=2**62)]
"""A whole number, also as text such as ``"2B"`` (2,000,000,000): k, M, B and T are powers of 1,000."""


def _bytes_per_second(value: object) -> object:
    """Parse text with a unit; a number is already in bytes per second."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return parse_rate(value) / 8


Rate = Annotated[float, BeforeValidator(_bytes_per_second), Field(ge=1, le=1e18)]
"""Bytes per second, as a number or as text such as ``"400 Gbit/s"`` or ``"50 GB/s"``."""
Seconds = Annotated[float, Field(gt=0, le=1e4)]
"""A latency in seconds, above 0."""

OFF = "off"
"""The value that disables an optional key; TOML and the command line have no null."""


class Config(BaseModel):
    """Base of all sections: frozen, refuses unknown keys; the string under a field is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_off(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        off = {key for key, value in values.items() if value == OFF and may_be_off(cls, key)}
        none = {key for key, value in values.items() if value == OFF and _may_be_none(cls, key)}
        return values | dict.fromkeys(off) | dict.fromkeys(none, "none") if off or none else values


def may_be_off(config: type[BaseModel], key: str) -> bool:
    """Whether the key exists and takes ``off``."""
    field = config.model_fields.get(key)
    return field is not None and type(None) in get_args(field.annotation)


def _may_be_none(config: type[BaseModel], key: str) -> bool:
    """Whether "none" is a choice of the key; the command line accepts off for it."""
    field = config.model_fields.get(key)
    return field is not None and "none" in get_args(field.annotation)


def read_help(config: type[BaseModel]) -> None:
    """Set the description of each key of a section, and of the sections in it, to the string under the key.

    Only help texts need them. Pydantic's `use_attribute_docstrings` reads the source of every section at
    import, which takes a tenth of a second in each process of a run.
    """
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if issubclass(base, Config) and base is not Config:
            found.update(_strings_under_keys(base))
    for key, field in config.model_fields.items():
        field.description = field.description or found.get(key)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            read_help(field.annotation)


def _strings_under_keys(config: type[BaseModel]) -> Iterator[tuple[str, str]]:
    statements = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(statements, ast.ClassDef)
    for key, text in pairwise(statements.body):
        match key, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(help_text)):
                yield name, inspect.cleandoc(str(help_text))


_MUST_BE = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list: [VALUE, ...]"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type"), "a section of keys"
    ),
    **dict.fromkeys(("string_type", "string_sub_type", "string_unicode"), "text"),
    "finite_number": "a finite number",
    "none_required": "off",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "of the form {pattern}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}
"""What a value must be, by pydantic error type."""
_FORMS = {
    "^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, dots, dashes and underscores, a letter or digit first",
}
"""Descriptions of the patterns that keys use."""


def explain(error: ErrorDetails) -> str:
    """Return what is allowed, as the end of a `myriad.errors.BadInputError`."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is needed"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "string_pattern_mismatch" and context["pattern"] in _FORMS:
        return f"must be {_FORMS[context['pattern']]}"
    if kind in _MUST_BE:
        plain = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
        if kind == "literal_error":
            plain["expected"] = plain["expected"].replace("'", '"')
        return f"must be {_MUST_BE[kind].format(**plain)}"
    message = error["msg"].removeprefix("Value error, ")  # raised by a validator of a section
    return message[:1].lower() + message[1:]


def dump_toml(config: BaseModel) -> str:
    """Return every value of a config as TOML. A key that is off is written as ``"off"``, also if that is the
    default, because the default may change."""
    return "\n".join(_lines(config.model_dump(mode="json"), "")) + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{key} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{key}]"
            yield from _lines(value, f"{prefix}{key}.")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tree of a TOML text. Raises ``ValueError`` if it is not TOML, or is nested too deep."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit on the digits of a whole number
        raise ValueError("a number has thousands of digits") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_override(override: str) -> tuple[str, Any]:
    """Return ``("layout.tp", 2)`` for ``"layout.tp=2"``. A value that is not TOML is text.

    Raises `BadInputError`."""
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise BadInputError("override", override, "written as KEY=VALUE, for example layout.tp=2")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return dotted, OFF if text.lower() in ("none", OFF) else text
    return dotted, value if isinstance(value, bool | int | float | str | list | dict) else text


def set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``tree["a"]["b"]`` for ``"a.b"``, and create missing sections; text becomes a section's recipe, and
    a number is the index of a table in a list.

    Raises `BadInputError` if a part of the key is not a section."""
    *parents, last = dotted.split(".")
    for depth, parent in enumerate(parents, 1):
        child = tree.setdefault(parent, {})
        if isinstance(child, list) and depth < len(parents):
            tree[parent] = {str(index): one for index, one in enumerate(child)}
            set_dotted(tree[parent], ".".join([*parents[depth:], last]), value)
            tree[parent] = list(tree[parent].values())
            return
        if isinstance(child, str):
            child = tree[parent] = {"recipe": child}
        elif not isinstance(child, dict):
            raise BadInputError(
                ".".join(parents[:depth]), child, f"is a section: it has keys such as {dotted}"
            )
        tree = child
    tree[last] = value
