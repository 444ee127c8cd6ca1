"""The same GPT over links of falling rate: Myriad's layouts against plain PyTorch and DeepSpeed.

    python benchmarks/links/bandwidth.py                          unshaped to 50 Mbit/s, two hosts: 10 minutes
    python benchmarks/links/bandwidth.py --quick                  two rates, shorter visits
    python benchmarks/links/bandwidth.py --check                  only: are the peers' gradients right here?
    python benchmarks/links/bandwidth.py --json FILE --svg FILE   the rows, and a chart

Hosts are those of `hosts.py` (needs root), with one rank of one thread on one core each. Every contender
trains the same model on the same batches in float32 (`peers/work.py`), in the settings of
`bandwidth_contenders.py`. At each rate all settings take a turn; then the best setting of every contender
takes another (unless a step is longer than two visits should be), and the median of the steps of both is its
figure. A setting that was 1.15 x slower than its contender's best (1.3 x without shaping) is not tried again
at lower rates.

Peers are not compiled: torch.compile brought 5 % to the plain loop on the processor this was written on, and
would be compiled anew at each visit.

A step cannot be shorter than what the ranks compute, nor than what the busiest host must send
(`bandwidth_contenders.py`) at the set rate; headers alone cost 4 % of that. "compute" is measured: each
rank trains its share of the batch alone, all at the same time, in the best of three micro-batches. That has
no pipeline bubble, so a pipeline cannot reach the bound.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bandwidth_chart import draw
from bandwidth_contenders import Machines, Setting, all_settings
from bandwidth_report import Row, print_rate, print_summary, rows_of

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from host_ranks import RankError
from hosts import Hosts, bits_per_second
from peers import deepspeed_peer
from peers.check import largest_difference
from peers.myriad_side import alone
from peers.work import Contender, Peer, Timing, Work, run_contender

UNSHAPED = "unshaped"
_MOST_STEPS = 8
_TOO_SLOW = {True: 1.15, False: 1.3}
"""Than the best setting of the same contender, on shaped links or not, to be tried again at lower rates."""
_TINY = Work(layers=7, hidden=64, heads=4, vocabulary=256, sequence=32, global_batch=8)


@dataclass
class Entry:
    """A setting and its steps at the rate of the moment."""

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    sent_bytes: float = 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, words in (
        ("layers", 7, "blocks of the model; the head multiplies about as much as one more"),
        ("hidden", 256, "width"),
        ("heads", 4, "attention heads"),
        ("vocabulary", 3072, "tokens known"),
        ("sequence", 256, "tokens in a sequence"),
        ("global-batch", 8, "sequences in a step, over all ranks"),
        ("hosts", 2, "namespaces"),
        ("ranks-per-host", 1, "ranks in each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words} ({default})")
    rates = [UNSHAPED, "1gbit", "400mbit", "200mbit", "100mbit", "50mbit"]
    parser.add_argument("--rates", nargs="+", type=_rate, default=rates, help="highest first, as tc has them")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of timed steps in a visit; at least 2 steps"
    )
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="two rates, one timed step in a visit")
    parser.add_argument("--check", action="store_true", help="only compare gradients with one process's")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--svg", type=Path, help="draw step time against rate there")
    chosen = parser.parse_args(arguments)
    world = chosen.hosts * chosen.ranks_per_host
    if world < 2 or chosen.global_batch % world:
        parser.error(
            f"--global-batch {chosen.global_batch} must be a multiple of the {world} ranks, at least 2"
        )
    if chosen.heads % world or chosen.hidden % chosen.heads:
        parser.error(f"--heads {chosen.heads} must be a multiple of the {world} ranks, and divide --hidden")
    if chosen.quick:
        chosen.seconds = 0.0
        chosen.rates = [UNSHAPED, "200mbit"] if chosen.rates == rates else chosen.rates[:2]
    return chosen


def _rate(text: str) -> str:
    try:
        if text != UNSHAPED:
            bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def chosen_settings(work: Work, machines: Machines, only: Sequence[str]) -> list[Setting]:
    """Says in one line why DeepSpeed is not among them, if it is not."""
    problem = deepspeed_peer.missing()
    if problem:
        print(f"DeepSpeed does not take part: {problem}", flush=True)
    settings = all_settings(work, machines, with_deepspeed=problem is None)
    return [
        setting for setting in settings if any(part.lower() in setting.contender.lower() for part in only)
    ]


class Bench:
    """Visits the links with one setting after the other."""

    def __init__(self, hosts: Hosts, machines: Machines, work: Work, seconds: float) -> None:
        self.hosts, self.machines, self.work, self.seconds = hosts, machines, work, seconds
        self._last: dict[Hashable, float] = {}

    def check(self, settings: Sequence[Setting]) -> None:
        """Prints how far each peer's gradients are from one process's."""
        for setting in settings:
            if setting.is_ours:
                continue
            try:
                found = f"{self._on_ranks(_check, setting)[0]:.1e}"
            except RankError as error:
                found = _last_line(error)
            print(f"{setting.contender:20} {setting.knobs:40} {found}", flush=True)

    def compute_seconds(self) -> float:
        """A step of every rank's share of the batch, alone but all at once: the slowest rank's, in the best
        micro-batch."""
        share = self.work.global_batch // self.machines.world
        found = []
        for size in (size for size in (1, 2, 4) if share % size == 0):
            make = partial(alone, micro_batch=size)
            timings = self._train(make, _share(self.work, share), size)
            found.append(max(statistics.median(timing.seconds) for timing in timings))
        return min(found)

    def visit(self, entry: Entry) -> bool:
        """Adds steps to the entry; False when the setting does not run."""
        try:
            timings = self._train(entry.setting.make, self.work, entry.setting)
        except RankError as error:
            print(f"{entry.setting.contender}, {entry.setting.knobs}: {_last_line(error)}", flush=True)
            return False
        entry.seconds += timings[0].seconds
        entry.sent_bytes = max(timing.sent_bytes for timing in timings)
        return True

    def _train(self, make: Callable[[Work], Contender], work: Work, key: Hashable) -> list[Timing]:
        """As many steps as the budget allows, going by the last visit of ``key``, but at least two (one
        without a budget)."""
        last = self._last.get(key)
        num_steps = 0 if last is None else min(_MOST_STEPS, round(self.seconds / last))
        num_steps = max(num_steps, 2 if self.seconds else 1)
        timings = self._on_ranks(run_contender, make, work, num_steps)
        self._last[key] = statistics.median(timings[0].seconds)
        return timings

    def _on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.hosts.run_ranks(
            function, *arguments, ranks_per_host=self.machines.ranks_per_host, timeout_seconds=120
        )


def _check(setting: Setting) -> float:
    peer = setting.make(_TINY)
    assert isinstance(peer, Peer)
    return largest_difference(peer, _TINY)


def _share(work: Work, global_batch: int) -> Work:
    return Work(**(vars(work) | {"global_batch": global_batch}))


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def measure_rate(bench: Bench, settings: Sequence[Setting]) -> tuple[list[Entry], list[Setting]]:
    """The best entry of each contender, and the settings worth another try at a lower rate."""
    entries = [entry for entry in map(Entry, settings) if bench.visit(entry)]
    best: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.median_seconds, reverse=True):
        best[entry.setting.contender] = entry
    slack = _TOO_SLOW[bench.hosts.rate is not None]
    kept = [
        entry.setting
        for entry in entries
        if entry.median_seconds <= slack * best[entry.setting.contender].median_seconds
    ]
    for entry in best.values():
        if entry.median_seconds < 2 * bench.seconds:
            bench.visit(entry)
    return list(best.values()), kept


def measure(bench: Bench, settings: Sequence[Setting], rates: Sequence[str]) -> list[Row]:
    """Rate after rate, printing as it goes."""
    rows: list[Row] = []
    for rate in rates:
        bench.hosts.set_rate(None if rate == UNSHAPED else rate)
        compute = bench.compute_seconds()
        entries, settings = measure_rate(bench, settings)
        figures = [(entry.setting, entry.median_seconds, entry.sent_bytes) for entry in entries]
        rows += rows_of(rate, compute, figures, rows)
        print_rate(rate, compute, [row for row in rows if row.rate == rate])
    return rows


def main(arguments: Sequence[str]) -> None:
    """Checks, measures and prints."""
    chosen = parse(arguments)
    names = ("layers", "hidden", "heads", "vocabulary", "sequence", "global_batch")
    work = Work(**{name: getattr(chosen, name) for name in names})
    machines = Machines(chosen.hosts, chosen.ranks_per_host)
    settings = chosen_settings(work, machines, chosen.only)
    where = f"{machines.num_hosts} hosts x {machines.ranks_per_host} ranks of one thread"
    print(f"{work.parameters / 1e6:.1f}M parameters, {work.tokens} tokens a step, float32; {where}\n")
    with Hosts(machines.num_hosts) as hosts:
        bench = Bench(hosts, machines, work, chosen.seconds)
        print("largest difference of a peer's gradients to one process's, relative to the largest element:")
        bench.check(settings)
        if chosen.check:
            return
        rows = measure(bench, settings, chosen.rates)
    print_summary(rows)
    if chosen.json:
        chosen.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    if chosen.svg:
        chosen.svg.write_text(draw(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
