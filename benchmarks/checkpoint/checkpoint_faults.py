"""Are checkpoints ever lost, or ever wrong? Exits 1 when anything wrong was accepted or anything promised
was lost.

    python benchmarks/checkpoint/checkpoint_faults.py [--kills 200] [--flips 10000] [--seed 1] [--json]

(a) kill -9 at random instants of saving and loading (`fault_kills`): the next start must come up, with
    exactly the state of the step it says, and none older than what was promised.
(b) Damage at rest (`fault_damage`): single flipped bits in every file of a checkpoint and in a snapshot
server's
    memory, zeros, cuts, deletions, files of other steps and ranks. Must be named, never be loaded, and be
    got round.
(c) For comparison the same flips in what torch.distributed.checkpoint writes by itself.

accepted: a state that is not the one of its step, or damage that was not named. recovered: a run goes on from
the newest good state. lost: it does not, though there is one.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from fault_damage import damage_files, damage_memory, damage_plain_files, swap_ranks, swap_steps
from fault_kills import Outcome, kill_often

__all__ = ["all_damage", "failures", "table"]

PLAIN = "flipped bit, plain torch"
_TOLD_SECONDS = 5.0


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._last = what, total, time.monotonic()

    def __call__(self, done: int) -> None:
        if done == self._total or time.monotonic() - self._last > _TOLD_SECONDS:
            self._last = time.monotonic()
            print(f"{self._what}: {done} of {self._total}", file=sys.stderr, flush=True)


Show = Callable[[str, int], Callable[[int], None]]


def _silent(what: str, total: int) -> Callable[[int], None]:
    return lambda done: None


def all_damage(flips: int, seed: int, where: Path, show: Show = _silent) -> dict[str, Outcome]:
    """Outcomes by kind: files, whole steps, ranks, memory, and plain torch."""
    found = damage_files(flips, seed, where / "files", show("flips and larger damage", flips))
    found["folder of another step"] = swap_steps(where / "steps")
    found["files of two ranks swapped"] = swap_ranks(where / "ranks")
    tries = max(4, flips // 20)
    found |= damage_memory(tries, seed, where / "memory", show("flips in memory", tries))
    tries = max(4, flips // 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found[PLAIN] = damage_plain_files(tries, seed, where / "plain", show("flips, plain torch", tries))
    return found


def failures(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Why the proof fails: a line for each kind; none when it stands."""
    return [
        f"{name}: {one.wrong} accepted, {one.lost} lost of {one.tried}: {'; '.join(one.notes[:3])}"
        for name, one in outcomes.items()
        if name != PLAIN and (one.wrong or one.lost or one.recovered < one.tried)
    ]


def table(outcomes: Mapping[str, Outcome]) -> str:
    """A row for each kind."""
    lines = [f"{'damage':32}{'tried':>8}{'accepted':>10}{'recovered':>11}{'lost':>6}"]
    for name, one in outcomes.items():
        lines.append(f"{name:32}{one.tried:8}{one.wrong:10}{one.recovered:11}{one.lost:6}")
    return "\n".join(lines)


def main() -> int:
    """Tries, prints, judges."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where, seed = Path(folder), settings.seed
        killed, midst = kill_often(settings.kills, seed, where, _Progress("kills", settings.kills))
        outcomes = {f"kill -9: {name}": one for name, one in killed.items()}
        outcomes |= all_damage(settings.flips, seed, where, _Progress)
    print(table(outcomes))
    print("kills in the midst of: " + ", ".join(f"{name} {count}" for name, count in midst.items()))
    problems = failures(outcomes)
    print("\n".join(problems) if problems else "nothing wrong was accepted, nothing promised was lost")
    if settings.json:
        print(json.dumps({"midst": midst} | {name: asdict(one) for name, one in outcomes.items()}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
