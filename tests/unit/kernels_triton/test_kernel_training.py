"""If these break, a model trained with Triton's kernels is not the one that the library's operators train, or
insisting on them where they cannot run is found out late. Whole steps in Triton's interpreter."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.kernels.agreement import (
    LIMITS,
    beyond_limits,
    disagreements,
    library_disagreements,
    library_doubts,
    proved,
)
from myriad.kernels.attention import attention
from myriad.kernels.choice import explain, fallback
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import Float8
from myriad.kernels.triton import rotary_kernels as triton_rotary
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.train.fit import fit

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rms", "activation": "swiglu", "kv_heads": 1},
    "gpt2": {"norm": "layer", "bias": True, "position": "learned", "dropout": 0.1},
    "parallel": {"block": "parallel", "activation": "relu2", "tied": False},
}


def train(
    model: str, optimizer: str, kernels: Kernels, precision: Any, **layout: Any
) -> list[tuple[float, float]]:
    config = ModelConfig(layers=1, hidden=16, heads=2, sequence=4, vocabulary=50, **MODELS[model])
    tokens = torch.randint(0, 50, (4, 5), generator=torch.Generator().manual_seed(0))

    def batch(step: int, rows: range) -> Batch:
        own = tokens[rows.start : rows.stop]
        return Batch(own[:, :-1].contiguous(), own[:, 1:].contiguous(), torch.arange(rows.start, rows.stop))

    steps = fit(
        GPT(config, seed=1),
        batch,
        Layout(micro_batch=2, **layout),
        OptimizerConfig(name=optimizer, learning_rate=1e-2),
        steps=2,
        global_batch=4,
        precision=precision,
        device="cpu",
        kernels=kernels,
    )
    return [(result.loss, result.grad_norm) for _, result in steps]


@pytest.mark.parametrize(
    ("model", "optimizer", "layout"),
    [
        ("llama", "adamw", {}),
        ("gpt2", "lamb", {"recompute": "selective"}),
        ("parallel", "adamw", {"zero": 3, "virtual_stages": 2}),
    ],
)
def test_training_in_triton_is_training(model: str, optimizer: str, layout: dict[str, Any]) -> None:
    expected = train(model, optimizer, "plain", "float32", **layout)
    found = train(model, optimizer, "triton", "float32", **layout)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    if model == "gpt2":
        assert train(model, optimizer, "triton", "float32", **layout) == found, "the same run twice"


def test_bfloat16_stays_near_float32() -> None:
    found = [loss for loss, _ in train("llama", "adamw", "triton", "bfloat16")]
    assert found == pytest.approx([loss for loss, _ in train("llama", "adamw", "plain", "float32")], rel=2e-2)


def test_insisting_where_it_cannot_be_is_refused_before_anything_starts(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BadInputError, match=r"train\.kernels.*no CUDA device"):
        load_job("tiny", ["train.kernels=triton", "train.device=cpu"])
    with pytest.raises(BadInputError, match=r"train\.kernels.*no CUDA device"):
        train("llama", "adamw", "triton", "float32")


def test_a_gpu_without_triton_continues_and_reports_it(monkeypatch) -> None:
    monkeypatch.setattr("myriad.kernels.choice.has_triton", lambda: False)
    line = fallback("auto", "cuda", "bfloat16", {})
    assert "norm" in line and "triton is not installed" in line and "\n" not in line
    assert {choice.kernel for choice in explain("cuda", "bfloat16", "auto", {}).values()} == {
        "library",
        "plain",
    }


def test_kernels_that_are_wrong_or_do_not_compile_are_done_without(monkeypatch) -> None:
    gpu, results = torch.device("cuda", 0), [{"norm": 1e-6}, {"norm": 0.5}, RuntimeError("no\nregisters")]

    def found(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("myriad.kernels.agreement.disagreements", found)
    assert proved("auto", gpu, torch.float32) == ("auto", "")
    kernels, line = proved("auto", gpu, torch.float32)
    assert kernels == "plain" and "norm by 0.5" in line
    kernels, line = proved("auto", gpu, torch.float32)
    assert kernels == "plain" and line.endswith("RuntimeError: no")
    results += [{"norm": 1e-3}, {"adamw": 0.5}]
    kernels, line = proved("auto", gpu, torch.bfloat16)
    assert kernels == "plain" and "adamw" in line, "optimizers are float32 in a run in bfloat16 too"
    assert proved("triton", gpu, torch.float32) == ("triton", ""), "insisted on"
    assert proved("auto", torch.device("cpu"), torch.float32) == ("auto", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_library_that_is_right_is_within_the_limits(dtype: torch.dtype) -> None:
    scaling = "blocks" if dtype == torch.bfloat16 else None
    found = library_disagreements(dtype, torch.device("cpu"), scaling=scaling)
    assert not beyond_limits(found, dtype) and {"products", "attention"} <= set(found)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("myriad.kernels.agreement.accumulate_product", "products"),
        ("myriad.kernels.agreement.attention", "attention"),
        ("myriad.kernels.float8.Float8.add_weight_gradient", "float8 products"),
    ],
)
def test_a_wrong_kernel_of_the_library_is_named(
    place: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a step is spent in them: a sum that is not added to, a head that reads another one's keys, a
    cast that loses its sign."""
    wrong = {
        "products": lambda total, grad, x: total.copy_(grad.float().t() @ x.float()),
        "attention": lambda x, heads, window: attention(x.roll(64, 2), heads, window),
        "float8 products": lambda how, total, columns, x: total.zero_() if total[0, 0] == 1 else None,
    }[named]
    if named == "float8 products":  # wrong on the device alone: the first of the two that are compared
        calls: list[int] = []
        right = Float8.add_weight_gradient

        def first_wrong(how: Float8, *given: Any) -> None:
            calls.append(1)
            (wrong if len(calls) == 1 else right)(how, *given)

        monkeypatch.setattr(place, first_wrong)
    else:
        monkeypatch.setattr(place, wrong)
    found = library_disagreements(torch.bfloat16, torch.device("cpu"), scaling="tensor")
    assert [line.partition(" by ")[0] for line in beyond_limits(found, torch.bfloat16)] == [named]


def test_what_the_library_does_wrongly_on_a_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, results = torch.device("cuda", 0), [{"products": 1e-4}, {"products": 0.5}, RuntimeError("no\nimage")]

    def found(*given: Any, **more: Any) -> dict[str, float]:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("myriad.kernels.agreement.library_disagreements", found)
    assert library_doubts(gpu, torch.bfloat16, float8=None) == []
    assert library_doubts(gpu, torch.bfloat16, float8=None) == [
        "PyTorch's kernels are wrong on this device: products by 0.5"
    ]
    (line,) = library_doubts(gpu, torch.bfloat16, float8=None)
    assert line.endswith("RuntimeError: no")
    assert library_doubts(torch.device("cpu"), torch.bfloat16, float8=None) == [], "results: not asked"


def test_heads_too_wide_for_one_program_are_turned_by_plain_operators() -> None:
    found = explain("cuda", "bfloat16", "auto", {"rotary": 1024})
    assert found["rotary"].kernel == "plain" and "1024" in found["rotary"].why
    assert found["norm"].kernel == "triton"
    assert fallback("auto", "cuda", "bfloat16", {"rotary": 1024}).startswith(
        "without Triton's kernels for rotary"
    )
    assert not fallback("auto", "cuda", "bfloat16", {})


def test_the_doctor_s_trial_passes_and_finds_a_kernel_that_is_wrong(monkeypatch) -> None:
    here = torch.device("cpu")
    found = disagreements(torch.float32, here, 5, 20)
    operators = {"norm", "activation", "rotary", "cross_entropy", "attention", "experts", "adamw", "lamb"}
    assert set(found) == operators
    assert all(share <= LIMITS[torch.float32] for share in found.values()), found
    split = triton_rotary.split_turned
    monkeypatch.setattr(triton_rotary, "split_turned", lambda x, *how: split(x * 1.01, *how))
    assert disagreements(torch.float32, here, 5, 20)["rotary"] > LIMITS[torch.float32]
