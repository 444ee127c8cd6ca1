"""A person has a node leave a run: what `myriad evict RUN NODE` does."""

from myriad.errors import BadInputError
from myriad.resilience.ask import ask_driver, person
from myriad.resilience.facts import EvictionAnswer, EvictionAsked
from myriad.run import Run

__all__ = ["evict", "person"]

_MOST_CHARACTERS = 500


def evict(run: Run, node: int, *, reason: str = "", anyway: bool = False) -> str:
    """Gives what follows. Raises `BadInputError` when it cannot be done, `RunFailedError` when the run's
    driver cannot be asked."""
    if len(reason) > _MOST_CHARACTERS:
        raise BadInputError("--reason", f"{reason[:40]}...", f"at most {_MOST_CHARACTERS} characters")
    answer = ask_driver(run, EvictionAsked(node, person(), reason, anyway), EvictionAnswer)
    if answer.refused:
        raise BadInputError("NODE", node, answer.refused)
    return answer.told
