"""The exception tree.

Two things can be wrong, and the exit code says which: the user's input (exit 2, nothing was started or
changed) or the run itself (exit 1). Everything else is a bug and keeps its traceback.
"""

__all__ = [
    "BAD_DATA",
    "NEXT_ATTEMPT_SKIPS",
    "NO_STATE",
    "BadInputError",
    "MyriadError",
    "NoStateError",
    "RunFailedError",
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
        super().__init__(f"{key} = {value!r}: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed

    def __reduce__(self) -> tuple[type["BadInputError"], tuple[str, object, str]]:
        """Make the error picklable, so that it can be sent between processes."""
        return type(self), (self.key, self.value, self.allowed)


class RunFailedError(MyriadError):
    """A run ended without finishing: what happened, where, and what to look at."""


class NoStateError(RunFailedError):
    """A run has trained, and no state of it can be loaded: another attempt would find no more, and a person
    has to decide."""
