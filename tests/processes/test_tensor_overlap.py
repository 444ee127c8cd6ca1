"""Tensor-parallel communication behind compute changes nothing but the time: any number of chunks, any cut,
gives one process's losses and parameters, and what travels in the forward travels back in the mirrored order.
"""

import functools
from typing import Any

import pytest
import torch
from parity_case import Case, batch_of_rank, make_engine
from ranks import run_ranks
from test_parity import FEW, MODELS, assert_equal, train

from myriad.comm.groups import close_world
from myriad.parallel import tp_async
from myriad.telemetry.spans import Recorder

SHORT = {"layers": 2}

CUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("serial", {"tp": 2, "micro_batch": 6}, {"tensor_chunks": 4}),  # 2, 2, 1, 1 sequences
    ("serial", {"tp": 2, "micro_batch": 3}, {"tensor_chunks": 2}),  # 2, 1
    ("serial", {"tp": 2, "micro_batch": 1}, {"tensor_chunks": 3}),  # 2, 2, 1, 1, 1, 1 of a rank's positions
    ("parallel-window", {"tp": 2, "micro_batch": 1}, {"tensor_chunks": 2}),
    (
        "parallel-window",
        {"tp": 2, "pp": 2, "micro_batch": 3, "schedule": "zero-bubble"},
        {"tensor_chunks": 3},
    ),
    ("gpt2", {"tp": 4, "micro_batch": 1}, {"tensor_chunks": 16}),  # dropout, learned positions: 1, 1, 1, 1
    ("gpt2", {"tp": 2, "dp": 2, "micro_batch": 3, "zero": 3}, {"tensor_chunks": 3}),
    ("gpt2", {"tp": 2, "micro_batch": 6}, {"tensor": False}),
]
STEPS = FEW + 1
"""Biases of two small updates are so small that rounding shows."""


def short(model: str) -> dict[str, Any]:
    return MODELS[model] | SHORT


def cut(model: str, layout: dict[str, Any], overlap: dict[str, Any]) -> Case:
    """A case of a layout: two micro-batches, and in a pipeline four; more rows where they are cut."""
    rows = 6 if layout["micro_batch"] > 1 else 2 * layout.get("pp", 1)
    return Case(layout=layout, model=short(model), overlap=overlap, steps=STEPS, global_batch=rows)


@functools.cache
def one_process(model: str, global_batch: int) -> Any:
    return train(Case(model=short(model), steps=STEPS, global_batch=global_batch))


@pytest.mark.parametrize(("model", "layout", "overlap"), CUTS, ids=str)
def test_any_cut_gives_the_loss_and_parameters_of_one_process(
    model: str, layout: dict[str, Any], overlap: dict[str, Any]
) -> None:
    case = cut(model, layout, overlap)
    assert_equal(case, one_process(model, case.global_batch))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_same_cut_twice_gives_the_same_bits(micro_batch: int) -> None:
    layout = {"tp": 2, "micro_batch": micro_batch}
    case = Case(layout=layout, model=short("gpt2"), steps=2, global_batch=2 * micro_batch)
    (losses, parameters), (again, same) = train(case), train(case)
    assert losses == again
    assert all((values == same[name]).all() for name, values in parameters.items())


Notes = list[tuple[str, int]]


def note_one_step(case: Case) -> tuple[Notes, int, float]:
    """One rank's side: what a training step posts and waits for, with the number of the crossing; how many
    weight products it left over; and the seconds it waited."""
    notes: Notes = []
    numbers: dict[int, int] = {}
    post, arrive = tp_async.AsyncState.post, tp_async.AsyncState.arrive

    def noting_post(self: Any, x: torch.Tensor, *, forward: bool) -> None:
        number = numbers.setdefault(id(self), len(numbers))
        notes.append(("post" if forward else "post back", number))
        post(self, x, forward=forward)

    def noting_arrive(self: Any) -> torch.Tensor:
        back = ("post back", numbers[id(self)]) in notes
        notes.append(("arrive back" if back else "arrive", numbers[id(self)]))
        return arrive(self)

    tp_async.AsyncState.post, tp_async.AsyncState.arrive = noting_post, noting_arrive
    recorder = Recorder()
    engine = make_engine(case, recorder)
    engine.train_step(lambda: batch_of_rank(case, engine, 0), 1e-3, 100)
    waited = sum(span.duration_seconds for span in recorder.newest() if span.name == "tensor_comm")
    left_over = len(engine.boundary.later or [])
    engine.close()
    close_world()
    return notes, left_over, waited


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_backward_takes_the_turns_of_the_forward_backwards(block: str, micro_batch: int) -> None:
    model = SHORT | {"block": block}
    case = Case(layout={"tp": 2, "micro_batch": micro_batch}, model=model, global_batch=micro_batch)
    notes, left_over, waited = run_ranks(2, note_one_step, case)[0]
    half = len(notes) // 2
    mirror = {"post": "arrive back", "arrive": "post back"}
    assert notes[half:] == [(mirror[what], number) for what, number in reversed(notes[:half])]
    under_way: set[int] = set()
    most = 0
    for what, number in notes:
        (under_way.add if what.startswith("post") else under_way.remove)(number)
        most = max(most, len(under_way))
    assert most > 1, "nothing travelled while another part computed"
    assert not under_way
    assert left_over == 0
    assert waited > 0


def test_without_overlap_everything_is_waited_for_where_it_is_posted() -> None:
    case = Case(layout={"tp": 2, "micro_batch": 4}, model=SHORT, overlap={"tensor": False}, global_batch=4)
    notes = run_ranks(2, note_one_step, case)[0][0]
    for (posted, number), (arrived, same) in zip(notes[::2], notes[1::2], strict=True):
        assert number == same
        assert arrived == posted.replace("post", "arrive")
