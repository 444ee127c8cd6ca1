"""What it costs a node to search its ranks' logs for errors, and how soon one is found.

    python benchmarks/supervise/log_search.py [--ranks 8] [--seconds 8]

The process that a node agent starts searches one log for each rank: first nothing is written, then ten lines
a second to each, then 1 MB/s, then as much as this process can write. In each part an error is written now
and then; how long it takes until the process reports it is the delay. Processor time is that of the searching
process.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINE = "2026-11-23 10:00:00,{:03d} [rank{}] step {} loss 3.1415 tokens/s 61,000 NCCL INFO ring ok\n"


class Search:
    """The process that searches."""

    def __init__(self, logs: list[Path]) -> None:
        words = [sys.executable, "-m", "myriad.supervise.agent.log_scan", str(os.getpid()), "/nonexistent"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        order = {"files": [[rank, str(log)] for rank, log in enumerate(logs)], "from_end": False, "epoch": 0}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.text = b""

    def said(self, word: bytes) -> bool:
        """Whether a line with this word has been read."""
        output = self.process.stdout
        assert output is not None
        while select.select([output], [], [], 0)[0] and (data := os.read(output.fileno(), 2**16)):
            self.text += data
        return word in self.text

    def cpu_seconds(self) -> float:
        """Processor time until now."""
        times = Path(f"/proc/{self.process.pid}/schedstat").read_text().split()
        return int(times[0]) / 1e9

    def memory_mib(self) -> float:
        """The most memory that it had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def measure(search: Search, logs: list[Path], seconds: float, lines_at_once: int, pause: float) -> list[str]:
    """Write for so long; return the cells of a row."""
    files = [log.open("ab", buffering=0) for log in logs]
    block = "".join(LINE.format(at % 1000, 0, at) for at in range(lines_at_once)).encode()
    began, cpu, written, delays, asked = time.monotonic(), search.cpu_seconds(), 0, list[float](), 0.0
    word, due = b"", began + 0.5
    while (now := time.monotonic()) - began < seconds:
        for file in files:
            written += file.write(block) if block else 0
        if word and search.said(word):
            delays.append(now - asked)
            word, due = b"", now + 0.7
        elif not word and now >= due:
            name = "".join(chr(97 + digit) for digit in divmod(int(now * 10) % 676, 26))
            word, asked = f"trouble-{name}".encode(), now
            files[0].write(b"RuntimeError: CUDA error: " + word + b"\n")
        time.sleep(pause)
    took = time.monotonic() - began
    for file in files:
        file.close()
    worst = f"{max(delays):.2f} s of {len(delays)}" if delays else "none"
    share = (search.cpu_seconds() - cpu) / took
    return [f"{written / took / 1e6:.1f} MB/s", f"{share:.1%}", f"{search.memory_mib():.0f} MiB", worst]


def main() -> None:
    """Measure each load and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}-attempt-1.log" for rank in range(given.ranks)]
        for log in logs:
            log.touch()
        search = Search(logs)
        time.sleep(1.0)
        print(f"{'':14}{'written':>14}{'of a core':>12}{'memory':>10}{'slowest found after':>24}")
        rows = (
            ("nothing", 0, 0.02),
            ("ten lines/s", 1, 0.1),
            ("1 MB/s a rank", 1000, 0.1),
            ("a flood", 2000, 0.0),
        )
        for name, lines, pause in rows:
            cells = measure(search, logs, given.seconds, lines, pause)
            print(f"{name:14}{cells[0]:>14}{cells[1]:>12}{cells[2]:>10}{cells[3]:>24}")
        search.process.kill()


if __name__ == "__main__":
    main()
