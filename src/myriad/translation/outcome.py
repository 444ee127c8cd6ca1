"""What a translation gives: keys of a job, and every option that did not become one.

No option is dropped in silence. Each one given is in exactly one of three lists: translated, without a
counterpart (with what Myriad does instead), or unknown.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.toml_text import dump_toml

__all__ = ["Translation"]


@dataclass
class Translation:
    """A job in the making."""

    system: str
    """Whose configuration it is: ``Megatron-LM`` or ``DeepSpeed``."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of a job."""
    translated: dict[str, str] = field(default_factory=dict)
    """Option to ``key = value`` of the job."""
    without: dict[str, str] = field(default_factory=dict)
    """Option to what Myriad does instead."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Option to its value."""

    def put(self, option: str, key: str, value: Any) -> None:
        """Set a key of the job."""
        self.keys[key] = value
        self.translated[option] = f"{key} = {'off' if value is None else value}"

    def put_loss_scale(self, options: Mapping[str, tuple[str, Any]]) -> None:
        """Set keys of the loss scale of float16 from (key, value) by option; a scale that is no power of two
        is noted."""
        for option, (key, value) in options.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                continue
            if key == "growth_interval" or math.frexp(value)[0] == 0.5:
                self.put(option, f"loss_scale.{key}", value)
            else:
                self.instead(option, f"loss_scale.{key} must be a power of two: its default holds")

    def instead(self, option: str, text: str) -> None:
        """Note what Myriad does instead of an option."""
        self.without[option] = text

    def job(self, name: str, base: Mapping[str, Any] | None = None) -> Job:
        """The job, checked. Raises `BadInputError` for a combination that Myriad refuses."""
        tree: dict[str, Any] = {"name": name, **(base or {})}
        for dotted, value in self.keys.items():
            section, _, key = dotted.partition(".")
            tree.setdefault(section, {})[key] = value
        try:
            return Job.model_validate(tree).check()
        except ValueError as error:  # pydantic's, of one value
            first = str(error).splitlines()
            raise BadInputError(self.system, name, " ".join(line.strip() for line in first[1:3])) from None

    def toml(self, name: str) -> str:
        """The job as TOML, below a comment for each option that has no key in it."""
        lines = [f"# From a configuration of {self.system}."]
        if self.without:
            lines += ["# Without a counterpart:"]
            lines += [f"#   {_line(option)}: {_line(text)}" for option, text in self.without.items()]
        if self.unknown:
            lines += ["# Unknown, and not used:"]
            lines += [f"#   {_line(option)} = {_plain(value)}" for option, value in self.unknown.items()]
        return "\n".join(lines) + "\n\n" + dump_toml(self.job(name))

    def lists(self) -> dict[str, Any]:
        """Return the three lists of options as one JSON object."""
        return {
            "system": self.system,
            "translated": self.translated,
            "without_counterpart": {_line(option): _line(text) for option, text in self.without.items()},
            "unknown": {_line(option): _plain(value) for option, value in self.unknown.items()},
        }


def _line(text: str) -> str:
    """Return a text without line breaks and control characters: names of options are other people's, and a
    second line in a comment of a job file would be a key of the job."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _plain(value: object) -> str:
    """Return a value as one short printable line."""
    text = _line(str(value))
    return text if len(text) <= 100 else f"{text[:100]}..."
