"""Training of `gpu.py`: whole steps of Myriad's engine, a plain compiled loop, and the planner's
prediction beside each."""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_timing import wait
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig, Precision, float8_scaling
from myriad.parallel.batch import Batch
from myriad.planner.cluster_config import Accelerator, Cluster, Link, Links
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_layers import computed_pairs
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import FrameworkProfile, Workload
from myriad.recipes import read_recipe
from myriad.train.fit import fit

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers import nanogpt_loop

__all__ = ["CASES", "TrainingCase", "print_predictions", "print_training"]

GPT_13B = ModelConfig(
    layers=24, hidden=2048, heads=16, vocabulary=50304, sequence=2048, position="learned", norm="layer",
    activation="gelu",
)  # fmt: skip
"""GPT-3 XL (Brown et al., arXiv 2005.14165, table 2.1: 1.3B) with heads of 128."""
GPT2 = ModelConfig(**read_recipe("models", "gpt2-124m", "model"))
LLAMA_8B = ModelConfig(**read_recipe("models", "llama3-8b", "model"))
TINY = ModelConfig(
    layers=2, hidden=128, heads=2, vocabulary=512, sequence=128, position="learned", norm="layer"
)
TINY_LLAMA = ModelConfig(
    layers=3, hidden=128, heads=2, kv_heads=1, ffn_hidden=256, vocabulary=512, sequence=128, norm="rms",
    activation="swiglu", tied=False,
)  # fmt: skip
_WARM_STEPS, _STEPS, _MICRO_BATCHES = 2, 4, 4
_FULL = 0.9
"""Share of a device's memory that is planned for."""
_DATA_SHEET_BF16 = 989e12
"""H100 and H200 SXM, dense."""


@dataclass(frozen=True)
class TrainingCase:
    """One model as it is trained."""

    name: str
    model: ModelConfig
    precision: Precision = "bfloat16"
    micro_batch: int = 1
    fills: bool = False
    """As many layers as fit."""
    cuda_graphs: bool = False
    """Captured (`train.cuda_graphs`)."""

    @property
    def rows(self) -> int:
        """Sequences of an iteration."""
        return _MICRO_BATCHES * self.micro_batch

    def work(self) -> Workload:
        """One iteration, for the planner."""
        practice = FrameworkProfile(quantization=float8_scaling(self.precision), cuda_graphs=self.cuda_graphs)
        layout = Layout(micro_batch=self.micro_batch)
        return Workload(self.model, layout, self.rows, profile=practice)

    def with_layers(self, count: int) -> "TrainingCase":
        """With so many, where it fills."""
        return replace(self, model=self.model.model_copy(update={"layers": count})) if self.fills else self

    def fits(self, memory_bytes: float) -> bool:
        """As the planner thinks."""
        return float(memory_of_ranks(self.work())[0].total) <= _FULL * memory_bytes


def fitted(cases: Sequence["TrainingCase"], memory_bytes: float) -> list["TrainingCase"]:
    """All of those that fill with the same number of layers, the largest with which each fits."""
    filling = [case for case in cases if case.fills]
    most = max((case.model.layers for case in filling), default=1)
    counts = (
        count
        for count in range(most, 1, -1)
        if all(case.with_layers(count).fits(memory_bytes) for case in filling)
    )
    count = next(counts, 1)
    return [case.with_layers(count) for case in cases]


def _changed(case: TrainingCase, name: str, precision: Precision = "bfloat16", **model: Any) -> TrainingCase:
    micro_batch = case.micro_batch
    if "sequence" in model:
        micro_batch = max(1, micro_batch * case.model.sequence // model["sequence"])
    changed = case.model.model_copy(update=model)
    return replace(case, name=name, model=changed, precision=precision, micro_batch=micro_batch)


def _cases(gpt: TrainingCase, llama: TrainingCase, long: int, window: int) -> Iterator[TrainingCase]:
    """Yield the cases of each model: both lengths, float8, a window, the parallel block."""
    for base in (gpt, llama):
        short = base.model.sequence
        far = {"sequence": long}
        yield replace(base, name=f"{base.name}, {short}")
        yield _changed(base, f"{base.name}, {short}, float8", "float8")
        yield _changed(base, f"{base.name}, {short}, parallel", block="parallel")
        yield _changed(base, f"{base.name}, {long}", **far)
        yield _changed(base, f"{base.name}, {long}, float8", "float8", **far)
        yield _changed(base, f"{base.name}, {long}, window {window}", window=window, **far)
        name = f"{base.name}, {long}, window {window}, float8, par."
        yield _changed(base, name, "float8", window=window, block="parallel", **far)


def _captured(case: TrainingCase) -> tuple[TrainingCase, TrainingCase]:
    """Small products, one sequence at a time: started one by one, and by CUDA graphs."""
    graphs = replace(case, name=f"{case.name}, CUDA graphs", cuda_graphs=True)
    return case, graphs


_LLAMA_SHORT = LLAMA_8B.model_copy(update={"sequence": 2048})
CASES = tuple(
    _cases(
        TrainingCase("GPT 1.3B", GPT_13B, micro_batch=8),
        TrainingCase("Llama-3-8B layers", _LLAMA_SHORT, micro_batch=4, fills=True),
        8192,
        512,
    )
) + _captured(TrainingCase("GPT-2 124M, 1024, one sequence", GPT2))
SMALL_CASES = tuple(
    _cases(
        TrainingCase("tiny GPT", TINY, micro_batch=2),
        TrainingCase("tiny Llama", TINY_LLAMA, micro_batch=2),
        256,
        32,
    )
) + _captured(TrainingCase("tiny GPT, one sequence", TINY))


class QuickGPT(GPT):
    """The same shapes; initial values are a few random ones over and over: making billions on a host takes
    minutes, and no time depends on them."""

    def _initial_values(self, name: str, shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return super()._initial_values(name, shape)
        few = torch.randn(65521, generator=torch.Generator().manual_seed(self.seed)) * 0.02
        return few.repeat(-(-shape.numel() // len(few)))[: shape.numel()].view(shape)


@dataclass(frozen=True)
class Figures:
    """Figures of one training."""

    tokens_per_second: float
    memory_bytes: float

    def mfu(self, model: ModelConfig, peak: float, *, attended: bool) -> float:
        """Return the MFU, counting all pairs of a sequence (the usual way) or only the attended ones."""
        flops = model.flops_per_token()
        if attended:
            width = 12.0 * model.heads * model.head_width / model.sequence
            counted = (model.attended_pairs(layer) for layer in range(model.layers))
            computed = (computed_pairs(model, layer) for layer in range(model.layers))
            flops -= width * (sum(counted) - sum(computed))
        return self.tokens_per_second * flops / peak


def single_gpu(accelerator: Accelerator) -> Cluster:
    """A single rank, without communication."""
    link = Link(bytes_per_second=450e9, latency_seconds=2e-6)
    return Cluster(
        name=accelerator.name,
        nodes=1,
        accelerators_per_node=1,
        accelerator=accelerator,
        links=Links(node=link),
    )


def predicted(case: TrainingCase, accelerator: Accelerator) -> Figures:
    """By the planner."""
    work = case.work()
    seconds = simulate(Costs(work, single_gpu(accelerator)), spans=False).seconds
    memory = memory_of_ranks(work)[0]
    return Figures(work.global_batch * case.model.sequence / seconds, float(memory.total))


def trained(case: TrainingCase, device: torch.device) -> Figures:
    """By Myriad's engine."""
    rows = case.rows
    batch = _batch(case.model, rows, device)
    _forget(device)
    steps = fit(
        QuickGPT(case.model, seed=1),
        lambda step, wanted: batch.rows(wanted.start, wanted.stop),
        Layout(micro_batch=case.micro_batch),
        OptimizerConfig(learning_rate=1e-4, decay="constant"),
        steps=_WARM_STEPS + _STEPS,
        global_batch=rows,
        precision=case.precision,
        device="cuda" if device.type == "cuda" else "cpu",
        cuda_graphs=case.cuda_graphs,
    )
    seconds = 0.0
    for step, _ in steps:
        wait(device)
        if step == _WARM_STEPS:
            seconds = -time.perf_counter()
    seconds += time.perf_counter()
    return Figures(rows * case.model.sequence * _STEPS / seconds, _memory(device))


def compiled_loop(case: TrainingCase, device: torch.device, compiled: bool) -> Figures:
    """The same model as nanoGPT writes it; its batch is one micro-batch."""
    model = case.model
    rows = case.micro_batch
    batch = _batch(model, rows, device)
    _forget(device)
    dimensions = model.sequence, model.padded_vocabulary(), model.layers, model.heads, model.hidden
    with device:
        peer = nanogpt_loop.GPT(nanogpt_loop.GPTConfig(*dimensions))
    step = nanogpt_loop.build_step(peer, precision="bfloat16", compiled=compiled, device=device.type)
    for _ in range(_WARM_STEPS):
        step(batch.inputs, batch.targets)
    began = time.perf_counter()
    for _ in range(_STEPS):
        step(batch.inputs, batch.targets)
    wait(device)
    seconds = time.perf_counter() - began
    return Figures(rows * model.sequence * _STEPS / seconds, _memory(device))


def _batch(model: ModelConfig, rows: int, device: torch.device) -> Batch:
    tokens = torch.randint(model.vocabulary, (rows, model.sequence + 1), device=device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(rows, device=device))


def _forget(device: torch.device) -> None:
    """What earlier trainings left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory(device: torch.device) -> float:
    return float(torch.cuda.max_memory_reserved()) if device.type == "cuda" else 0.0


def accelerator_of(device: torch.device) -> Accelerator:
    """The recipe of this device; of a CPU the laptop's core."""
    if device.type == "cpu":
        return Accelerator(**read_recipe("clusters", "laptop", "cluster")["accelerator"])
    name = torch.cuda.get_device_name(device)
    known = "h200-sxm-141gb" if "H200" in name else "a100-sxm-80gb" if "A100" in name else "h100-sxm-80gb"
    return Accelerator(**read_recipe("accelerators", known, "accelerator"))


_HEAD = f"{'training':46}{'layers':>7}{'batch':>6}{'tokens/s':>11}{'MFU all':>9}{'attended':>9}{'GiB':>7}"


def _line(case: TrainingCase, found: Figures, peak: float) -> str:
    whole, attended = (found.mfu(case.model, peak, attended=only) for only in (False, True))
    return (
        f"{case.name:46}{case.model.layers:>7}{case.micro_batch:>6}{found.tokens_per_second:>11,.0f}"
        f"{whole:>9.1%}{attended:>9.1%}{found.memory_bytes / 2**30:>7.1f}"
    )


def print_training(device: torch.device, small: bool, compiles: bool, left: Callable[[], float]) -> None:
    """Measured, and predicted beside it."""
    accelerator = accelerator_of(device)
    memory = float(accelerator.memory_bytes)
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    peak = _DATA_SHEET_BF16 if device.type == "cuda" else accelerator.peak_flops_per_second
    print(f"\n{_HEAD}{'predicted':>11}{'error':>8}")
    for case in fitted(SMALL_CASES if small else CASES, memory):
        if left() <= 0:
            print(f"{case.name:46}  left out: no time")
            continue
        told = predicted(case, accelerator)
        _print_one(case, partial(trained, case, device), peak, told)
    base = (SMALL_CASES if small else CASES)[0]
    if left() > 0:
        name = "the same as a plain compiled loop" if compiles else "the same as a plain loop"
        loop = partial(compiled_loop, base, device, compiles)
        _print_one(replace(base, name=name), loop, peak, None)


def _print_one(case: TrainingCase, run: Callable[[], Figures], peak: float, told: Figures | None) -> None:
    try:
        found = run()
    except torch.OutOfMemoryError:
        print(f"{case.name:46}  does not fit")
        return
    line = _line(case, found, peak)
    if told is not None:
        error = told.tokens_per_second / found.tokens_per_second - 1
        line += f"{told.tokens_per_second:>11,.0f}{error:>+8.0%}"
    print(line, flush=True)


def print_predictions(name: str) -> None:
    """What the planner expects of every case on an accelerator."""
    accelerator = Accelerator(**read_recipe("accelerators", name, "--predict"))
    print(f"\n{accelerator.name}: predicted, not measured\n{_HEAD}")
    for case in fitted(CASES, float(accelerator.memory_bytes)):
        print(_line(case, predicted(case, accelerator), accelerator.peak_flops_per_second))
