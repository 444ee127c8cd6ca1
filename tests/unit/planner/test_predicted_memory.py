"""If these break: a plan is called possible that runs out of memory, or ruled out although it fits."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.memory.closed_form_memory import PeakMemory, fits_probability, worst_stage_memory
from myriad.planner.memory.layer_memory import layer_bytes, layer_elements
from myriad.planner.memory.memory_bound import least_bytes
from myriad.planner.memory.micro_batch_shard import MicroBatchShard
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import layout_memory
from myriad.planner.workload import FrameworkProfile, Recompute, Workload
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

GPT = ModelConfig(
    layers=8, hidden=512, heads=8, sequence=1024, vocabulary=4096, norm="layer", bias=True, dropout=0.1,
    position="learned", activation="gelu",
)  # fmt: skip
PUBLISHED = FrameworkProfile(attention="plain", fused=False, sequence_parallel=False)
ONE = {
    "dp": 2, "tp": 2, "pp": 2, "virtual_stages": 1, "micro_batch": 2, "num_micro_batches": 8, "zero": 1,
    "reduce_each": 0, "recompute": 0, "eager": 0, "zero_bubble": 0,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_plain_block_keeps_the_bytes_of_the_papers_formula(tp: int) -> None:
    s, b, h, a = GPT.sequence, 3, GPT.hidden, GPT.heads
    sequence_parallel = FrameworkProfile(attention="plain", fused=False)
    part = MicroBatchShard(tp, b, 2)

    def kept(profile: FrameworkProfile, mode: str) -> float:
        return float(layer_bytes(GPT, profile, "block", 0, part, mode).kept)  # type: ignore[arg-type]

    assert kept(PUBLISHED, "none") == s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    assert kept(PUBLISHED, "selective") == s * b * h * (10 + 24 / tp)
    assert kept(PUBLISHED, "full") == 2 * s * b * h
    assert kept(sequence_parallel, "none") == s * b * h / tp * (34 + 5 * a * s / h)
    assert kept(sequence_parallel, "selective") == 34 * s * b * h / tp


def total(profile: FrameworkProfile = FrameworkProfile(), **changes: int) -> float:
    return float(worst_stage_memory(GPT, profile, value_bytes=2, **(ONE | changes)).total)


@pytest.mark.parametrize("profile", [FrameworkProfile(), PUBLISHED], ids=["ours", "published"])
def test_what_saves_memory_saves_it(profile: FrameworkProfile) -> None:
    assert total(profile, recompute=2) < total(profile, recompute=1) < total(profile)
    assert total(profile, tp=4) < total(profile, tp=2)
    assert total(profile, pp=4) < total(profile, pp=2)
    assert total(profile, micro_batch=1) < total(profile, micro_batch=2)
    assert total(profile, zero=1) < total(profile, zero=0)
    assert total(profile, eager=1, pp=4) > total(profile, pp=4)


def test_arrays_are_as_good_as_numbers() -> None:
    rng = np.random.default_rng(1)
    choices = {
        "dp": (1, 2, 8), "tp": (1, 2, 4), "pp": (1, 2, 4), "virtual_stages": (1, 2),
        "micro_batch": (1, 2), "num_micro_batches": (4, 16), "zero": (0, 1, 2, 3), "reduce_each": (0, 1),
        "recompute": (0, 1, 2), "eager": (0, 1), "zero_bubble": (0, 1),
    }  # fmt: skip
    layouts = {key: rng.choice(values, 200) for key, values in choices.items()}
    memory = worst_stage_memory(GPT, FrameworkProfile(), value_bytes=2, **layouts)
    for index in range(200):
        one = {key: int(values[index]) for key, values in layouts.items()}
        assert memory.total[index] == pytest.approx(total(**one))


def test_a_fit_is_a_probability() -> None:
    memory = PeakMemory(40e9, 10e9, 5e9, 20e9, 1e9, 1e9, 1e9)
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
def test_the_closed_form_agrees_with_the_simulated_program(
    keys: dict[str, Any], recompute: Recompute
) -> None:
    layout = Layout(micro_batch=2, **keys)
    layout = layout.model_copy(update={"recompute": recompute})
    workload = Workload(GPT, layout, 2 * layout.dp * 16)
    exact = max(float(one.total) for one in memory_of_ranks(workload))
    found = total(
        **{key: getattr(layout, key) for key in ("dp", "tp", "pp", "virtual_stages", "zero")},
        num_micro_batches=16,
        recompute=["none", "selective", "full"].index(recompute),
        zero_bubble=int("zero-bubble" in layout.schedule_name),
    )
    assert found == pytest.approx(exact, rel=0.08)


@pytest.mark.parametrize(
    ("keys", "comm", "optimizer", "more"),
    [
        ({"dp": 16, "zero": 1}, {"hierarchy": "node"}, "adamw", 2),
        ({"dp": 16, "zero": 1}, {}, "lamb", 0),
        ({"dp": 2, "tp": 2, "pp": 2, "zero": 1}, {}, "lamb", 1),
        ({"dp": 2, "tp": 2, "pp": 2}, {}, "lamb", 0),
        ({"dp": 2, "tp": 2, "zero": 1}, {}, "lamb", 0),
    ],
    ids=str,
)
def test_levels_and_lambs_norms_take_a_communicator(
    keys: dict[str, Any], comm: dict[str, Any], optimizer: Literal["adamw", "lamb"], more: int
) -> None:
    layout = Layout(micro_batch=2, **keys)
    works = [
        Workload(GPT, layout, 2 * layout.dp * 8, comm=CommConfig(**own), optimizer=name)
        for own, name in ((comm, optimizer), ({}, "adamw"))
    ]
    exact = [max(float(one.total) for one in memory_of_ranks(workload)) for workload in works]
    assert exact[0] - exact[1] == pytest.approx(more * 0.6 * 2**30)
    cluster = load_cluster("h200-512xh200")
    problems = [
        LayoutProblem(GPT, workload.global_batch, cluster, comm=workload.comm, optimizer=workload.optimizer)
        for workload in works
    ]
    candidate = LayoutCandidate(layout, OverlapConfig(), seconds=1.0, memory_bytes=0.0, fit_probability=1.0)
    closed = [float(layout_memory(problem, candidate).total) for problem in problems]
    assert closed[0] - closed[1] == pytest.approx(more * 0.6 * 2**30)


MATRICES = 12 * GPT.hidden**2
"""Elements of a block's matrices."""


@pytest.mark.parametrize(
    ("keys", "saved"),
    [
        ({}, 4 * GPT.layers * MATRICES),
        ({"tp": 2, "pp": 2}, 4 * GPT.layers * MATRICES / 4),
        ({"dp": 2, "pp": GPT.layers + 2, "zero": 1}, 0),
    ],
    ids=str,
)
def test_a_matrix_that_is_orthogonalized_has_one_moment(keys: dict[str, Any], saved: float) -> None:
    """With ZeRO the last replica has all vectors of a chunk: where a stage is the embedding, two moments."""
    layout = Layout(micro_batch=2, **keys)
    of = {
        name: [one.optimizer for one in memory_of_ranks(Workload(GPT, layout, 16, optimizer=name))]
        for name in ("adamw", "muon")
    }
    assert of["adamw"][0] - of["muon"][0] == saved
    average = Workload(GPT, layout, 16, optimizer="muon", ema_every=5)
    elements = float(of["adamw"][0]) / 8
    assert memory_of_ranks(average)[0].optimizer - of["muon"][0] == 4 * elements
    alone = dict.fromkeys(("dp", "tp", "pp"), 1) | {"zero": 0}
    closed = worst_stage_memory(
        GPT, FrameworkProfile(), value_bytes=2, optimizer="muon", **(ONE | alone | keys)
    )
    assert saved == 0 or float(closed.optimizer) == pytest.approx(of["muon"][0])


@pytest.mark.parametrize(
    ("layout", "global_batch", "profile", "kept"),
    [
        (Layout(), 8, FrameworkProfile(quantization="tensor"), True),
        (Layout(tp=2, pp=2, virtual_stages=2), 8, FrameworkProfile(quantization="blocks"), True),
        (Layout(dp=2, zero=2), 8, FrameworkProfile(quantization="tensor"), True),
        (Layout(dp=2, zero=2), 8, FrameworkProfile(quantization="nvfp4"), True),
        (Layout(dp=2, zero=3), 8, FrameworkProfile(quantization="tensor"), False),
        (Layout(), 1, FrameworkProfile(quantization="tensor"), False),
        (Layout(), 8, FrameworkProfile(quantization="tensor", keeps_quantized=False), False),
        (Layout(), 8, FrameworkProfile(quantization="tensor", cuda_graphs=True), False),
        (Layout(), 8, FrameworkProfile(), False),
    ],
    ids=str,
)
def test_converted_forms_of_weights_that_are_kept_take_their_bytes(
    layout: Layout, global_batch: int, profile: FrameworkProfile, kept: bool
) -> None:
    each = Workload(GPT, layout, global_batch, profile=replace(profile, keeps_quantized=False))
    once = replace(each, profile=profile)
    each_form = 9 / 16 if profile.quantization == "nvfp4" else 1
    blocks = each_form * (GPT.layers // layout.pp) * float(layer_elements(GPT, "block", layout.tp))
    for one, other in zip(memory_of_ranks(once), memory_of_ranks(each), strict=True):
        assert one.weights - other.weights == (2 * blocks if kept else 0)
        assert one.total - other.total == pytest.approx(2 * blocks if kept else 0)
    cluster = load_cluster("h200-512xh200")
    candidate = LayoutCandidate(layout, OverlapConfig(), seconds=1.0, memory_bytes=0.0, fit_probability=1.0)
    closed = [
        float(
            layout_memory(
                LayoutProblem(GPT, global_batch, cluster, profile=workload.profile), candidate
            ).total
        )
        for workload in (once, each)
    ]
    assert closed[0] - closed[1] == pytest.approx(2 * blocks if kept else 0)


def test_memory_of_ranks_follows_the_schedule() -> None:
    def ranks(**keys: Any) -> list[PeakMemory]:
        layout = Layout(pp=4, **keys)
        return memory_of_ranks(Workload(GPT, layout, 16))

    first, *middle, last = (float(one.activations) for one in ranks())
    assert first > middle[0] > middle[1] > last
    flood = [float(one.activations) for one in ranks(schedule="gpipe")]
    assert all(more > less for more, less in zip(flood, (first, *middle, last), strict=True))
    assert [float(one.logits) > 0 for one in ranks()] == [False, False, False, True]


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "interleaved", "zero-bubble-v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_messages_of_more_micro_batches_take_no_more_memory(schedule: Any, recompute: Recompute) -> None:
    """A later message from the same rank shows that a gradient has arrived."""
    virtual_stages = 1 if "1f1b" in schedule else 2
    layout = Layout(pp=4, schedule=schedule, virtual_stages=virtual_stages, recompute=recompute)
    few, many = (memory_of_ranks(Workload(GPT, layout, number)) for number in (24, 72))
    tokens = 2 * 8 * (72 - 24) * GPT.sequence
    for less, more in zip(few, many, strict=True):
        assert float(more.buffers) - float(less.buffers) <= tokens < 2 * GPT.sequence * GPT.hidden


def test_an_output_that_is_recomputed_goes_when_its_peer_has_it() -> None:
    """Its backward keeps it otherwise, and a rank has one of each micro-batch in flight."""

    def messages(recompute: Recompute) -> float:
        work = Workload(GPT, Layout(pp=8, recompute=recompute), 32)
        return float(memory_of_ranks(work)[0].buffers) / (2 * GPT.sequence * GPT.hidden)

    assert messages("none") - messages("full") >= 6


def test_gradients_of_early_updates_are_there_for_one_micro_batch_only_while_they_are_made() -> None:
    def gradients(num_micro_batches: int, *, early: bool) -> float:
        overlap = OverlapConfig(optimizer_in_backward=early)
        return float(memory_of_ranks(Workload(GPT, Layout(), num_micro_batches, overlap))[0].gradients)

    assert gradients(1, early=True) < 0.6 * gradients(1, early=False)
    assert gradients(2, early=True) == gradients(2, early=False)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_backward_that_copies_its_gradients_needs_them_twice(schedule: Any) -> None:
    work = Workload(GPT, Layout(pp=2, schedule=schedule), 8)
    plain, copies = (memory_of_ranks(one) for one in (work, replace(work, copies_gradients=True)))
    for before, after in zip(plain, copies, strict=True):
        assert 0 < float(after.activations) - float(before.activations) <= float(before.gradients)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "keys",
    [
        {"pp": 2, "tp": 2},
        {"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v", "recompute": "full"},
        {"recompute": "full", "micro_batch": 4, "offload_activations": 1.0},
        {"pp": 2, "recompute": "selective", "offload_optimizer": True, "offload_activations": 0.5},
        {"virtual_stages": 4, "schedule": "interleaved"},
    ],
    ids=str,
)
def test_the_lower_bound_is_below_the_peak_and_near_it(keys: dict[str, Any], on_cpu: bool, zero: int) -> None:
    layout = Layout(dp=2, zero=zero, **keys)
    for batch, optimizer, early in ((8, "adamw", True), (64, "muon", False)):
        overlap = OverlapConfig(optimizer_in_backward=early)
        workload = Workload(GPT, layout, batch, overlap, optimizer=optimizer)  # type: ignore[arg-type]
        ranks = memory_of_ranks(workload, on_cpu=on_cpu)
        peak = max(float(memory.total) - float(memory.margin) for memory in ranks)
        assert 0.3 * peak < least_bytes(workload, on_cpu=on_cpu) <= peak
