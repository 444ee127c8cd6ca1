"""How fast commands that compute are on idle cores, and beside a process that never stops.

    python benchmarks/training/busy_machine.py [--steps 40] [--busy 1] [--only train,sample] [--json]

Each command runs twice: with the machine to itself ("quiet"), and beside ``--busy`` Python loops. "share" is
the slowdown if the cores were divided evenly among all that computes; the aim is at most twice that. Training
is measured by the median of its steps, every other command as a whole, with its start. Under six minutes on
two cores.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_MYRIAD = [sys.executable, "-m", "myriad"]
_SMALL = ["--model.layers", "2", "--model.hidden", "256", "--model.heads", "4"]
_AIM = 2.0


@dataclass(frozen=True)
class Row:
    """Speeds of one command."""

    command: str
    unit: str
    quiet: float
    busy: float
    ratio: float
    """How many times slower it is beside the loops."""
    share: float
    """How many times slower it would be if cores were shared evenly."""

    @property
    def meets_aim(self) -> bool:
        """Whether it is at most twice as slow as its share of the cores."""
        return self.ratio <= _AIM * self.share


@dataclass(frozen=True)
class Case:
    """One command, run in a fresh folder each time; ``run`` returns its figure."""

    command: str
    unit: str
    run: Callable[[Path], float]
    num_computing: int
    """Threads and processes that compute at the same time."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="steps of each training, at least 6")
    parser.add_argument("--busy", type=int, default=1, help="processes that never stop")
    parser.add_argument("--only", default="", help="commands to measure, by their first words, with commas")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    wanted = tuple(filter(None, given.only.split(",")))
    started, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder)
        for case in _cases(folder, given.steps):
            if not wanted or case.command.startswith(wanted):
                rows.append(_measure(case, folder, given.busy))
                _progress(rows[-1])
    if given.json:
        print(json.dumps([asdict(row) | {"meets_aim": row.meets_aim} for row in rows]))
        return
    print(f"\n{'command':<30}{'unit':<10}{'quiet':>9}{'busy':>9}{'ratio':>8}{'share':>8}  aim")
    for row in rows:
        print(_line(row))
    loops = f"beside {given.busy} busy loop{'' if given.busy == 1 else 's'}"
    print(f"{len(os.sched_getaffinity(0))} cores, {loops}, {time.perf_counter() - started:.0f} s in all")


def _cases(folder: Path, steps: int) -> list[Case]:
    """All commands that compute."""

    def train(name: str, *layout: str) -> Callable[[Path], float]:
        return lambda at: _train(at / name, steps, *layout)

    def whole(*words: str) -> Callable[[Path], float]:
        return lambda at: _seconds(*(word.replace("{at}", str(at)) for word in words))

    run, small = str(folder / "run"), str(folder / "small")
    layouts = ["--layout", "dp=1", "--layout", "dp=2", "--steps", "10"]
    return [
        Case("train, 1 rank, 2 threads", "tokens/s", train("one", "--train.threads", "2"), 2),
        Case("train, 2 ranks, 1 thread", "tokens/s", train("two", "--layout.dp", "2"), 2),
        Case("parity dp=1 dp=2, 10 steps", "s", whole("parity", "tiny", *layouts), 2),
        Case("sample, 200 tokens", "s", whole("sample", run, "--tokens", "200", "--prompt", "def "), 1),
        Case("doctor", "s", whole("doctor", "--folder", "{at}"), 2),
        Case("plan --measure", "s", whole("plan", "tiny", "--measure", "--out", "{at}/plan.toml"), 2),
        Case("plan", "s", whole("plan", "llama3-8b", "--cluster", "h200-512xh200"), 1),
        Case(
            "data prepare", "s", whole("data", "prepare", str(folder / "texts"), "--output", "{at}/corpus"), 2
        ),
        Case("checkpoint verify", "s", whole("checkpoint", "verify", small), 2),
        Case("checkpoint diff", "s", whole("checkpoint", "diff", small, small), 2),
        Case(
            "checkpoint reshard",
            "s",
            whole("checkpoint", "reshard", small, "{at}/cut", "--layout.tp", "2"),
            2,
        ),
        Case("checkpoint export", "s", whole("checkpoint", "export", small, "{at}/hf"), 2),
    ]


def _prepare(folder: Path) -> None:
    """Make what commands read: two runs, and 3 MB of text."""
    _seconds("train", "tiny", "--run", str(folder / "run"), "--train.steps", "4")
    _seconds("train", "tiny", "--run", str(folder / "small"), "--train.steps", "4", *_SMALL)
    texts = folder / "texts"
    texts.mkdir()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:120]
    for path in sources:
        (texts / f"{path.stem}.txt").write_text(path.read_text(errors="replace"))


def _measure(case: Case, folder: Path, busy: int) -> Row:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=folder) as at:
        quiet = case.run(Path(at))
    with tempfile.TemporaryDirectory(dir=folder) as at, _loops(busy):
        beside = case.run(Path(at))
    ratio = quiet / beside if case.unit == "tokens/s" else beside / quiet
    share = max(1.0, (case.num_computing + busy) / cores)
    return Row(case.command, case.unit, quiet, beside, ratio, share)


def _train(run: Path, steps: int, *layout: str) -> float:
    """Return the median tokens per second of a training's steps after the first three."""
    _seconds("train", "tiny", "--run", str(run), "--train.steps", str(steps), *layout)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines[3:])


def _seconds(*words: str) -> float:
    """Return how long one command takes; 1 is an answer of ``doctor``, which finds a busy node slow."""
    with tempfile.TemporaryDirectory() as cache:  # plan --measure leaves the user's own measurement as it is
        environment = os.environ | ({"XDG_CACHE_HOME": cache} if "--measure" in words else {})
        start = time.perf_counter()
        done = subprocess.run([*_MYRIAD, *words], capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - start
    if done.returncode not in ((0, 1) if words[0] == "doctor" else (0,)):
        sys.exit(f"myriad {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return seconds


def _line(row: Row) -> str:
    figures = f"{row.quiet:>9,.4g}{row.busy:>9,.4g}{row.ratio:>7.2f}x{row.share:>7.2f}x"
    return f"{row.command:<30}{row.unit:<10}{figures}  {'met' if row.meets_aim else 'missed'}"


def _progress(row: Row) -> None:
    print(_line(row), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
