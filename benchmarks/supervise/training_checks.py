"""What active checks in gaps of the program cost a run, and that they change nothing.

    python benchmarks/supervise/training_checks.py [--steps 400] [--layout layout.pp]

Trains the embedded job on two ranks, validating every 10 steps, without checks and with them
(``resilience.check_hours``), and prints the share of the time that checks took, by their own clock and by
the ledger of the run, the checks made, how much of them was hidden in bubbles, and whether the losses have
the same bits.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from myriad.job import load_job
from myriad.launchers.local import run_local
from myriad.run import Run
from myriad.supervise.accounting.accounting import account_of
from myriad.supervise.accounting.ledger import Account, in_order


def train(folder: Path, steps: int, layout: str, hours: str) -> Run:
    """Train once, with checks (``hours``: "0") or without ("off")."""
    overrides = {
        layout: 2,
        "layout.micro_batch": 1,
        "train.global_batch": 8,
        "train.steps": steps,
        "train.validate_every": 10,
        "train.sample_prompt": "off",
        "data.validation_batches": 1,
        "resilience.on_slow": "report",  # layers that move to another rank change the bits
        "resilience.check_hours": hours,
    }
    run = Run(folder / f"checks-{hours}")
    run.create_or_resume(load_job("embedded-gpt", [f"{key}={value}" for key, value in overrides.items()]))
    run_local(run, 2)
    return run


def account(run: Run) -> Account:
    """Return where the time of a run went."""
    return account_of(in_order(run.read_events(), run.read_metrics(), []))


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of active checks of ranks that train.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layout", default="layout.pp", choices=["layout.pp", "layout.dp", "layout.tp"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        without, with_checks = (
            train(Path(folder), options.steps, options.layout, hours) for hours in ("off", "0")
        )
        losses = [[line["loss"] for line in run.read_metrics()] for run in (without, with_checks)]
        checks = [event for event in with_checks.read_events() if event["event"] == "check"]
        ledger = account(with_checks).ledger
        seconds = ledger.seconds()
    made = Counter(name for event in checks for name in event["checks"])
    trained = sum(seconds[kind] for kind in ("training", "validating", "saving", "checking"))
    print(f"{len(checks)} rounds of checks in {trained:.1f} s of training: {dict(made)}")
    print(f"share of the time, by the checks' clock   {checks[-1]['ratio'] if checks else 0:.4%}")
    print(f"share of the time, by the run's ledger    {seconds['checking'] / trained:.4%}")
    hidden = sum(event["hidden_seconds"] for event in checks)
    count = min(map(len, losses))
    same = "the same bits" if losses[0][:count] == losses[1][:count] else "DIFFER"
    print(f"hidden in bubbles of rank 0               {1e3 * hidden:.1f} ms")
    print(f"failed                                    {sum('failed' in event for event in checks)}")
    print(f"losses of {count} steps                       {same}")


if __name__ == "__main__":
    main()
