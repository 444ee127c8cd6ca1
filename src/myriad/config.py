"""The base of every config type: frozen, typed, unknown keys refused, help under the field.

Each component declares its config beside itself; ``job.py`` puts them together. No config module imports torch.
"""

from pydantic import BaseModel, ConfigDict

__all__ = ["Config"]


class Config(BaseModel):
    """Frozen, strict about unknown keys; a string under a field is that field's help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
