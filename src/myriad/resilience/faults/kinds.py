"""The faults that can be caused: what each is, how it is caused, and what a run is to make of it.

An aim is one line beside the fault it is for, and grading reads nothing else. None of them is about speed of
the machine but the times, which are those of a machine that is not overloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from myriad.program.actions import Kind as ActionKind

__all__ = ["KINDS", "MOMENTS", "PHASES", "Aim", "KindName", "Target", "aim_of"]

KindName = Literal[
    "kill",
    "segv",
    "abort",
    "stop",
    "exception",
    "hang",
    "slow",
    "host-memory",
    "disk-full",
    "damage",
    "flip",
    "nan-once",
    "nan-always",
    "spike",
]
Target = Literal["rank", "driver", "executor", "node", "loader", "keeper", "storage", "checkpoint"]
Seen = Literal["driver", "successor", "storage", "load", "diagnosis", "ranks"]

PHASES = ("starting", "loading", "step", "validating", "saving", "ending")
MOMENTS = (*PHASES, *map(str, ActionKind))
"""Parts of a rank's life and of a step, by their names on the progress page."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What a run is to make of a fault."""

    seen: Seen = "driver"
    """By whom: the driver (a `fault` with a cause); who starts another process for one that is gone; who
    stores a checkpoint; who loads one; the driver, which tells who is slow (a `diagnosis`) and lets it go
    on; all ranks alike, in the step itself (a `spike`)."""
    causes: tuple[str, ...] = ()
    """One of which the driver is to name."""
    detected_seconds: float
    median_steps: float = 0.0
    """As many median steps, where that is longer."""
    trains_seconds: float | None = None
    """After detection."""
    steps_lost: int | None = None
    """At most."""
    verified: bool = False
    """Steps count: it is to be found when replicas are compared next."""
    restarts: bool = True
    """All ranks begin anew."""
    stops: bool = False
    """The run is to end with the reason."""
    same_bits: bool = True
    """The result is that of the undisturbed run to the bit; else sums may be in another order."""
    also: str = ""
    """The rest of it in words, for people: it follows from the others, or holds for every fault."""


@dataclass(frozen=True)
class FaultKind:
    """One fault."""

    what: str
    how: str
    aims: Mapping[Target, Aim]
    """By what it can be done to."""
    inside: bool = False
    """Caused by the rank itself, which is told at its start; else from outside."""
    needs_root: bool = False


_CRASH = Aim(causes=("killed", "crash"), detected_seconds=0.25, trains_seconds=1.0, steps_lost=1)
_DRIVER = Aim(
    seen="successor",
    detected_seconds=5.0,
    steps_lost=0,
    restarts=False,
    also="another takes over from its journal; no rank notices",
)
_LOADER = Aim(
    seen="successor",
    detected_seconds=10.0,
    steps_lost=0,
    restarts=False,
    also="only the loader starts again",
)
_KINDS: dict[KindName, FaultKind] = {
    "kill": FaultKind(
        "a process ends at once, without a word",
        "SIGKILL",
        {
            "rank": _CRASH,
            "driver": _DRIVER,
            "executor": Aim(causes=("node",), detected_seconds=3.5, steps_lost=1),
            "node": Aim(
                causes=("node",),
                detected_seconds=3.5,
                also="executor, ranks and the memory of snapshots: goes on from the newest that is stored",
            ),
            "loader": _LOADER,
            "keeper": Aim(
                seen="successor",
                detected_seconds=10.0,
                steps_lost=0,
                restarts=False,
                also="training goes on; snapshots do again",
            ),
        },
    ),
    "segv": FaultKind("a rank reads memory that is not its own", "SIGSEGV", {"rank": _CRASH}),
    "abort": FaultKind("a rank's library gives up", "SIGABRT", {"rank": _CRASH}),
    "stop": FaultKind(
        "a process lives and does nothing more",
        "SIGSTOP",
        {
            "rank": Aim(causes=("stopped",), detected_seconds=3.0, trains_seconds=1.0, steps_lost=1),
            "executor": Aim(causes=("node",), detected_seconds=3.5, steps_lost=1),
            "loader": _LOADER,
            "driver": _DRIVER,
        },
    ),
    "exception": FaultKind(
        "an error of the user's program, the same at the same step in every attempt",
        "the rank raises RuntimeError",
        {
            "rank": Aim(
                causes=("user",),
                detected_seconds=0.25,
                stops=True,
                also="the second time the run stops with the traceback; nobody is evicted",
            )
        },
        inside=True,
    ),
    "hang": FaultKind(
        "a rank goes on living and never enters what the others wait in",
        "the rank sleeps for ever",
        {
            "rank": Aim(
                causes=("hang",),
                detected_seconds=15.0,
                median_steps=5.0,
                trains_seconds=1.0,
                steps_lost=1,
                also="the first that did not enter is named, its stacks are in its log",
            )
        },
        inside=True,
    ),
    "slow": FaultKind(
        "a rank computes several times as long as it should, and goes on doing so",
        "the rank sleeps after each forward and backward, in proportion to the time that it took",
        {
            "rank": Aim(
                seen="diagnosis",
                detected_seconds=60.0,
                median_steps=10.0,
                restarts=False,
                same_bits=False,
                also="work moves away from it where that pays; nobody is evicted",
            )
        },
        inside=True,
    ),
    "host-memory": FaultKind(
        "a rank takes all memory that the node has, and the kernel kills it",
        "a memory control group for the run; the rank fills what is free in it",
        {"rank": Aim(causes=("host memory",), detected_seconds=0.25, trains_seconds=1.0, steps_lost=1)},
        inside=True,
        needs_root=True,
    ),
    "disk-full": FaultKind(
        "the disk of the checkpoints is full for a while",
        "a tmpfs as the folder of checkpoints, filled to its last byte, and freed",
        {
            "storage": Aim(
                seen="storage",
                detected_seconds=10.0,
                steps_lost=0,
                restarts=False,
                also="training does not stop; saves fail softly, and succeed again",
            )
        },
        needs_root=True,
    ),
    "damage": FaultKind(
        "a bit of the newest checkpoint flips, and memory is lost, so that it is needed",
        "a byte of a tensor file is changed, then SIGKILL of the keeper and a rank",
        {
            "checkpoint": Aim(
                seen="load",
                detected_seconds=10.0,
                also="found at load and set aside; goes on from the verified step before",
            )
        },
    ),
    "flip": FaultKind(
        "a bit of a parameter flips in one rank's memory, and nothing fails",
        "the rank flips the highest bit of a parameter's fraction",
        {
            "rank": Aim(
                causes=("corruption",),
                detected_seconds=1.5,
                verified=True,
                trains_seconds=1.0,
                also="the rank that differs from the majority is named, of two both; goes on from before",
            )
        },
        inside=True,
    ),
    "nan-once": FaultKind(
        "a gradient of one rank is not a number, once",
        "the rank writes NaN into the gradients that it is about to send",
        {
            "rank": Aim(
                causes=("nan",),
                detected_seconds=0.25,
                trains_seconds=1.0,
                steps_lost=1,
                also="nothing is updated; gone on replay: told as transient",
            )
        },
        inside=True,
    ),
    "nan-always": FaultKind(
        "a gradient of one rank is not a number, at the same batch in every attempt",
        "the rank writes NaN into the gradients that it is about to send",
        {
            "rank": Aim(
                causes=("nan",),
                detected_seconds=0.25,
                stops=True,
                also="it comes again on replay: the run stops with the reason; nobody is evicted",
            )
        },
        inside=True,
    ),
    "spike": FaultKind(
        "gradients of one rank are a thousand times too large, once",
        "the rank scales those that it is about to send",
        {
            "rank": Aim(
                seen="ranks",
                detected_seconds=0.25,
                median_steps=1.0,
                steps_lost=0,
                restarts=False,
                also="gone when the step is computed again in place: told as transient",
            )
        },
        inside=True,
    ),
}
KINDS: Mapping[KindName, FaultKind] = _KINDS


def aim_of(kind: KindName, where: Target) -> Aim:
    """What a run is to make of it; the scenario has been checked."""
    return KINDS[kind].aims[where]
