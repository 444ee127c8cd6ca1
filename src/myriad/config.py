"""The base of every config type: frozen, typed, unknown keys refused, help under the field.

Each component declares its config beside itself; ``job.py`` puts them together. No config module imports
torch.
"""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import ErrorDetails

from myriad.units import parse_bytes, parse_rate

__all__ = ["OFF", "Config", "Rate", "Seconds", "Size", "explain", "may_be_off"]

Size = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=2**62)]
"""Bytes, written as a number or as ``"64 MiB"``."""


def _bytes_per_second(value: object) -> object:
    """Read text with a unit; what is a number, or text of one, is bytes already."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return parse_rate(value) / 8


Rate = Annotated[float, BeforeValidator(_bytes_per_second), Field(ge=1, le=1e18)]
"""Bytes per second, written as a number or as ``"400 Gbit/s"`` or ``"50 GB/s"``."""
Seconds = Annotated[float, Field(gt=0, le=1e4)]
"""A latency in seconds, above 0."""

OFF = "off"
"""What a key that may be off is set to, in files and on the command line, where there is no null."""


class Config(BaseModel):
    """Frozen, strict about unknown keys; a string under a field is that field's help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
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
    """Whether "none" is one of the key's choices: on the command line that is another word for off."""
    field = config.model_fields.get(key)
    return field is not None and "none" in get_args(field.annotation)


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
"""What a value must be, by pydantic's name of the error."""
_FORMS = {
    "^[A-Za-z0-9][A-Za-z0-9._-]*$": "letters, digits, dots, dashes and underscores, a letter or digit first",
}
"""What each pattern allows, in words."""


def explain(error: ErrorDetails) -> str:
    """Return what is allowed in plain words, for the end of a `myriad.errors.BadInputError`."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is needed"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "string_pattern_mismatch" and context["pattern"] in _FORMS:
        return f"must be {_FORMS[context['pattern']]}"
    if kind in _MUST_BE:
        plain = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
        return f"must be {_MUST_BE[kind].format(**plain)}"
    message = error["msg"].removeprefix("Value error, ")  # of a validator of ours, in its own words
    return message[:1].lower() + message[1:]
