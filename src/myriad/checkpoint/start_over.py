"""Whether a run without a state to load may begin at step 1. No torch here.

A run that has ever stored a checkpoint never begins at step 1 by itself: every checkpoint may be damaged,
lie elsewhere (another checkpoint.url), or be out of reach for a while. Proofs that one was stored, any of
which suffices:

    a committed step-N, good or not; a step-N.damaged          in the folder of checkpoints
    a ``checkpoint`` event since the run last began at step 1  in events.jsonl
    steps in metrics.jsonl without any event                   events.jsonl was lost

Without such a proof nothing can be lost, and the run begins at step 1. Otherwise a person decides, for one
start, by checkpoint.restart_from_scratch. What cannot be read *now* is never taken for damage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.errors import NO_STATE, NoStateError, RunFailedError

__all__ = ["Past", "check_start_over", "past_of"]

_MOST_FILES = 6
"""Files that a message names."""


@dataclass(frozen=True)
class Past:
    """What the files of a run report about its earlier attempts."""

    stored_step: int = 0
    """Newest step that was stored since the run last began at step 1; 0: none."""
    done_step: int = 0
    """Newest step that was trained."""
    places: tuple[str, ...] = ()
    """Where checkpoints were stored before checkpoint.url changed, the newest first."""
    stored_in: tuple[tuple[str, int], ...] = ()
    """Places, and the newest step that was stored in each. A start that went on from an earlier step has
    given up the later ones."""
    may_start_over: bool = False
    """A person has allowed this start to begin at step 1."""
    has_started_over: bool = False
    """The run began at step 1 again in an earlier start: step-N.damaged may be older than that."""


def past_of(
    events: Sequence[Mapping[str, Any]], done_step: int, default_place: str, current_place: str = ""
) -> Past:
    """What the events of a run report; ``done_step``: the newest of its metrics; ``default_place``: where
    checkpoints are while checkpoint.url is off; ``current_place``: where they are now."""
    stored, allowed, again = 0, False, False
    places: list[str] = []
    place, stored_in = _first_place(events, default_place) or current_place or default_place, dict[str, int]()
    for event in events:
        name, step = event.get("event"), event.get("step")
        if name == "checkpoint" and isinstance(step, int):
            stored, where = max(stored, step), str(event.get("url") or place)
            stored_in[where] = max(step, stored_in.get(where, 0))
        elif name == "restart_from_scratch":
            allowed = event.get("allowed") is True
        elif name == "job_changed" and event.get("key") == "checkpoint.url":
            places.insert(0, str(event.get("before") or default_place))
            place = str(event.get("after") or default_place)
        elif name == "start":
            again |= allowed and not event.get("resumed_from")
            resumed = event.get("resumed_from") or 0
            stored = 0 if allowed and not resumed else stored
            stored_in = {where: min(known, resumed) for where, known in stored_in.items()}
            allowed = False
    if done_step and not any(event.get("event") == "start" for event in events):
        stored = done_step
    newest = tuple(sorted(stored_in.items(), key=lambda one: -one[1]))
    return Past(stored, done_step, tuple(dict.fromkeys(places)), newest, allowed, again)


def _first_place(events: Sequence[Mapping[str, Any]], default_place: str) -> str | None:
    """Where the run stored before checkpoint.url changed first; ``None``: it never did."""
    for event in events:
        if event.get("event") == "job_changed" and event.get("key") == "checkpoint.url":
            return str(event.get("before") or default_place)
    return None


def check_start_over(
    past: Past,
    run: Path,
    url: str,
    *,
    problems: Sequence[str],
    in_memory: Sequence[str],
    committed: Sequence[int],
    damaged: Sequence[int],
    unreadable: bool,
    newest: int | None = None,
) -> None:
    """Return when a run that has loaded nothing may begin at step 1.

    ``problems``: of states that could not be loaded; ``in_memory``: what nodes hold, in words;
    ``committed``, ``damaged``: steps of the folder's checkpoints, and of those that were set aside;
    ``unreadable``: some may be good, and could not be read; ``newest``: the driver goes back to it. Raises
    `NoStateError` where only a person can decide, `RunFailedError` where another attempt may find more."""
    files = _files(problems)
    if unreadable:
        told = (
            f"no checkpoint in {url} can be read now: {files}; nothing was changed: start again when it can"
        )
        raise RunFailedError(told)
    if newest == 0 or past.may_start_over:
        return
    stored = past.stored_step or max(damaged, default=0)
    aside = bool(damaged) and not past.has_started_over
    if not (problems or committed or aside or past.stored_step):
        return
    known = [files] if files else []
    if not committed and not files:
        known.append(f"{url} holds no checkpoint, but step {stored} was stored")
    if newest is not None:
        wrong = ", ".join(f"step-{step}" for step in committed if step > newest)
        why = "replicas differed, or a spike came"
        known.append(f"states after step {newest} are wrong ({wrong or 'none is stored'}): {why}")
    known += [f"set aside: {', '.join(f'step-{step}.damaged' for step in damaged)}"] if aside else []
    known.append(f"in memory: {', '.join(in_memory) or 'nothing'}")
    others = [place for place in past.places if place != url]
    back = (
        f"; `myriad train {run} --checkpoint.url {others[0]}` looks where they were stored" if others else ""
    )
    raise NoStateError(
        f"{NO_STATE}{'; '.join(known)}{back}; restore the files and start again, or begin at "
        f"step 1: `myriad train {run} --checkpoint.restart-from-scratch`"
    )


def _files(problems: Sequence[str]) -> str:
    """One reason for each file."""
    first: dict[str, str] = {}
    for problem in problems:
        file, _, why = problem.partition(": ")
        first.setdefault(file, why.rsplit(": ", 1)[-1])
    told = [f"{file}: {why}" for file, why in first.items()]
    more = [f"and {len(told) - _MOST_FILES} more"] if len(told) > _MOST_FILES else []
    return ", ".join([*told[:_MOST_FILES], *more])
