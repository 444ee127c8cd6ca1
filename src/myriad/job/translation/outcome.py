"""Result of a translation: the job's keys, and every option that has no key.

No option is dropped silently. Each given option is in exactly one of three lists: translated, without a
counterpart (with what Myriad does instead), or unknown.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from myriad.config import dump_toml
from myriad.errors import BadInputError
from myriad.job import Job

__all__ = ["Translation", "plain_text"]


@dataclass
class Translation:
    """A configuration of another system, converted to job keys."""

    system: str
    """Name of the other system: ``Megatron-LM`` or ``DeepSpeed``."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Job values by dotted key."""
    translated: dict[str, str] = field(default_factory=dict)
    """Text ``key = value`` by option."""
    without: dict[str, str] = field(default_factory=dict)
    """What Myriad does instead, by option."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Values of unknown options, by option."""

    def put(self, option: str, key: str, value: Any) -> None:
        """Set a key of the job, and list the option as translated."""
        self.keys[key] = value
        self.translated[option] = f"{key} = {'off' if value is None else value}"

    def put_same(self, option: str, others: Collection[str], given: Collection[str]) -> None:
        """List those of the others that are ``given`` as translated by the key of ``option``."""
        self.translated |= {other: self.translated[option] for other in others if other in given}

    def put_loss_scale(self, options: Mapping[str, tuple[str, Any]]) -> None:
        """Set the keys of float16's loss scale from ``{option: (key, value)}``.

        A scale that is not a power of two is listed as without a counterpart."""
        for option, (key, value) in options.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                continue
            if key == "growth_interval" or math.frexp(value)[0] == 0.5:
                self.put(option, f"loss_scale.{key}", value)
            else:
                self.instead(option, f"loss_scale.{key} must be a power of two: its default holds")

    def instead(self, option: str, text: str) -> None:
        """List an option as without a counterpart. ``text``: what Myriad does instead."""
        self.without[option] = text

    def job(self, name: str, base: Mapping[str, Any] | None = None) -> Job:
        """Return the validated job. Raises `BadInputError` for a combination that Myriad refuses."""
        tree: dict[str, Any] = {"name": name, **(base or {})}
        for dotted, value in self.keys.items():
            section, _, key = dotted.partition(".")
            tree.setdefault(section, {})[key] = value
        try:
            return Job.model_validate(tree).check()
        except ValueError as error:  # pydantic's error about one value
            first = str(error).splitlines()
            raise BadInputError(self.system, name, " ".join(line.strip() for line in first[1:3])) from None

    def toml(self, name: str) -> str:
        """Return the job as TOML, after a comment for each option without a key."""
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
    """Replace line breaks and control characters in a text.

    Option names come from untrusted files, and a second line in a comment would be read as a job key."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def plain_text(value: object) -> str:
    """Return a value as text, also if it is too large or nested too deep to be written."""
    try:
        return str(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def _plain(value: object) -> str:
    """Return a value as one printable line of about 100 characters at most."""
    text = _line(plain_text(value))
    return text if len(text) <= 100 else f"{text[:100]}..."
