"""What would make steps slower after days: memory that steps leave behind, and pauses that ranks take one by
one."""

import gc
from collections import Counter
from pathlib import Path

import pytest
from parity_case import Case, make_engine, train_steps
from ranks import run_ranks
from tiny_corpora import make_corpus

from myriad.comm.groups import close_world
from myriad.job import load_job
from myriad.parallel.engine import Engine
from myriad.run import Run
from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.spans import Recorder
from myriad.train.trainer import Trainer

LAYOUTS = (
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 1},
    {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    {"tp": 2, "micro_batch": 4},
)
MORE_STEPS = 10


def left_behind(case: Case) -> tuple[int, list[Counter[str]]]:
    """One rank's side: the garbage of steps, and by how many tracked objects of each type two stretches of
    them left more than there were before. (A thread that starts late, because the machine was busy, leaves
    its objects once.)"""
    engine = make_engine(case, Recorder(ring=SpanRing.of_its_own(64)))
    train_steps(case, engine, 0, 4)
    gc.disable()
    gc.freeze()
    tracked(engine)
    train_steps(case, engine, 4, 8)
    more, before = [], tracked(engine)
    for first in (8, 8 + MORE_STEPS):
        train_steps(case, engine, first, first + MORE_STEPS)
        after = tracked(engine)
        more.append(after - before)
        before = after
    garbage = gc.collect()
    engine.close()
    close_world()
    return garbage, more


def tracked(engine: Engine) -> Counter[str]:
    """Objects that the collector looks at, by type; what is frozen is left out, and nothing is under way."""
    for chunk in engine.model.chunks:
        chunk.await_gather()
    return Counter(type(found).__name__ for found in gc.get_objects())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_leave_nothing_behind(layout: dict[str, object]) -> None:
    """A reference cycle or a list that grows by one a step fills the memory in a run of weeks, and the more
    there is to collect, the longer every rank pauses."""
    case = Case(layout=layout, model={"layers": 2}, steps=8 + 2 * MORE_STEPS)
    for garbage, (first, second) in run_ranks(2, left_behind, case):
        assert garbage == 0
        growing = [name for name in first if min(first[name], second[name]) >= MORE_STEPS]
        assert not growing, "at least one more a step"


def collected_at(run: Run) -> list[int]:
    """One rank's side: the steps after which it collected garbage, young or all;
    in the first one Python may as well."""
    trainer, found = Trainer(run), []
    begun = trainer.step

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] >= 1 and trainer.step > begun:
            found.append(trainer.step)

    gc.callbacks.append(note)
    trainer.train()
    gc.callbacks.remove(note)
    trainer.close()
    return found


def test_ranks_pause_after_the_same_steps_also_in_a_resumed_run(tmp_path: Path) -> None:
    run, corpus = Run(tmp_path / "run"), make_corpus(tmp_path, count=300)
    keys = ["layout.dp=2", "model.layers=1", "model.hidden=32", "model.sequence=32", "train.threads=1"]
    for steps, expected in ((8, {1, 5}), (14, {9, 10})):
        more = [f"data.corpus={corpus}", "train.collect_garbage_every=5", f"train.steps={steps}"]
        run.create_or_resume(load_job("tiny", keys + more))
        first, second = run_ranks(2, collected_at, run)
        assert set(first) - {steps} == set(second) - {steps} == expected
