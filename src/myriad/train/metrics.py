"""The metrics of one step: a line of metrics.jsonl; and the peak FLOP/s that MFU is measured against.

Known accelerators have the peak of their data sheet (dense, no sparsity). On other devices the peak is the
fastest matrix product ever measured there. Every rank multiplies at once, as in training, at the start and
after a few early steps. A busy machine makes all of these slow. The best one is therefore stored for the
user, by device, ranks, threads, type and version, and is never lowered. A step above the peak raises it,
because no step can exceed the machine's real peak, and starts one more measurement.

A process that gets fewer seconds of processor time than its threads took, although there are cores enough,
shared the cores with other programs. If that was so when the peak was measured, its source says it, and the
next run measures again at its start.
"""

import json
import math
import re
import resource
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import torch

from myriad.data.windows import BatchWords, attended_pairs
from myriad.job import Job
from myriad.model.config import ModelConfig
from myriad.parallel.optimizer_step import StepResult
from myriad.system.machine import num_cores, processor_name
from myriad.system.state_folder import cache_folder
from myriad.system.whole_file import write_whole
from myriad.telemetry.spans import Recorder

__all__ = ["BatchWork", "PeakFlopsTracker", "StepMeter", "document_work", "find_peak"]


class BatchWork(NamedTuple):
    """The work of one step, on all ranks."""

    num_tokens: int
    """Predicted tokens, without padding."""
    num_targets: int
    """Predicted tokens that have a loss; at least 1, by which the loss is divided."""
    flops: float
    """Model FLOPs of the step."""

    @classmethod
    def of_windows(cls, job: Job) -> "BatchWork":
        """Return the work of a step whose windows are sequences."""
        return cls(job.targets, job.targets, job.model.flops_per_token() * job.targets)

    @classmethod
    def of_documents(cls, words: BatchWords, model: ModelConfig) -> "BatchWork":
        """Return the work of a step with packed documents: attention inside documents."""
        pairs = (words.num_pairs, words.num_window_pairs)
        flops = model.flops_of_documents(words.num_tokens, *pairs)
        return cls(words.num_tokens, max(1, words.num_targets), flops)


def document_work(job: Job, words: BatchWords, lengths: Iterable[Sequence[int]]) -> float:
    """Return the work of a replica's packed documents, relative to average ones of the batch in as many
    positions. ``words``: of the batch; ``lengths``: those of the documents in each of its windows."""
    model, own = job.model, np.array([length for row in lengths for length in row])
    num_positions = int(own.sum())
    pairs = (int(attended_pairs(own, window).sum()) for window in (None, model.window))
    found = model.flops_of_documents(num_positions, *pairs)
    batch = model.flops_of_documents(job.targets, words.num_pairs, words.num_window_pairs)
    return found / (batch * num_positions / job.targets)


@dataclass(frozen=True)
class StepMeter:
    """Compute a step's metrics from its result and spans."""

    peak_flops: float
    """FLOP/s of all ranks together."""
    device: torch.device
    model: ModelConfig

    def line(
        self,
        step: int,
        tokens: int,
        work: BatchWork,
        result: StepResult,
        learning_rate: float,
        seconds: float,
        data_wait: float,
        checkpoint_wait: float,
        recorder: Recorder,
    ) -> dict[str, Any]:
        """Return the metrics of a step.

        ``step`` and ``tokens`` count those done, padding included; ``time`` is the end of the step. A skipped
        batch has ``skipped``, and ``overflow`` if gradients overflowed at the ``loss_scale`` of float16. A
        non-finite value is null.
        """
        return {
            "time": time.time(),
            "step": step,
            "loss": _finite(result.loss),
            "grad_norm": _finite(result.grad_norm),
            "learning_rate": learning_rate,
            "tokens": tokens,
            "tokens_per_second": work.num_tokens / seconds,
            "step_seconds": seconds,
            "flops": work.flops,
            "mfu": work.flops / seconds / self.peak_flops,
            "memory_bytes": self._memory_bytes(),
            "data_wait_seconds": data_wait,
            "checkpoint_wait_seconds": checkpoint_wait,
            "exposed_comm_seconds": recorder.take_exposed(),
            "data_digest": f"{result.data_digest:016x}",
            **self._predictions(result),
            **_statistics(result),
            **({"loss_scale": result.loss_scale} if result.loss_scale is not None else {}),
            **({"skipped": 1} if result.skipped else {}),
            **({"overflow": 1} if result.overflow else {}),
            **({"user": dict(result.user)} if result.user else {}),
        }

    def _predictions(self, result: StepResult) -> dict[str, float | None]:
        """Return the mean loss of the prediction layers, if the model has any."""
        terms = result.further_losses
        return {"prediction_loss": _finite(self.model.prediction_loss(terms))} if terms else {}

    def _memory_bytes(self) -> int:
        """Return the peak memory of this rank so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _statistics(result: StepResult) -> dict[str, Any]:
    """Return the noise scale and the norms of layers, if the step has them."""
    found: dict[str, Any] = {}
    if (noise := result.noise) is not None:
        found |= {"noise_scale": _finite(noise.scale), "noise_gradient": noise.gradient}
        found["noise_variance"] = noise.variance
    if result.max_attention_score is not None:
        found["max_attention_logit"] = _finite(result.max_attention_score)
    if (load := result.expert_load) is not None:
        found |= {"expert_load": load.ratio, "busiest_expert": f"{load.layer}, expert {load.expert}"}
    if result.router_entropy is not None:
        found["router_entropy"] = _finite(result.router_entropy)
    if result.dropped_share is not None:
        found["dropped_share"] = result.dropped_share
    if (loads := result.expert_loads) is not None:
        found["expert_loads"] = {block: [round(one, 3) for one in own] for block, own in loads.items()}
    if (norms := result.layer_norms) is not None:
        found["layer_norms"] = {
            name: {layer: _finite(norm) for layer, norm in of_layers.items()}
            for name, of_layers in norms._asdict().items()
        }
    return found


def _finite(value: float) -> float | None:
    """Return a finite value, else ``None``, because JSON has no other numbers."""
    return value if math.isfinite(value) else None


_DATA_SHEETS = {
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H800 PCIE": 756e12,
    "H200 NVL": 835e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "H20": 148e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "L4": 121e12,
    "L40S": 362e12,
    "B200": 2250e12,
}
"""bfloat16 and float16 FLOP/s without sparsity, from NVIDIA's data sheets (SXM, unless a word says
otherwise).

Keys are words of the device's name; the first key whose words are all in the name counts.
"""
_FLOAT16_ONLY = {"V100 PCIE": 112e12, "V100": 125e12, "T4": 65e12}
"""float16 FLOP/s from NVIDIA's data sheets (for the V100: SXM2)."""
_START_SECONDS, _TRY_SECONDS = 0.4, 0.05
_TRY_STEPS = (2, 5, 10, 20)
"""Steps of a run after which the peak is measured again."""
_MOST_OTHERS = 0.15
"""Share of the cores that other programs may have without being reported."""
_NEAR_RATIO = 0.8
"""Share of the highest rate that confirms it; small matrices and short tries are slower."""


@dataclass(frozen=True)
class _PeakFlops:
    """FLOP/s of one rank, and the source of the number."""

    flops_per_second: float
    source: str


class PeakFlopsTracker:
    """The highest peak measured on this machine so far, updated during the run."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, ranks: int = 1, *, writes: bool = True
    ) -> None:
        """``ranks`` is their number on this node; ``writes`` says whether this rank stores the results."""
        self._device, self._dtype, self._writes = device, dtype, writes
        self._kept = cache_folder() / "peak.json"
        self._name = str(dtype).removeprefix("torch.")
        threads = torch.get_num_threads()
        place = f"{_processor(device)}, {ranks} ranks, {threads} threads"
        self._key = f"{place}, {self._name}, torch {torch.__version__}"
        self._granted = min(1.0, num_cores() / (ranks * threads))
        """Share of its threads' time that a rank can have."""
        self._sheet = _data_sheet(device, dtype)
        if self._sheet is None:
            self._best = self._read()
            if not self._best or self._best.get("others"):
                self._try_product(_START_SECONDS)

    @property
    def peak(self) -> _PeakFlops:
        """The highest peak so far."""
        if self._sheet is not None:
            return self._sheet
        when = datetime.fromtimestamp(self._best["time"])
        source = f"measured {self._name} {self._best['by']}, {when:%Y-%m-%d %H:%M}"
        if others := self._best.get("others"):
            source += f"; other programs had {others:.0%} of the cores then, so it may be too low"
        return _PeakFlops(self._best["flops_per_second"], source)

    def after_step(self, step: int, flops_per_second: float) -> bool:
        """Compare the peak with the rate of this step, measure again after early steps and after a step that
        is faster than the peak, and return whether the peak rose."""
        if self._sheet is not None:
            return False
        rose = self._take(flops_per_second, "training step")
        if rose or step in _TRY_STEPS:
            rose |= self._try_product(_TRY_SECONDS)
        return rose

    def _try_product(self, seconds: float) -> bool:
        found = _measure(self._device, self._dtype, seconds)
        others = max(0.0, 1.0 - found.cpu_share / self._granted)
        return self._take(found.flops_per_second, "matrix product", others if others > _MOST_OTHERS else 0.0)

    def _take(self, flops_per_second: float, by: str, others: float = 0.0) -> bool:
        """Keep a rate if it is the highest, and return whether it is. ``others``: share of the cores that
        other programs had; a product that is nearly as fast without them confirms the highest rate."""
        if self._best and flops_per_second <= self._best["flops_per_second"]:
            is_near = flops_per_second > _NEAR_RATIO * self._best["flops_per_second"]
            if others or not self._best.get("others") or not is_near or by == "training step":
                return False
            self._best = self._best | {"others": 0.0}
            self._store()
            return True
        self._best = {"flops_per_second": flops_per_second, "by": by, "time": time.time(), "others": others}
        self._store()
        return True

    def _store(self) -> None:
        if not self._writes:
            return
        with suppress(OSError):  # the home folder is not writable: the next run measures again
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            if self._best["flops_per_second"] >= self._read().get("flops_per_second", 0.0):
                write_whole(self._kept, json.dumps(self._known() | {self._key: self._best}))

    def _read(self) -> dict[str, Any]:
        found: Any = self._known().get(self._key)
        numbers = [found.get("flops_per_second"), found.get("time")] if isinstance(found, dict) else [None]
        is_right = all(isinstance(number, float) and number > 0 for number in numbers)
        is_right &= isinstance(found, dict) and isinstance(found.get("others", 0.0), float)
        return dict(found) if is_right and isinstance(found.get("by"), str) else {}

    def _known(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            known = json.loads(self._kept.read_text())
            return known if isinstance(known, dict) else {}
        return {}


def find_peak(
    device: torch.device, dtype: torch.dtype, measure_seconds: float = _START_SECONDS
) -> _PeakFlops:
    """Return the data sheet's peak, or measure one rank's peak now; nothing is stored."""
    name = str(dtype).removeprefix("torch.")
    sheet = _data_sheet(device, dtype)
    if sheet is not None:
        return sheet
    found = _measure(device, dtype, measure_seconds)
    return _PeakFlops(found.flops_per_second, f"measured {name} matrix product")


def _data_sheet(device: torch.device, dtype: torch.dtype) -> _PeakFlops | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name, sheets = torch.cuda.get_device_name(device), _DATA_SHEETS
    if dtype == torch.float16:
        sheets = _DATA_SHEETS | _FLOAT16_ONLY
    words = set(re.split(r"[\s-]+", name.upper()))
    whole = "MIG" not in words  # a MIG slice has only a part of its device's peak
    known = next((one for one in sheets if whole and words.issuperset(one.split())), None)
    short = "bf16" if dtype == torch.bfloat16 else "fp16"
    return None if known is None else _PeakFlops(sheets[known], f"{known} data sheet, {short}")


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {num_cores()} cores"


class _Product(NamedTuple):
    """The fastest matrix product of a measurement."""

    flops_per_second: float
    cpu_share: float
    """Processor time that the process got, over the time of its threads in the measurement; 1 on a GPU."""


def _measure(device: torch.device, dtype: torch.dtype, seconds: float) -> _Product:
    """Return the fastest of the products that fit into ``seconds``.

    On a CPU the matrices grow from 128 rows to 1,024 as long as the next product fits too: a core without
    instructions for float16 takes 2 s for the largest.
    """
    size, largest = (128, 1024) if device.type == "cpu" else (8192, 8192)
    a, b = _square_pair(size, device, dtype)
    wall = cpu = best = 0.0
    end = time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        _synchronize(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        a @ b
        _synchronize(device)
        now = time.perf_counter()
        best = max(best, 2 * size**3 / (now - start))
        wall, cpu = wall + now - start, cpu + time.process_time() - cpu_start
        if size < largest and now + 8 * (now - start) < end:
            size *= 2
            a, b = _square_pair(size, device, dtype)
    return _Product(best, 1.0 if device.type == "cuda" else cpu / (wall * torch.get_num_threads()))


def _square_pair(size: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator(device).manual_seed(1)  # a run's random numbers do not depend on the measurement
    a, b = (torch.randn(size, size, device=device, generator=own).to(dtype) for _ in range(2))
    return a, b


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
