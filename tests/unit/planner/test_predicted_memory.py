"""If these break: a plan is called possible that runs out of memory, or ruled out although it fits."""

from typing import Any

import numpy as np
import pytest

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.activations import Part, layer_held
from myriad.planner.memory import Memory, fits_probability, worst_stage_memory
from myriad.planner.rank_memory import memory_of_ranks
from myriad.planner.work import Practice, Recompute, Work
from myriad.program.config import OverlapConfig

GPT = ModelConfig(
    layers=8, hidden=512, heads=8, sequence=1024, vocabulary=4096, norm="layer", bias=True, dropout=0.1,
    position="learned", activation="gelu",
)  # fmt: skip
PUBLISHED = Practice(attention="plain", fused=False, sequence_parallel=False)
ONE = {
    "dp": 2, "tp": 2, "pp": 2, "virtual_stages": 1, "micro_batch": 2, "num_micro_batches": 8, "zero": 1,
    "reduce_each": 0, "recompute": 0, "eager": 0, "zero_bubble": 0,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_plain_block_keeps_what_the_paper_says(tp: int) -> None:
    s, b, h, a = GPT.sequence, 3, GPT.hidden, GPT.heads
    sequence_parallel = Practice(attention="plain", fused=False)
    part = Part(tp, b, 2)

    def kept(practice: Practice, mode: str) -> float:
        return float(layer_held(GPT, practice, "block", 0, part, mode).kept)  # type: ignore[arg-type]

    assert kept(PUBLISHED, "none") == s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    assert kept(PUBLISHED, "selective") == s * b * h * (10 + 24 / tp)
    assert kept(PUBLISHED, "full") == 2 * s * b * h
    assert kept(sequence_parallel, "none") == s * b * h / tp * (34 + 5 * a * s / h)
    assert kept(sequence_parallel, "selective") == 34 * s * b * h / tp


def total(practice: Practice = Practice(), **changes: int) -> float:
    return float(worst_stage_memory(GPT, practice, value_bytes=2, **(ONE | changes)).total)


@pytest.mark.parametrize("practice", [Practice(), PUBLISHED], ids=["ours", "published"])
def test_what_saves_memory_saves_it(practice: Practice) -> None:
    assert total(practice, recompute=2) < total(practice, recompute=1) < total(practice)
    assert total(practice, tp=4) < total(practice, tp=2)
    assert total(practice, pp=4) < total(practice, pp=2)
    assert total(practice, micro_batch=1) < total(practice, micro_batch=2)
    assert total(practice, zero=1) < total(practice, zero=0)
    assert total(practice, eager=1, pp=4) > total(practice, pp=4)


def test_arrays_are_as_good_as_numbers() -> None:
    rng = np.random.default_rng(1)
    choices = {
        "dp": (1, 2, 8), "tp": (1, 2, 4), "pp": (1, 2, 4), "virtual_stages": (1, 2),
        "micro_batch": (1, 2), "num_micro_batches": (4, 16), "zero": (0, 1, 2, 3), "reduce_each": (0, 1),
        "recompute": (0, 1, 2), "eager": (0, 1), "zero_bubble": (0, 1),
    }  # fmt: skip
    layouts = {key: rng.choice(values, 200) for key, values in choices.items()}
    memory = worst_stage_memory(GPT, Practice(), value_bytes=2, **layouts)
    for index in range(200):
        one = {key: int(values[index]) for key, values in layouts.items()}
        assert memory.total[index] == pytest.approx(total(**one))


def test_a_fit_is_a_probability() -> None:
    memory = Memory(40e9, 10e9, 5e9, 20e9, 1e9, 1e9, 1e9)
    at_the_limit = float(memory.total)
    assert fits_probability(memory, at_the_limit) == pytest.approx(0.5)
    assert fits_probability(memory, at_the_limit * 1.1) > 0.99
    assert fits_probability(memory, at_the_limit * 0.9) < 0.01
    assert np.all(np.diff(fits_probability(memory, at_the_limit * np.linspace(0.9, 1.1, 9))) > 0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dp": 4, "zero": 1},
        {"dp": 2, "tp": 2, "pp": 4, "zero": 2},
        {"pp": 4, "schedule": "zero-bubble"},
        {"pp": 4, "virtual_stages": 2},
        {"dp": 2, "pp": 2, "virtual_stages": 2, "zero": 3},
    ],
    ids=str,
)
def test_arrays_say_nearly_what_the_program_says(keys: dict[str, Any], recompute: Recompute) -> None:
    layout = Layout(micro_batch=2, **keys)
    layout = layout.model_copy(update={"recompute": recompute})
    work = Work(GPT, layout, 2 * layout.dp * 16)
    exact = max(float(one.total) for one in memory_of_ranks(work))
    found = total(
        **{key: getattr(layout, key) for key in ("dp", "tp", "pp", "virtual_stages", "zero")},
        num_micro_batches=16,
        recompute=["none", "selective", "full"].index(recompute),
        zero_bubble=int("zero-bubble" in layout.schedule_name),
    )
    assert found == pytest.approx(exact, rel=0.08)


def test_memory_of_ranks_follows_the_schedule() -> None:
    def ranks(**keys: Any) -> list[Memory]:
        layout = Layout(pp=4, **keys)
        return memory_of_ranks(Work(GPT, layout, 16))

    first, *middle, last = (float(one.activations) for one in ranks())
    assert first > middle[0] > middle[1] > last
    flood = [float(one.activations) for one in ranks(schedule="gpipe")]
    assert all(more > less for more, less in zip(flood, (first, *middle, last), strict=True))
    assert [float(one.logits) > 0 for one in ranks()] == [False, False, False, True]


def test_gradients_of_early_updates_are_there_for_one_micro_batch_only_while_they_are_made() -> None:
    def gradients(num_micro_batches: int, *, early: bool) -> float:
        overlap = OverlapConfig(optimizer_in_backward=early)
        return float(memory_of_ranks(Work(GPT, Layout(), num_micro_batches, overlap))[0].gradients)

    assert gradients(1, early=True) < 0.6 * gradients(1, early=False)
    assert gradients(2, early=True) == gradients(2, early=False)
