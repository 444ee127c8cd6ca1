"""Saving and loading: Myriad's checkpoints beside torch's distributed checkpoints (DCP), in the same run.

    python benchmarks/checkpoint/checkpoint.py                        1 GB a rank; 1, 2, 4 ranks; all storages
    python benchmarks/checkpoint/checkpoint.py --quick                32 MB a rank, no S3: under a minute
    python benchmarks/checkpoint/checkpoint.py --storage disk --only Myriad thread    some of it
    python benchmarks/checkpoint/checkpoint.py --json FILE --svg FILE     the rows, and a chart

Every rank is a process of one thread that trains: matrix products for about ``--step-seconds``, then a change
of every byte of its state, a transformer's parameters and Adam's moments (`checkpoint_state.py`). Contenders
(`checkpoint_contenders.py`, `checkpoint_myriad.py`) take turns with each number of ranks, sharded (each rank
holds its own part) and replicated (all hold the same, which is to be written once). Each saves once more than
counted, first: that is where processes start and memory is allocated. A save begins when the one before is
durable and quiet steps have been made, so no save waits for another. Only the newest checkpoint is kept.

What is measured, and how, is said in `checkpoint_ranks.py`, the storages in `checkpoint_storage.py`. The full
disk and the S3 server need root; so does loading with cold caches. The restart from memory is Myriad's alone:
`checkpoint_restart.py`.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_chart import draw
from checkpoint_contenders import CONTENDERS, OURS
from checkpoint_crew import CrewError, run_crew
from checkpoint_myriad import Myriad
from checkpoint_ranks import Make, Plan, Trained, load, train, train_on_full, write_alone
from checkpoint_report import Full, Restart, Row, Spread, row_of, show_full, show_rows, show_summary
from checkpoint_restart import restart_seconds
from checkpoint_state import Place, local_shapes
from checkpoint_storage import Storage, disk, full, make_room, remove, s3

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import bits_per_second

_SHARINGS, _STORAGES = ("sharded", "replicated"), ("disk", "s3", "full")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=1000, help="of state on each rank (1000)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="(1 2 4)")
    parser.add_argument("--sharing", nargs="+", choices=_SHARINGS, default=list(_SHARINGS))
    parser.add_argument("--storage", nargs="*", choices=_STORAGES, help="(all; with --quick: disk, full)")
    parser.add_argument("--saves", type=int, default=5, help="counted ones of each contender (5)")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="of products in a step (1.0)")
    parser.add_argument("--quiet-steps", type=int, default=3, help="before each save (3)")
    parser.add_argument("--s3-megabytes", type=float, default=200, help="as --megabytes, on S3 (200)")
    parser.add_argument("--rate", default="1gbit", help="of the S3 server's link (1gbit)")
    parser.add_argument("--restarts", type=int, default=5, help="kills of a rank; 0: none (5)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk meant")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one contender's turn (900)")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="a small run of each, in under a minute")
    parser.add_argument("--verbose", action="store_true", help="show what ranks write on stderr")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--svg", type=Path, help="draw stall and time to durable there")
    chosen = parser.parse_args(arguments)
    if chosen.storage is None:
        chosen.storage = ["disk", "full"] if chosen.quick else list(_STORAGES)
    if chosen.quick:
        small = {
            "megabytes": 32.0,
            "s3_megabytes": 32.0,
            "ranks": [2],
            "sharing": ["sharded"],
            "saves": 1,
            "restarts": min(2, chosen.restarts),
        }
        vars(chosen).update(small | {"step_seconds": 0.1, "quiet_steps": 2, "timeout": 60.0})
    if min(chosen.ranks) < 1 or chosen.saves < 1 or chosen.quiet_steps < 1 or chosen.megabytes <= 0:
        parser.error("--ranks, --saves, --quiet-steps and --megabytes must be at least 1")
    try:
        bits_per_second(chosen.rate)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].replace("|", "/")


class Bench:
    """Gives contenders their turns."""

    def __init__(self, chosen: argparse.Namespace, memory: str) -> None:
        self._chosen, self._memory, self._megabytes = chosen, memory, chosen.megabytes
        found = [name for name in CONTENDERS if any(part.lower() in name.lower() for part in chosen.only)]
        self.contenders: dict[str, Make] = {name: CONTENDERS[name] for name in found}

    def _run(
        self, storage: Storage, world: int, function: Callable[[Place], Any], root: str, *, timeout: float = 0
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(dir=self._memory) as memory:
            return run_crew(
                world,
                lambda rank: function(Place(rank, world, root, memory)),
                timeout or self._chosen.timeout,
                enter=storage.enter,
                environment=storage.environment,
                quiet=not self._chosen.verbose,
            )

    def _plan(self, sharing: str) -> Plan:
        chosen = self._chosen
        return Plan(self._megabytes, sharing, chosen.saves, chosen.step_seconds, chosen.quiet_steps)

    def rows(self, name: str, storage: Storage) -> list[Row]:
        """All rows of one storage, printed as they come."""
        rows = []
        self._megabytes = self._chosen.s3_megabytes if storage.environment else self._chosen.megabytes
        for sharing in self._chosen.sharing:
            for world in self._chosen.ranks:
                place = (name, sharing, world)
                try:
                    alone = max(
                        self._run(storage, world, partial(write_alone, self._plan(sharing)), storage.root)
                    )
                    group = [self._row(place, storage, contender, alone) for contender in self.contenders]
                except CrewError as error:
                    group = failed(place, self.contenders, _reason(error))
                print(show_rows(group, self._megabytes), flush=True)
                rows += group
        return rows

    def _row(self, place: tuple[str, str, int], storage: Storage, contender: str, alone: float) -> Row:
        name, sharing, world = place
        _log(f"{name}, {sharing}, {world} ranks: {contender}")
        make, plan = self.contenders[contender], self._plan(sharing)
        root = f"{storage.root}/{list(CONTENDERS).index(contender)}"
        try:
            trained: list[Trained] = self._run(storage, world, partial(train, make, plan), root)
            row = row_of(place, contender, contender == OURS, trained, alone)
            loaded = self._run(storage, world, partial(load, make, plan, trained[0].last_step), root)
        except CrewError as error:
            _log(str(error))
            return Row(*place, contender, contender == OURS, failed=_reason(error))
        finally:
            self._run(storage, 1, lambda place: remove(place.root), root)
        cold = [seen.cold_seconds for seen in loaded if seen.cold_seconds is not None]
        return replace(
            row,
            load_cold_seconds=max(cold, default=None),
            load_warm_seconds=max(seen.warm_seconds for seen in loaded),
            same_bits=[seen.digest for seen in loaded] == [seen.last_digest for seen in trained],
        )

    def full(self) -> list[Full]:
        """Every contender on a disk with room for half of what it writes, then for four times as much."""
        rows = []
        self._megabytes = self._chosen.megabytes
        for contender, make in self.contenders.items():
            _log(f"full disk: {contender}")
            try:
                rows.append(self._full(contender, make))
            except CrewError as error:
                _log(str(error))
                rows.append(Full(contender, f"failed: {_reason(error)}"))
        return rows

    def _full(self, contender: str, make: Make) -> Full:
        world, plan = min(self._chosen.ranks), self._plan("sharded")
        num_bytes = int(plan.megabytes * 1e6) * world
        with full(self._chosen.folder, num_bytes // 2) as storage:
            room = partial(make_room, storage.root, 4 * num_bytes)
            work = partial(train_on_full, make, plan, room)
            seen = self._run(
                storage, world, work, f"{storage.root}/all", timeout=min(300, self._chosen.timeout)
            )
            told = "; ".join(dict.fromkeys(rank["told"] for rank in seen))
            again = "; ".join(dict.fromkeys(rank["again"] for rank in seen))
            try:
                check = partial(load, make, plan, seen[0]["step"])
                loaded = self._run(storage, world, check, f"{storage.root}/all")
                same = [rank.digest for rank in loaded] == [rank["digest"] for rank in seen]
                again += ", and loads the same bits" if same else ", but loads OTHER BITS"
            except CrewError as error:
                again += f", and does not load: {_reason(error)}"
        return Full(contender, told, min(rank["steps"] for rank in seen), again)

    def restart(self) -> Restart:
        """Myriad's rank, killed again and again."""
        figures = []
        for number in range(self._chosen.restarts):
            _log(f"restart {number + 1}")
            with disk(self._chosen.folder) as storage:
                place = Place(0, 1, storage.root, self._memory)
                figures.append(restart_seconds(Myriad, self._chosen.megabytes, place))
        seconds = Spread.of([seconds for seconds, _ in figures])
        return Restart(self._chosen.megabytes, seconds, all(same for _, same in figures))


def failed(
    place: tuple[str, str, int], contenders: Sequence[str] | dict[str, Make], reason: str
) -> list[Row]:
    """Rows of a storage that is not to be had."""
    return [Row(*place, contender, contender == OURS, failed=reason) for contender in contenders]


def _storages(chosen: argparse.Namespace) -> dict[str, Callable[[], AbstractContextManager[Storage]]]:
    made: dict[str, Callable[[], AbstractContextManager[Storage]]] = {}
    if "disk" in chosen.storage:
        made["disk"] = partial(disk, chosen.folder)
    if "s3" in chosen.storage:
        made[f"S3 at {chosen.rate}"] = partial(s3, chosen.rate)
    return made


def measure(bench: Bench, chosen: argparse.Namespace) -> tuple[list[Row], list[Full], list[Restart]]:
    """Everything asked for, printed as it comes."""
    rows: list[Row] = []
    for name, open_storage in _storages(chosen).items():
        try:
            with open_storage() as storage:
                rows += bench.rows(name, storage)
        except CrewError as error:
            print(f"\n### {name}\n\nnot measured: {_reason(error)}", flush=True)
    if rows:
        print(show_summary(rows), flush=True)
    fulls = bench.full() if "full" in chosen.storage else []
    if fulls:
        ranks = f"{min(chosen.ranks)} rank(s) of {chosen.megabytes:g} MB"
        print(show_full(fulls, f"A disk with room for half of a save, sharded, {ranks}"), flush=True)
    restarts = [bench.restart()] if chosen.restarts and OURS in bench.contenders else []
    for restart in restarts:
        spread, bits = restart.seconds, "equal" if restart.same_bits else "DIFFERENT"
        print(f"\n{OURS}, from SIGKILL of a rank to its {restart.megabytes:g} MB back in a new process:")
        print(f"{spread.median * 1e3:.0f} ms (median), {spread.largest * 1e3:.0f} ms (most); bits {bits}")
    return rows, fulls, restarts


def main(arguments: Sequence[str]) -> None:
    """Measures and prints."""
    chosen = parse(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # takes the folders away
    num_tensors = len(local_shapes(chosen.megabytes))
    print(f"{chosen.megabytes:g} MB a rank in {num_tensors} float32 tensors, {chosen.saves} saves counted")
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=shared if shared.is_dir() else None, prefix="checkpoints-"
    ) as memory:
        rows, fulls, restarts = measure(Bench(chosen, memory), chosen)
    if chosen.json:
        found: dict[str, Sequence[Any]] = {"rows": rows, "full": fulls, "restart": restarts}
        plain = {name: [asdict(row) for row in of_name] for name, of_name in found.items()}
        chosen.json.write_text(json.dumps(plain, indent=1) + "\n")
    if chosen.svg:
        chosen.svg.write_text(draw(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
