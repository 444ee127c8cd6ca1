"""If these break: the noise scale or the norms of layers depend on the layout, or are not what they are said
to be."""

from dataclasses import replace

import pytest
import torch
from parity_case import Case, batch_of_rank, batch_of_rows, make_engine
from ranks import run_ranks

from myriad.comm.groups import close_world
from myriad.optim.gradient_noise import GradientNoise
from myriad.parallel.step_statistics import LayerNorms
from myriad.telemetry.config import TelemetryConfig

MODEL = {"layers": 2, "kv_heads": 2, "activation": "swiglu", "bias": True}
CASE = Case({}, MODEL, {"epsilon": 1e-3}, steps=4)
TELEMETRY = TelemetryConfig(noise_scale=True, noise_scale_decay=0.5, layer_norms_every=2)
TARGETS = 8 * 16

Found = list[tuple[tuple[float, ...], LayerNorms | None]]


def collect(case: Case) -> Found:
    """Return one rank's statistics of the steps."""
    engine, found = make_engine(case, telemetry=TELEMETRY), Found()
    for step in range(case.steps):
        batch = batch_of_rank(case, engine, step)
        result = engine.train_step(lambda batch=batch: batch, 1e-2, TARGETS)
        found.append((result.noise or (), result.layer_norms))
    engine.close()
    close_world()
    return found


def squares_of_rows(first: int, share: int, of: Case = CASE) -> float:
    """Return the squared norm of the part of the first gradient that comes from some rows of the batch."""
    engine = make_engine(replace(of, global_batch=share))
    rows = engine._model_state.rows
    cut = [float(row.entry.cut is not None and row.entry.decays and chunk is not engine.model.tied
                 and ".experts." not in row.entry.name)
           for chunk, row in rows]  # fmt: skip
    engine.train_step(lambda: batch_of_rows(of, first, share, 0), 1e-2, TARGETS)
    found = float((engine._optimizer_step.squares * torch.tensor(cut)).sum())
    engine.close()
    close_world()
    return found


def norms_of_step(_: Case) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the norms of layers in step 2, from whole tensors."""
    engine = make_engine(CASE)
    held = [one for one in engine.all_shards() if one.name.startswith("model.")]
    for step in range(2):
        before = [one.values.clone() for one in held]
        batch = batch_of_rank(CASE, engine, step)
        engine.train_step(lambda batch=batch: batch, 1e-2, TARGETS)
    names = [row.entry.name for _, row in engine._model_state.rows]
    gradients = list(zip(names, engine._optimizer_step.squares.tolist(), strict=True))
    parameters = [(one.name[6:], float(one.values.double().square().sum())) for one in held]
    updates = [
        (one.name[6:], float((one.values - old).double().square().sum()))
        for one, old in zip(held, before, strict=True)
    ]
    engine.close()
    close_world()
    return tuple(by_layer(squares) for squares in (gradients, parameters, updates))  # type: ignore[return-value]


def by_layer(squares: list[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, square in squares:
        parts = name.split(".")
        layer = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
        sums[layer] = sums.get(layer, 0.0) + square
    return {layer: total**0.5 for layer, total in sums.items()}


def test_the_statistics_are_their_definition_in_every_layout() -> None:
    small = sum(run_ranks(1, squares_of_rows, *rows)[0] for rows in ((0, 6), (6, 2)))
    big = run_ranks(1, squares_of_rows, 0, 8)[0]
    estimate = GradientNoise(0.5).add(small, big, 0.75**2 + 0.25**2, TARGETS)
    norms = run_ranks(1, norms_of_step, CASE)[0]
    seen: list[tuple[float, ...]] = []
    layouts = ({"zero": 0}, {"zero": 1, "pp": 2}, {"zero": 3, "tp": 2, "virtual_stages": 2})
    for keys in layouts:
        case = replace(CASE, layout={"dp": 2, "shares": (6, 2), **keys})
        for rank in run_ranks(case.world, collect, case):
            noise = [one for one, _ in rank]
            assert noise[0] == pytest.approx(estimate, rel=1e-5)
            seen = seen or noise
            for one, other in zip(noise, seen, strict=True):
                assert one == pytest.approx(other, rel=1e-4), "smoothed, of steps in which rounding grows"
            assert [step for step, (_, one) in enumerate(rank) if one is not None] == [1, 3]
            found = rank[1][1]
            assert found is not None
            for own, expected in zip(found, norms, strict=True):
                assert dict(own) == pytest.approx({"head": 0.0} | expected, rel=1e-5)


def squares_of_pairs(case: Case) -> list[float]:
    return [squares_of_rows(first, 2, case) for first in range(0, 8, 2)]


def test_replicas_of_several_groups_and_micro_batches_of_one_replica_are_small_batches() -> None:
    """Backwards in one part and in two, whose stages share the matrices; replicas that share their state in
    groups, each of which has its part of the big batch's gradient."""
    pairs, big = run_ranks(1, squares_of_pairs, CASE)[0], run_ranks(1, squares_of_rows, 0, 8)[0]
    estimate = GradientNoise(0.5).add(sum(pairs), big, 1 / 4, TARGETS)
    second: tuple[float, ...] = ()
    layouts = (
        {"dp": 4, "zero": 3, "shard_group": 2},
        {"micro_batch": 2, "tp": 2},
        {"micro_batch": 2, "pp": 2, "zero": 2, "schedule": "zero-bubble"},
    )
    for keys in layouts:
        case = replace(CASE, layout=keys, steps=2)
        for rank in run_ranks(case.world, collect, case):
            assert rank[0][0] == pytest.approx(estimate, rel=1e-5)
            second = second or rank[1][0]
            assert rank[1][0] == pytest.approx(second, rel=1e-4), "gradients of the first one do not count"


def test_experts_with_tokens_of_several_replicas_are_left_out_in_every_layout() -> None:
    mixed = replace(CASE, model={"layers": 2, "kv_heads": 2, "experts": 4, "shared_experts": 1}, steps=1)
    pairs, big = run_ranks(1, squares_of_pairs, mixed)[0], run_ranks(1, squares_of_rows, 0, 8, mixed)[0]
    estimate = GradientNoise(0.5).add(sum(pairs), big, 1 / 4, TARGETS)
    layouts = (
        {"dp": 4},
        {"dp": 4, "ep": 4, "zero": 2},
        {"dp": 4, "ep": 2, "zero": 3, "expert_dispatch": "rank", "recompute": "full"},
        {"micro_batch": 2, "tp": 2, "ep": 2, "etp": 1},
    )
    for keys in layouts:
        case = replace(mixed, layout=keys)
        for rank in run_ranks(case.world, collect, case):
            assert rank[0][0] == pytest.approx(estimate, rel=1e-5)
