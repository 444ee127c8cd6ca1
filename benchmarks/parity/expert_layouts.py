"""Mixtures of experts in every layout of eight ranks at most, in real processes, against one process.

    python benchmarks/parity/expert_layouts.py --folder FOLDER [--steps 3] [--every N] [--pairs] [--groups]
        [--capacity C] [--between]

`layouts` lists every grid of dp, tp, pp, ep and etp with two to eight ranks in which experts lie on several
ranks, each with all ZeRO levels and two schedules; recomputation, micro-batch, overlap, router, optimizer and
how often a token travels (``layout.expert_dispatch``, on nodes of two ranks) take turns. Each job trains on
ranks that gloo joins and is compared with one process on the same tokens, in float32: losses, gradient norms
and every whole parameter must agree within 1e-5, and the load of the busiest expert of each step must be the
same number. Finished jobs are kept in FOLDER, and a command that was
interrupted continues there. ``--every N`` trains each N-th job only. ``--pairs``: the grids and ZeRO levels
that allow ``overlap.pairs``, with it. ``--groups``: those in which several groups of replicas can hold the
whole state, with the smallest ones (``layout.shard_group``). ``--capacity``: experts drop tokens beyond this
many times their share (``model.expert_capacity``), and the share of what is dropped must be the same number
too. ``--between``: the grids with ``1 < etp < tp`` only. Ends with 1 if a job failed or differs.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from myriad.checkpoint.checkpoint_files import MODEL_PREFIX, load_model, save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.progress_bar import count_bar
from myriad.comm.groups import close_world
from myriad.comm.layout import Layout, check_layout, lacks_for_pairs
from myriad.errors import BadInputError
from myriad.program.config import OverlapConfig
from pairs import Pools

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from parity_case import TINY, Case, batch_of_rank, make_engine

MOST_RANKS, GLOBAL_BATCH, TOLERANCE = 8, 8, 1e-5
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"experts": 8, "expert_hidden": 16, "balance_loss": 0.1, "router_z_loss": 0.01},
    "sigmoid": {
        "experts": 8,
        "experts_per_token": 3,
        "expert_hidden": 16,
        "shared_experts": 1,
        "router_scores": "sigmoid",
        "router_scale": 2.5,
        "activation": "swiglu",
    },
}
OPTIMIZERS = ("adamw", "muon", "lamb")
RECOMPUTE = ("none", "selective", "full")
PARTS = (2, 4)
DISPATCH = ("expert", "rank", "node")
SCHEDULES = {1: ("1f1b",), 2: ("1f1b", "zero-bubble"), 4: ("eager-1f1b", "zero-bubble-v")}
IN_PAIRS = (("eager-1f1b", 1), ("interleaved", 2), ("dualpipe-v", 2))
"""Schedules of pairs on several pipeline ranks, and the stages of a rank."""


@dataclass(frozen=True)
class Job:
    """A job of the list."""

    layout: dict[str, Any]
    model: str
    optimizer: str
    overlap: dict[str, Any]
    capacity: float | None = None
    """The value of ``model.expert_capacity``; ``None``: experts drop nothing."""

    def case(self, steps: int) -> Case:
        """The job as the parity tests describe it."""
        model = {"layers": 2 if self.layout["pp"] < 4 else 6} | MODELS[self.model]
        model |= {} if self.capacity is None else {"expert_capacity": self.capacity}
        optimizer, nodes = {"name": self.optimizer}, {"node_size": 2}
        return Case(self.layout, model, optimizer, steps, GLOBAL_BATCH, overlap=self.overlap, comm=nodes)

    @property
    def name(self) -> str:
        """The job as text."""
        layout = " ".join(f"{key}={value}" for key, value in self.layout.items())
        capacity = "" if self.capacity is None else f" capacity {self.capacity:g}"
        return f"{layout} {self.model} {self.optimizer} {json.dumps(self.overlap)}{capacity}"


Step = tuple[float, float, float, float | None]
Trained = tuple[list[Step], dict[str, np.ndarray]]
"""Loss, gradient norm, load of the busiest expert and share of dropped tokens of each step, and the final
whole parameters."""


@dataclass(frozen=True)
class Compared:
    """A job beside one process."""

    name: str
    world: int
    loss: float = 0.0
    """Largest relative difference of a step's loss."""
    norm: float = 0.0
    """Largest relative difference of a gradient norm."""
    parameter: float = 0.0
    """Largest relative difference of a whole parameter."""
    same_loads: bool = True
    error: str = ""

    @property
    def agrees(self) -> bool:
        """Whether all values agree."""
        near = max(self.loss, self.norm, self.parameter) <= TOLERANCE
        return near and self.same_loads and not self.error


def grids() -> Iterator[dict[str, int | None]]:
    """Every grid of at most eight ranks in which experts lie otherwise than the rest."""
    sizes = (1, 2, 4, 8)
    for dp, tp, pp, ep in product(sizes, (1, 2, 4), (1, 2, 4), sizes):
        for etp in (size for size in sizes if tp % size == 0):
            layout = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "etp": None if etp == tp else etp}
            if 1 < dp * tp * pp <= MOST_RANKS and Layout(**layout).folds_experts:
                yield layout


def is_between(job: Job) -> bool:
    """Whether some, but not all tensor-parallel ranks share the width of experts."""
    return (job.layout["etp"] or 1) > 1


def layouts() -> list[Job]:
    """The jobs of the list."""
    found: list[Job] = []
    for grid, zero in product(grids(), range(4)):
        for schedule in SCHEDULES[grid["pp"] or 1]:
            turn = len(found)
            layout = {
                **grid,
                "zero": zero,
                "schedule": schedule,
                "virtual_stages": 2 if schedule == "zero-bubble-v" else 1,
                "recompute": RECOMPUTE[turn % 3],
                "expert_dispatch": DISPATCH[turn // 4 % 3] if grid["ep"] != 1 else "expert",
                "micro_batch": 1 + turn % 2 if grid["dp"] in (1, 2) else 1,
            }
            if not _is_allowed(layout):
                continue
            overlap = {"tensor_chunks": PARTS[turn % 2]} if turn % 5 else {"tensor": None, "data": False}
            model = ("softmax", "sigmoid")[turn // 3 % 2]
            found.append(Job(layout, model, OPTIMIZERS[turn % 7 % 3], overlap))
    return found


def in_pairs(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that can have pairs, with a schedule that has them, and without full recomputation."""
    found: dict[str, Job] = {}
    for number, job in enumerate(jobs):
        layout = job.layout | {"recompute": ("none", "selective")[number % 2], "schedule": "1f1b"}
        if layout["pp"] > 1:
            name, stages = IN_PAIRS[number % 3]
            layout |= {"schedule": name, "virtual_stages": stages}
        overlap = job.overlap | {"pairs": True}
        several = layout["dp"] * layout["micro_batch"] < GLOBAL_BATCH
        if several and not lacks_for_pairs(Layout(**layout), OverlapConfig(**overlap)):
            one = Job(layout, job.model, job.optimizer, overlap)
            found.setdefault(one.name, one)
    return list(found.values())


def in_groups(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with sharded state that can have several groups of replicas, with the smallest groups."""
    found = []
    for job in jobs:
        replicas = job.layout["dp"]
        sizes = (size for size in range(2, replicas) if replicas % size == 0)
        given = (job.layout | {"shard_group": size} for size in sizes if job.layout["zero"])
        layout = next(filter(_is_allowed, given), None)
        if layout is not None:
            found.append(replace(job, layout=layout))
    return found


def _is_allowed(layout: dict[str, Any]) -> bool:
    try:
        check_layout(Layout(**layout))
    except BadInputError:
        return False
    return True


def train(case: Case, folder: Path) -> tuple[list[Step], dict[str, np.ndarray] | None]:
    """Train a job on one rank. Only rank 0 returns parameters."""
    engine = make_engine(case)
    steps = []
    for step in range(case.steps):
        targets = case.global_batch * case.model.get("sequence", TINY["sequence"])
        result = engine.train_step(lambda step=step: batch_of_rank(case, engine, step), 1e-3, targets)
        busiest = 0.0 if result.expert_load is None else result.expert_load.ratio
        steps.append((result.loss, result.grad_norm, busiest, result.dropped_share))
    path = save(CheckpointFolder(folder), case.steps, list(engine.shards()), {})
    parameters = None
    if os.environ["RANK"] == "0":
        stored = load_model(path, "").items()
        parameters = {name: tensor.numpy() for name, tensor in stored if name.startswith(MODEL_PREFIX)}
    engine.close()
    close_world()
    return steps, parameters


def train_in(pools: Pools, case: Case) -> Trained:
    """Train a job on its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        found: Trained = pools.run(train, case, Path(folder))
    return found


def compare(name: str, case: Case, pools: Pools, alone: dict[str, Trained]) -> Compared:
    """Train a job, and its model as one process unless that is in ``alone``."""
    key = json.dumps([case.model, case.optimizer, case.packed], sort_keys=True)
    try:
        if key not in alone:
            one = Case({}, case.model, case.optimizer, case.steps, GLOBAL_BATCH, packed=case.packed)
            alone[key] = train_in(pools, one)
        return differences(name, case.world, train_in(pools, case), alone[key])
    except (AssertionError, EOFError) as error:
        return Compared(name, case.world, error=str(error) or "a rank ended")


def differences(name: str, world: int, found: Trained, wanted: Trained) -> Compared:
    """What differs between a job and one process."""
    (steps, parameters), (expected, reference) = found, wanted
    pairs = list(zip(steps, expected, strict=True))
    loss, norm = (max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i in range(2))
    assert parameters.keys() == reference.keys()
    parameter = max(
        float(np.linalg.norm(parameters[key] - whole) / max(np.linalg.norm(whole), 1e-30))
        for key, whole in reference.items()
    )
    return Compared(name, world, loss, norm, parameter, all(a[2:] == b[2:] for a, b in pairs))


def run(jobs: Sequence[Job], steps: int, path: Path) -> list[Compared]:
    """Train every job that is not among the results in ``path``."""
    lines = path.read_text().splitlines() if path.exists() else []
    done = {one.name: one for one in (Compared(**json.loads(line)) for line in lines)}
    found, alone = list[Compared](), dict[str, Trained]()
    with ExitStack() as stack, count_bar("training") as show, path.open("a") as file:
        pools = Pools(stack)
        for number, job in enumerate(jobs):
            show("training", number, len(jobs))
            name = f"{job.name} {steps} steps"
            if name not in done:
                done[name] = compare(name, job.case(steps), pools, alone)
                file.write(json.dumps(asdict(done[name])) + "\n")
                file.flush()
            found.append(done[name])
    return found


def print_table(found: list[Compared]) -> bool:
    """Print the jobs by size of world, and what differs. Return whether all agree."""
    print("| ranks | layouts | agree | largest difference of a loss | of a gradient norm | of a parameter |")
    print("|---|---|---|---|---|---|")
    for world in sorted({one.world for one in found}):
        jobs = [one for one in found if one.world == world]
        agree = [one for one in jobs if one.agrees]
        largest = [
            max((getattr(one, key) for one in agree), default=0.0) for key in ("loss", "norm", "parameter")
        ]
        print(
            f"| {world} | {len(jobs)} | {len(agree)} | " + " | ".join(f"{one:.1e}" for one in largest) + " |"
        )
    wrong = [one for one in found if not one.agrees]
    for one in wrong:
        loads = "" if one.same_loads else ", other loads of experts"
        values = f"loss {one.loss:.1e}, norm {one.norm:.1e}, parameter {one.parameter:.1e}"
        print(f"\nDIFFERS: {one.name}\n  {values}{loads}")
        print("".join(f"  {line}\n" for line in one.error.splitlines()[-12:]), end="")
    print(f"\n{len(found) - len(wrong)} of {len(found)} layouts agree")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Mixtures of experts in every layout against one process.")
    parser.add_argument("--folder", type=Path, help="keep finished jobs here, and continue from them")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="train each N-th job only")
    parser.add_argument("--pairs", action="store_true", help="with overlap.pairs, where it can be")
    parser.add_argument("--groups", action="store_true", help="with layout.shard_group, where it can be")
    parser.add_argument("--capacity", type=float, help="model.expert_capacity of all jobs")
    parser.add_argument("--between", action="store_true", help="the grids with 1 < etp < tp only")
    options = parser.parse_args()
    jobs = in_groups(layouts()) if options.groups else layouts()
    jobs = in_pairs(jobs) if options.pairs else jobs
    jobs = [job for job in jobs if is_between(job) or not options.between][:: options.every]
    jobs = [replace(job, capacity=options.capacity) for job in jobs]
    print(f"{len(jobs)} layouts", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(jobs, options.steps, folder / "expert_layouts.jsonl")
    if not print_table(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
