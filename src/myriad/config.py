"""The base of every config type: frozen, typed, unknown keys refused, help under the field.

Each component declares its config beside itself; ``job.py`` puts them together. No config module imports
torch.
"""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from myriad.units import parse_bytes

__all__ = ["OFF", "Config", "Size", "may_be_off"]

Size = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
"""Bytes, written as a number or as ``"64 MiB"``."""

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
