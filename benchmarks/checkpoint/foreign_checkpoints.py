"""Checkpoints that Megatron Core and DeepSpeed really wrote, imported, and the next step of both compared.

    pip install --no-deps --target /tmp/theirs megatron-core deepspeed hjson py-cpuinfo ninja msgpack einops
    python benchmarks/checkpoint/foreign_checkpoints.py --packages /tmp/theirs  all cases, about three minutes
    python benchmarks/checkpoint/foreign_checkpoints.py --packages /tmp/theirs --only zero3

In each case the other system trains a small model two steps in a layout of its own, on CPUs with gloo, saves,
and trains one step more. Myriad imports the checkpoint and takes the same step on one rank.

    weights   largest difference of the imported weights from theirs (0: the same bits; with bf16 and the
              distributed optimizer, of both rounded to bfloat16)
    logits    largest difference of the logits before the step, and the largest logit; where theirs are known
    step      root mean square of the difference of both updates, as a share of theirs
    largest   largest difference of an updated weight, as a share of the learning rate
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.checkpoint_files import load
from myriad.checkpoint.foreign.megatron_names import cut_dim
from myriad.checkpoint.foreign.training_state import ForeignState
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.groups import close_world, open_world
from myriad.job import Job
from myriad.model.definition import Context, values_of_rank
from myriad.model.gpt import GPT, build_full
from myriad.optim.precision import resolve_precision
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.run import Run
from myriad.telemetry.spans import Recorder
from myriad.train.checkpoint_tools.foreign_checkpoints import foreign_state, import_foreign
from myriad.train.engine_setup import stage_layers

VOCABULARY, SEQUENCE, BATCH, RATE = 96, 16, 4, 1e-3
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One checkpoint of one system."""

    name: str
    ranks: int
    task: dict[str, Any]
    folder: str = "."
    """Folder of the checkpoint inside the output folder."""


def _megatron(name: str, kind: str, *, tp: int = 1, pp: int = 1, dp: int = 1, **keys: Any) -> Case:
    task = {"vpp": None, "distributed_optimizer": False, "bf16": False, "format": "torch", "sharding": ""}
    task |= {"kind": kind, "tp": tp, "pp": pp, "dp": dp} | keys
    return Case(name, tp * pp * dp, task)


def _zero(name: str, kind: str, stage: int, *, bf16: bool = False, universal: bool = False) -> Case:
    task = {"kind": kind, "stage": stage, "bf16": bf16, "universal": universal}
    return Case(name, 2, task, "global_step2_universal" if universal else ".")


SPREAD = {"distributed_optimizer": True, "sharding": "fully_reshardable"}
CASES = (
    _megatron("torch, GPT", "gpt"),
    _megatron("torch, Llama, tp 2", "llama", tp=2),
    _megatron("torch, GPT, tp 2, pp 2", "gpt", tp=2, pp=2),
    _megatron("torch, Llama, pp 2, 2 virtual stages", "llama", pp=2, vpp=2),
    _megatron("torch, GPT, dp 2, distributed optimizer", "gpt", dp=2, **SPREAD),
    _megatron("torch, GPT, pp 2, dp 2, distributed optimizer, bf16", "gpt", pp=2, dp=2, bf16=True, **SPREAD),
    _megatron("torch, Llama, tp 2, bf16", "llama", tp=2, bf16=True),
    _megatron("torch_dist, Llama", "llama", format="torch_dist"),
    _megatron("torch_dist, GPT, tp 2, pp 2", "gpt", tp=2, pp=2, format="torch_dist"),
    _megatron(
        "torch_dist, Llama, tp 2, dp 2, distributed optimizer",
        "llama",
        tp=2,
        dp=2,
        format="torch_dist",
        **SPREAD,
    ),
    _zero("zero1, Llama", "llama", 1),
    _zero("zero2, GPT-2", "gpt2", 2),
    _zero("zero3, Llama", "llama", 3),
    _zero("zero2, Llama, bf16", "llama", 2, bf16=True),
    _zero("zero2 universal, Llama", "llama", 2, universal=True),
    _zero("zero3 universal, Llama", "llama", 3, universal=True),
)


def produce(case: Case, packages: Path, out: Path) -> None:
    """Start the ranks of the other system and wait."""
    script = HERE / ("foreign_deepspeed.py" if "stage" in case.task else "foreign_megatron.py")
    paths = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    common = os.environ | {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randint(20000, 29000)),
        "WORLD_SIZE": str(case.ranks),
    }
    task = json.dumps(case.task | {"out": str(out)})
    started = []
    for rank in range(case.ranks):
        log = (out / f"log{rank}").open("w")
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen([sys.executable, script, task], env=own, stdout=log, stderr=log))
    codes = [process.wait(timeout=300) for process in started]
    if any(codes):
        raise SystemExit((out / f"log{codes.index(next(filter(None, codes)))}").read_text()[-3000:])


def _theirs(case: Case, out: Path, state: ForeignState) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights before and after the third step, whole, under Myriad's names."""
    found = []
    for when in ("before", "after"):
        if "stage" in case.task:
            read: Callable[[str], torch.Tensor] = torch.load(out / "next.pt")[when].__getitem__
        else:
            read = _merged(case, out, when)
        found.append({name: mapping.read(read) for name, mapping in state.mappings.items()})
    return tuple(found)


def _merged(case: Case, out: Path, when: str) -> Callable[[str], torch.Tensor]:
    tp, pp = case.task["tp"], case.task["pp"]
    ranks: list[dict[str, torch.Tensor]] = []
    for rank in range(tp):
        ranks.append({})
        for stage in range(pp):
            ranks[-1] |= torch.load(out / f"next_tp{rank}_pp{stage}.pt")[when]

    def read(name: str) -> torch.Tensor:
        parts = [rank[name] for rank in ranks]
        dim = cut_dim(name)
        if dim is None:
            return parts[0]
        if case.task["kind"] == "llama" and ".linear_fc1." in name:
            return torch.cat([part.chunk(2, 0)[half] for half in (0, 1) for part in parts], 0)
        return torch.cat(parts, dim)

    return read


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


@torch.no_grad()
def _logits(job: Job, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    definition, layers = GPT(job.model, 1), build_full(job.model, 1).eval()
    for prefix, layer in zip(definition.names, layers, strict=True):
        for name, parameter in layer.named_parameters():
            whole = f"{prefix}.{name}"
            if whole in weights:
                parameter.copy_(values_of_rank(definition, whole, weights[whole]))
    x = _tokens(7)[:, :-1]
    for layer in layers[:-1]:
        x = layer(x, Context())
    return layers[-1].logits(x)


def our_step(run: Path, precision: Any) -> tuple[Job, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The imported run's job, and its weights before and after its next step."""
    job = Run(run).job()
    assert job is not None
    tokens = _tokens(2)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(BATCH))
    device, layout = torch.device("cpu"), job.layout.model_copy(update={"micro_batch": BATCH})
    dtype, definition = resolve_precision(precision, device), GPT(job.model, 1)
    groups = open_world(layout, device, comm=job.comm)
    layers = stage_layers(definition, layout, groups, batch, dtype)
    engine = Engine(
        definition, groups, layers, batch, 1, job.optimizer, seed=1, dtype=dtype, device=device,
        recorder=Recorder(), overlap=job.overlap, comm=job.comm,
    )  # fmt: skip
    progress = load(CheckpointFolder(run / "checkpoints").at_step(2).where, list(engine.all_shards()))
    engine.optimizer.steps_done = progress["optimizer_steps"]
    engine.loaded()
    before = _weights(engine, job)
    engine.train_step(lambda rows=None: batch, RATE, BATCH * SEQUENCE)
    after = _weights(engine, job)
    engine.close()
    close_world()
    return job, before, after


def _weights(engine: Engine, job: Job) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part in engine.all_shards():
        if part.name.startswith("model."):
            whole = found.setdefault(part.name.removeprefix("model."), torch.zeros(part.full_shape))
            at = zip(part.offsets, part.values.shape, strict=True)
            whole[tuple(slice(start, start + size) for start, size in at)] = part.values
    return found


def compare(case: Case, packages: Path) -> list[str]:
    """One row of the table."""
    with tempfile.TemporaryDirectory(prefix="foreign-") as name:
        out = Path(name)
        produce(case, packages, out)
        folder = out / case.folder
        config = out / "config.json" if "stage" in case.task else None
        import_foreign(folder, out / "run", config=config)
        state = foreign_state(folder, config)
        before, after = _theirs(case, out, state)
        job, ours_before, ours_after = our_step(out / "run", "bfloat16" if case.task["bf16"] else "float32")
        if case.task["bf16"] and case.task.get("distributed_optimizer"):  # its masters are in its files alone
            rounded = {name: values.bfloat16().float() for name, values in ours_before.items()}
        else:
            rounded = ours_before
        weights = max(float((before[n] - rounded[n]).abs().max()) for n in before)
        pairs = [(after[n] - before[n], ours_after[n] - ours_before[n]) for n in before]
        wrong = sum(float((a - b).square().sum()) for a, b in pairs)
        share = (wrong / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5
        largest = max(float((a - b).abs().max()) for a, b in pairs) / RATE
        logits = "-"
        if (out / "logits.pt").exists():
            known = torch.load(out / "logits.pt")
            difference = (known - _logits(job, ours_before)[..., : known.shape[-1]]).abs().max()
            logits = f"{float(difference):.1e} of {float(known.abs().max()):.1f}"
    if rounded is not ours_before:
        return [case.name, f"{weights:.1e}", logits, "-", "-"]
    return [case.name, f"{weights:.1e}", logits, f"{share:.1e}", f"{largest:.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--packages", type=Path, required=True, help="folder with megatron-core and deepspeed"
    )
    parser.add_argument("--only", default="", help="cases whose name holds this")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print("| checkpoint | weights | logits | step | largest |\n|---|---|---|---|---|")
    for case in CASES:
        if settings.only in case.name:
            print(f"| {' | '.join(compare(case, settings.packages))} |", flush=True)


if __name__ == "__main__":
    main()
