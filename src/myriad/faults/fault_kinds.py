"""The kinds of faults: what each is, how it is caused, and its aim, which is how a run must react to it.

Grading reads only these aims. Only their times depend on the machine: they hold for a machine that is not
overloaded.
"""

import signal
from collections.abc import Mapping
from dataclasses import replace

from myriad.faults.recovery_targets import FaultKind, KindName, RecoveryTarget, Target
from myriad.program.actions import Kind as ActionKind

__all__ = ["KINDS", "MOMENTS", "PHASES", "SIGNALS", "recovery_target"]

SIGNALS: Mapping[KindName, signal.Signals] = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}
"""Kinds that only send a signal."""
PHASES = ("starting", "loading", "step", "validating", "saving", "ending")
MOMENTS = (*PHASES, *map(str, ActionKind))
"""Phases of a rank and parts of a step, by their names on the progress page."""


_CRASH = RecoveryTarget(causes=("killed", "crash"), detected_seconds=0.25, trains_seconds=1.0, steps_lost=1)
_DRIVER = RecoveryTarget(
    seen="successor",
    detected_seconds=5.0,
    steps_lost=0,
    restarts=False,
    also="another takes over from its journal; no rank notices",
)
_LOADER = RecoveryTarget(
    seen="successor",
    detected_seconds=10.0,
    steps_lost=0,
    restarts=False,
    also="only the loader starts again",
)
_STANDBY = RecoveryTarget(
    seen="successor",
    detected_seconds=8.0,
    steps_lost=0,
    restarts=False,
    also="its launcher starts another; no rank notices",
)
_REDIS = RecoveryTarget(
    seen="health",
    detected_seconds=8.0,
    steps_lost=0,
    restarts=False,
    also="reported; training goes on from what the driver's machine has",
)
_NOTHING = RecoveryTarget(
    seen="nothing",
    detected_seconds=0.0,
    steps_lost=0,
    restarts=False,
    also="training goes on; nothing is restarted or reported as a fault",
)
_FORK_SERVER = RecoveryTarget(
    causes=("killed",),
    detected_seconds=0.25,
    steps_lost=1,
    also="its ranks end with it, and another is started",
)
_KINDS: dict[KindName, FaultKind] = {
    "kill": FaultKind(
        "a process ends at once, without a word",
        "SIGKILL",
        {
            "rank": _CRASH,
            "driver": _DRIVER,
            "executor": RecoveryTarget(causes=("node",), detected_seconds=3.5, steps_lost=1),
            "node": RecoveryTarget(
                causes=("node",),
                detected_seconds=3.5,
                also="executor, ranks and the memory of snapshots: goes on from the newest that is stored",
            ),
            "fork-server": _FORK_SERVER,
            "loader": _LOADER,
            "keeper": RecoveryTarget(
                seen="successor",
                detected_seconds=10.0,
                steps_lost=0,
                restarts=False,
                also="training goes on; snapshots do again",
            ),
            "standby": _STANDBY,
            "redis": _REDIS,
            "watch": _NOTHING,
        },
    ),
    "segv": FaultKind("a rank reads memory that is not its own", "SIGSEGV", {"rank": _CRASH}),
    "abort": FaultKind("a rank's library gives up", "SIGABRT", {"rank": _CRASH}),
    "stop": FaultKind(
        "a process lives and does nothing more",
        "SIGSTOP",
        {
            "rank": RecoveryTarget(
                causes=("stopped",), detected_seconds=3.0, trains_seconds=1.0, steps_lost=1
            ),
            "executor": RecoveryTarget(causes=("node",), detected_seconds=3.5, steps_lost=1),
            "fork-server": replace(_FORK_SERVER, detected_seconds=5.0),
            "loader": _LOADER,
            "driver": _DRIVER,
            "keeper": RecoveryTarget(
                seen="storage",
                detected_seconds=5.0,
                steps_lost=0,
                restarts=False,
                also="training goes on; it is continued, so its snapshots are not lost",
            ),
            "standby": _STANDBY,
            "redis": _REDIS,
            "watch": _NOTHING,
        },
    ),
    "freeze": FaultKind(
        "a process hangs: it is alive, and none of its threads runs",
        "all its threads are held by ptrace",
        {
            "rank": RecoveryTarget(causes=("hang",), detected_seconds=15.0, median_steps=5.0, steps_lost=1),
            "executor": RecoveryTarget(causes=("node",), detected_seconds=5.0, steps_lost=1),
            "fork-server": replace(_FORK_SERVER, detected_seconds=8.0),
            "loader": _LOADER,
            "driver": _DRIVER,
            "standby": _STANDBY,
            "redis": _REDIS,
            "watch": _NOTHING,
            "keeper": RecoveryTarget(
                seen="storage",
                detected_seconds=8.0,
                steps_lost=0,
                restarts=False,
                also="it is killed, with the snapshots in its memory; training goes on with another",
            ),
        },
    ),
    "slow-process": FaultKind(
        "a process has a fifth of the time, for lasts_seconds",
        "SIGSTOP for 0.4 s and SIGCONT for 0.1 s, again and again",
        dict.fromkeys(("rank", "driver", "executor", "fork-server", "loader", "keeper", "redis"), _NOTHING),
    ),
    "pause": FaultKind(
        "the whole machine is paused for lasts_seconds, as containers and virtual machines are",
        "all threads of all processes of the run, and of its launcher, are held by ptrace",
        {"run": _NOTHING},
    ),
    "exception": FaultKind(
        "an error of the user's program, the same at the same step in every attempt",
        "the rank raises RuntimeError",
        {
            "rank": RecoveryTarget(
                causes=("user",),
                detected_seconds=0.25,
                stops=True,
                also="the second time the run stops with the traceback; no node is evicted",
            )
        },
        inside=True,
    ),
    "hang": FaultKind(
        "a rank goes on living and never enters what the others wait in",
        "the rank sleeps for ever",
        {
            "rank": RecoveryTarget(
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
            "rank": RecoveryTarget(
                seen="diagnosis",
                detected_seconds=60.0,
                median_steps=10.0,
                restarts=False,
                same_bits=False,
                also="work moves away from it where that pays; no node is evicted",
            )
        },
        inside=True,
    ),
    "host-memory": FaultKind(
        "a rank takes all memory that the node has, and the kernel kills it",
        "a memory control group for the run; the rank fills what is free in it",
        {
            "rank": RecoveryTarget(
                causes=("host memory",), detected_seconds=0.25, trains_seconds=1.0, steps_lost=1
            )
        },
        inside=True,
        needs_root=True,
    ),
    "disk-full": FaultKind(
        "the disk of the checkpoints is full for a while",
        "a tmpfs as the folder of checkpoints, filled to its last byte, and freed",
        {
            "storage": RecoveryTarget(
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
        "a bit of the newest checkpoint flips, and memory is lost, so that it is needed; or bits of tokens",
        "a byte of a tensor file is changed, then SIGKILL of the keeper and a rank; or a byte of each block "
        "of the tokens of a copy of the corpus, so that whatever is read next is wrong",
        {
            "checkpoint": RecoveryTarget(
                seen="load",
                detected_seconds=10.0,
                also="found at load and set aside; goes on from the verified step before",
            ),
            "corpus": RecoveryTarget(
                causes=("data",),
                detected_seconds=5.0,
                stops=True,
                also="the run stops with the file and the byte, and is not tried again",
            ),
        },
    ),
    "flip": FaultKind(
        "a bit of a parameter flips in one rank's memory, and nothing fails",
        "the rank flips the highest bit of a parameter's fraction",
        {
            "rank": RecoveryTarget(
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
            "rank": RecoveryTarget(
                causes=("nan",),
                detected_seconds=0.25,
                trains_seconds=1.0,
                steps_lost=1,
                also="nothing is updated; gone on replay: reported as transient",
            )
        },
        inside=True,
    ),
    "nan-always": FaultKind(
        "a gradient of one rank is not a number, at the same batch in every attempt",
        "the rank writes NaN into the gradients that it is about to send",
        {
            "rank": RecoveryTarget(
                causes=("nan",),
                detected_seconds=0.25,
                stops=True,
                also="it comes again on replay: the run stops with the reason; no node is evicted",
            )
        },
        inside=True,
    ),
    "spike": FaultKind(
        "gradients of one rank are a thousand times too large, once",
        "the rank scales those that it is about to send",
        {
            "rank": RecoveryTarget(
                seen="ranks",
                detected_seconds=0.25,
                median_steps=1.0,
                steps_lost=0,
                restarts=False,
                also="gone when the step is computed again in place: reported as transient",
            )
        },
        inside=True,
    ),
    "link-down": FaultKind(
        "a node's link under ranks goes down and stays so; the driver is reached by another",
        "`ip link set down` of the switch's port into which the node's eth1 goes",
        {
            "node": RecoveryTarget(
                causes=("link",),
                detected_seconds=2.0,
                gives_way=True,
                also="the link is named; ranks end when it has been down for 3 s",
            )
        },
        needs_root=True,
        needs_hosts=True,
    ),
    "link-flap": FaultKind(
        "a node's link under ranks is down for a moment",
        "the same, and up again after lasts_seconds",
        {
            "node": RecoveryTarget(
                seen="health",
                detected_seconds=2.0,
                steps_lost=0,
                restarts=False,
                also="reported, and ranks go on",
            )
        },
        needs_root=True,
        needs_hosts=True,
    ),
    "link-flapping": FaultKind(
        "a node's link under ranks goes down three times in five minutes",
        "the same three times, up for as long as it was down in between",
        {
            "node": RecoveryTarget(
                seen="health",
                detected_seconds=2.0,
                gives_way=True,
                also="after the third time, at the end of a step: none is lost",
            )
        },
        needs_root=True,
        needs_hosts=True,
    ),
    "partition": FaultKind(
        "a node is cut off from the driver and from all others",
        "all its ports of the switches are taken down",
        {
            "node": RecoveryTarget(
                causes=("node",),
                detected_seconds=3.5,
                gives_way=True,
                fenced_seconds=3.5,
                also="its own side ends its ranks in that time, and can store nothing",
            )
        },
        needs_root=True,
        needs_hosts=True,
    ),
    "device-fault": FaultKind(
        "a rank's device reports an error of its memory that cannot be corrected",
        "Xid 95 in what a stand-in for the devices' driver says (MYRIAD_DEVICES)",
        {"rank": RecoveryTarget(causes=("device",), detected_seconds=10.0, steps_lost=1)},
    ),
    "device-lost": FaultKind(
        "a rank's device is gone",
        "the same stand-in says so",
        {"rank": RecoveryTarget(causes=("device",), detected_seconds=10.0, gives_way=True)},
    ),
    "device-complaint": FaultKind(
        "a rank's device reports what the program did",
        "Xid 31, by the same stand-in",
        {
            "rank": RecoveryTarget(
                seen="health",
                detected_seconds=10.0,
                steps_lost=0,
                restarts=False,
                also="reported; no node is evicted, nothing ends",
            )
        },
    ),
}
KINDS: Mapping[KindName, FaultKind] = _KINDS


def recovery_target(kind: KindName, where: Target) -> RecoveryTarget:
    """Return the aim of a checked fault."""
    return KINDS[kind].aims[where]
