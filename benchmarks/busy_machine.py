"""How fast commands that compute are on idle cores, and beside a process that never stops.

    python benchmarks/busy_machine.py [--steps 60] [--busy 1] [--json]

Each command runs twice: with the machine to itself, and beside ``--busy`` Python loops. Commands: `myriad
train tiny` as one rank with two threads and as two ranks with one, `myriad parity` of these two layouts, and
`myriad sample` of 200 tokens. "fair" is the slowdown if cores were shared evenly among all that computes; the
aim is at most twice that. Speeds of training are medians over steps; parity and sample are whole commands.
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

_MYRIAD = [sys.executable, "-m", "myriad.cli.main"]
_COMPUTING = 2


@dataclass(frozen=True)
class Row:
    """Speeds of one command."""

    command: str
    unit: str
    quiet: float
    busy: float
    slowdown: float
    fair: float


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--busy", type=int, default=1, help="processes that never stop")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), given.steps, given.busy)
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'command':<28}{'unit':<10}{'quiet':>9}{'busy':>9}{'slower':>9}{'fair':>7}")
    for row in rows:
        figures = f"{row.quiet:>9,.4g}{row.busy:>9,.4g}{row.slowdown:>8.2f}x{row.fair:>6.2f}x"
        print(f"{row.command:<28}{row.unit:<10}{figures}")


def measure(folder: Path, steps: int, busy: int) -> list[Row]:
    """All commands, each quiet and then busy."""
    cores = len(os.sched_getaffinity(0))

    def row(command: str, unit: str, run: Callable[[str], float], computing: int) -> Row:
        quiet = run("quiet")
        with _loops(busy):
            beside = run("busy")
        slowdown = quiet / beside if unit == "tokens/s" else beside / quiet
        fair = max(1.0, (computing + busy) / cores)
        return Row(command, unit, quiet, beside, slowdown, fair)

    def train(name: str, *layout: str) -> Callable[[str], float]:
        return lambda when: _train(folder / f"{name}-{when}", steps, *layout)

    layouts = ["--layout", "dp=1", "--layout", "dp=2", "--steps", "20"]
    tokens = ["--tokens", "200", "--prompt", "def "]
    return [
        row("train, 1 rank, 2 threads", "tokens/s", train("one", "--train.threads", "2"), _COMPUTING),
        row("train, 2 ranks, 1 thread", "tokens/s", train("two", "--layout.dp", "2"), _COMPUTING),
        row("parity dp=1 dp=2", "s", lambda _: _seconds("parity", "tiny", *layouts), _COMPUTING),
        row("sample, 200 tokens", "s", lambda _: _seconds("sample", str(folder / "one-quiet"), *tokens), 1),
    ]


def _train(run: Path, steps: int, *layout: str) -> float:
    """Tokens per second."""
    _seconds("train", "tiny", "--run", str(run), "--train.steps", str(steps), *layout)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines[3:])


def _seconds(*words: str) -> float:
    start = time.perf_counter()
    done = subprocess.run([*_MYRIAD, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"myriad {' '.join(words)}: {done.stderr}")
    return time.perf_counter() - start


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
