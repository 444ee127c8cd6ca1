"""A type or a kernel that the device has not is refused in one line, or done otherwise with a line saying so,
before any rank has begun; and float8 changes the blocks' matrices and nothing else."""

import os

import pytest
import torch

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.job.job_values import work_of
from myriad.kernels import attention_choice
from myriad.kernels.gradient import sink_of
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.optim.precision import resolve_precision
from myriad.parallel import engine
from myriad.parallel.batch import Batch
from myriad.planner.memory.recompute_budget import needed_bytes
from myriad.train.device_setup import (
    choose_kernels,
    describe_precision,
    fix_order,
    keep_memory_whole,
    within_budget,
)
from myriad.train.fit import fit

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_float8_on_a_cpu_is_emulated_and_reports_it() -> None:
    job = load_job("tiny", ["train.precision=float8-blocks"])
    (line,) = choose_kernels(job, CPU, torch.bfloat16)
    assert "float8-blocks is emulated" in line and "\n" not in line
    assert describe_precision(job, torch.bfloat16) == "float8-blocks in bfloat16"


def test_cuda_graphs_on_a_cpu_fall_back_with_a_line() -> None:
    (line,) = choose_kernels(load_job("tiny", ["train.cuda_graphs=true"]), CPU, torch.bfloat16)
    assert line == "no CUDA graphs here: operators are started one by one"


def test_deterministic_training_refuses_kernels_that_add_by_atomics_on_a_gpu() -> None:
    keys = ["train.deterministic=true", "train.kernels=plain"]
    with pytest.raises(BadInputError, match=r"train\.deterministic = true: needs train\.kernels = auto"):
        choose_kernels(load_job("tiny", keys), CUDA, torch.bfloat16)
    assert choose_kernels(load_job("tiny", keys), CPU, torch.float32) == []


def test_deterministic_training_takes_pytorch_s_fixed_order_on_gpus_alone() -> None:
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    try:
        fix_order(CPU)
        assert torch.are_deterministic_algorithms_enabled() == was[0]
        fix_order(CUDA)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory, "a pass over all memory"
        shape = attention_choice.AttentionShape("cuda", "bfloat16", 8192, 128, deterministic=True)
        assert attention_choice.choose_attention(shape).path == "sdpa", "cuDNN's backward adds by atomics"
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.utils.deterministic.fill_uninitialized_memory = was[1]


def test_blocks_of_float8_have_no_product_but_tritons(monkeypatch) -> None:
    monkeypatch.setattr("myriad.train.device_setup.has_triton", lambda: False)
    lines = choose_kernels(load_job("tiny", ["train.precision=float8-blocks"]), CUDA, torch.bfloat16)
    assert any("float8-blocks is emulated" in line for line in lines)
    lines = choose_kernels(load_job("tiny", ["train.precision=float8"]), CUDA, torch.bfloat16)
    assert not any("emulated" in line for line in lines)


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_float8_on_a_gpu_without_it_is_refused(monkeypatch, capability, refused) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if refused:
        with pytest.raises(BadInputError, match="float8 needs a GPU from Ada or Hopper on"):
            resolve_precision("float8", CUDA)
    else:
        assert resolve_precision("float8", CUDA) == torch.bfloat16


def test_lengths_that_float8_cannot_multiply_are_refused() -> None:
    with pytest.raises(BadInputError, match="multiple of 16"):
        load_job("tiny", ["train.precision=float8", "model.hidden=72", "model.heads=4"])
    load_job("tiny", ["train.precision=bfloat16", "model.hidden=72", "model.heads=4"])


def test_a_window_that_tritons_kernels_do_not_take_falls_back_with_a_line(monkeypatch) -> None:
    monkeypatch.setattr(attention_choice, "has_triton", lambda: True)
    monkeypatch.setattr("myriad.kernels.choice.has_triton", lambda: True)
    changes = ["model.window=16", "model.hidden=96", "model.heads=4"]  # heads of 24
    lines = choose_kernels(load_job("tiny", changes), CUDA, torch.bfloat16)
    assert len(lines) == 1 and "no head size 24" in lines[0]
    (line,) = choose_kernels(load_job("tiny", [*changes, "layout.cp=2"]), CUDA, torch.bfloat16)
    assert "share sequences goes by tiles of scores" in line and "no head size 24" in line
    fits = choose_kernels(load_job("tiny", ["model.window=16", "layout.cp=2"]), CUDA, torch.bfloat16)
    assert not fits
    with pytest.raises(BadInputError, match="no head size 24"):
        choose_kernels(load_job("tiny", [*changes, "train.kernels=triton"]), CUDA, torch.bfloat16)


def losses(monkeypatch: pytest.MonkeyPatch, precision: str) -> tuple[list[float], list[str]]:
    """Of four steps, and names of the weights that are multiplied in float8."""
    built: list[engine.Engine] = []
    usual = engine.Engine.__init__

    def remember(self, *arguments, **named) -> None:
        usual(self, *arguments, **named)
        built.append(self)

    monkeypatch.setattr(engine.Engine, "__init__", remember)
    model = ModelConfig(layers=1, hidden=32, heads=2, sequence=16, vocabulary=64)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    steps = fit(
        GPT(model, seed=1),
        lambda step, rows: Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(2)),
        Layout(micro_batch=2),
        OptimizerConfig(),
        steps=4,
        global_batch=2,
        precision=precision,
        device="cpu",
    )
    found = [result.loss for _, result in steps]
    layers = built[0].model.stages[0].layers
    named = [(f"{i}.{n}", p) for i, layer in layers.items() for n, p in layer.named_parameters()]
    return found, [name for name, weight in named if sink_of(weight).float8 is not None]


def test_the_blocks_matrices_are_multiplied_in_float8_and_the_model_learns_alike(monkeypatch) -> None:
    plain, none = losses(monkeypatch, "bfloat16")
    quick, marked = losses(monkeypatch, "float8")
    assert none == []
    matrices = ("attention.output", "attention.qkv", "mlp.down", "mlp.up")
    assert sorted(marked) == [f"1.{name}.weight" for name in matrices]
    assert quick != plain and quick == pytest.approx(plain, rel=0.02)


def test_a_users_own_allocator_setting_stays(monkeypatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    keep_memory_whole()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    keep_memory_whole()
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"


def test_a_memory_budget_sets_what_is_computed_again_and_reports_it() -> None:
    job = load_job("tiny", ["layout.micro_batch=8"])
    assert within_budget(job, on_cpu=True, value_bytes=4) == (job, "")
    tight = load_job("tiny", ["layout.micro_batch=8", "train.memory_budget=175 MiB"])
    settled, line = within_budget(tight, on_cpu=True, value_bytes=4)
    assert settled.layout.recompute == "full" and 0 < settled.layout.recompute_ratio < 1
    assert line.startswith("recompute full of") and "\n" not in line
    assert within_budget(settled.check(), on_cpu=True, value_bytes=4)[0] == settled
    keys = ["model.hidden=512", "train.memory_offload=auto", "train.memory_budget"]
    needed = needed_bytes(work_of(load_job("tiny", keys[:1]), 4), on_cpu=True)
    tight = load_job("tiny", [*keys[:2], f"{keys[2]}={int(needed) - 1}"])
    settled, line = within_budget(tight, on_cpu=True, value_bytes=4)
    assert settled.layout.offload_optimizer and settled.layout.offload_optimizer_ratio < 1
    assert line.startswith("recompute none, optimizer state of") and "\n" not in line
    assert within_budget(settled.check(), on_cpu=True, value_bytes=4)[0] == settled
