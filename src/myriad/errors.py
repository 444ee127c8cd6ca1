"""The exception tree.

Two things can be wrong, and the exit code says which: the user's input (exit 2, nothing was started or
changed) or the run itself (exit 1). Everything else is a bug and keeps its traceback.

Values are shown as TOML, in which users write them.
"""

import json

__all__ = [
    "BAD_DATA",
    "NEXT_ATTEMPT_SKIPS",
    "NO_STATE",
    "BadInputError",
    "MyriadError",
    "NoStateError",
    "RunFailedError",
    "need",
    "plain_value",
    "toml_value",
]

BAD_DATA = "damaged data: "
"""How the text of an error about a bad block of tokens begins, by which the driver knows it in a log."""
NEXT_ATTEMPT_SKIPS = "the next attempt skips them"
"""How that text ends where the run goes on without the block."""

NO_STATE = "no state to resume from: "
"""How the text of a `NoStateError` begins, by which the driver knows it in a rank's log."""


class MyriadError(Exception):
    """Base of every error that the command line prints in one line, without a traceback."""

    exit_code = 1


class BadInputError(MyriadError):
    """A value from the user that cannot be used: the key, the value, and what is allowed."""

    exit_code = 2

    def __init__(self, key: str, value: object, allowed: str) -> None:
        """``key`` as the user would type it (``layout.tp``), ``allowed`` as the end of "allowed: ..."."""
        super().__init__(_one_line(f"{key} = {_shown(value)}: {allowed}"))
        self.key, self.value, self.allowed = key, value, allowed

    def __reduce__(self) -> tuple[type["BadInputError"], tuple[str, object, str]]:
        """Make the error picklable, so that it can be sent between processes."""
        return type(self), (self.key, self.value, self.allowed)


def toml_value(value: object) -> str:
    """Return a value as TOML, which has no null: ``None`` is "off". Types that TOML lacks are shown as in
    Python."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if value is None or isinstance(value, bool | str):
        # JSON's strings are TOML's, but for one character that TOML wants escaped
        text = json.dumps("off" if value is None else value, ensure_ascii=False)
        return text.replace("\x7f", "\\u007f")
    return repr(value)


def plain_value(value: object) -> str:
    """Return a value as in a sentence, which names one choice: as TOML, but text without quotes."""
    return value if isinstance(value, str) else "off" if value is None else toml_value(value)


_MOST_SHOWN = 400


def _shown(value: object) -> str:
    """Return a value of any size, such as an untrusted file may hold, in a few hundred characters."""
    try:
        text = "none" if value is None else toml_value(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _one_line(text: str) -> str:
    """Escape line breaks and other control characters: names in a message may come from untrusted files."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def need(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `BadInputError` unless the condition holds. The value ``None`` of a key is "off"."""
    if not condition:
        raise BadInputError(key, "off" if value is None else value, allowed)


class RunFailedError(MyriadError):
    """A run ended without finishing: what happened, where, and what to look at."""


class NoStateError(RunFailedError):
    """A run has trained, and no state of it can be loaded: another attempt would find no more, and a person
    has to decide."""
