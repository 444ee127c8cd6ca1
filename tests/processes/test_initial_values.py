"""If these fail, ranks draw initial values that are never used: a minute of each start for 8B parameters."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from parity_case import Case, make_engine
from ranks import run_ranks
from tiny_corpora import make_corpus

from myriad.comm.groups import close_world
from myriad.job import load_job
from myriad.model import gpt
from myriad.run import Run
from myriad.train.trainer import Trainer

SMALL = [
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    "train.validate_every=0",
]


def drawn_by_engine(case: Case) -> tuple[int, int]:
    """One rank's side: values drawn, and the values of the parameters that are drawn."""
    with mock.patch.object(gpt, "seeded_normal", wraps=gpt.seeded_normal) as draw:
        engine = make_engine(case)
    drawn = sum(torch.Size(call.args[1]).numel() for call in draw.call_args_list)
    matrices = sum(
        entry.shape.numel() for chunk in engine.model.chunks for entry in chunk.entries if entry.decays
    )
    engine.close()
    close_world()
    return drawn, matrices


@pytest.mark.parametrize("zero", [1, 3])
def test_a_rank_draws_what_its_slices_hold(zero: int) -> None:
    for drawn, matrices in run_ranks(2, drawn_by_engine, Case(layout={"dp": 2, "zero": zero})):
        assert drawn < 0.8 * matrices, "half, and the tensors on borders"


def start(run: Run, steps: int) -> tuple[int, list[float]]:
    """Values drawn at a start, and the losses of the steps after it."""
    with mock.patch.object(gpt, "seeded_normal", wraps=gpt.seeded_normal) as draw:
        trainer = Trainer(run)
    drawn = draw.call_count
    trainer.train()
    trainer.close()
    return drawn, [line["loss"] for line in run.read_metrics()][-steps:]


def test_a_start_from_a_checkpoint_draws_no_initial_values(tmp_path: Path) -> None:
    """Nor does one from given weights; training continues with the loaded values."""
    corpus = make_corpus(tmp_path, count=300)
    whole, halves, given = (Run(tmp_path / name) for name in ("whole", "halves", "given"))

    def begin(run: Run, steps: int, *more: str) -> tuple[int, list[float]]:
        keys = [f"data.corpus={corpus}", *SMALL, f"train.steps={steps}", *more]
        run.create_or_resume(load_job("tiny", keys))
        ((drawn, losses),) = run_ranks(1, start, run, steps)
        return drawn, losses

    schedule = ("optimizer.decay=constant", "optimizer.warmup_steps=0")
    drawn, expected = begin(whole, 4, *schedule)
    assert drawn > 0
    begin(halves, 2, *schedule)
    drawn, losses = begin(halves, 4, *schedule)
    assert (drawn, losses) == (0, expected)
    drawn, _ = begin(given, 1, f"train.init_from={whole.path}", *schedule)
    assert drawn == 0
