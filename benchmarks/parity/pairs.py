"""Every pair of model features and layout dimensions, in real processes, against one process.

    python benchmarks/parity/pairs.py --folder FOLDER [--steps 20] [--jobs FIRST-LAST] [--sample N]

`features` lists the features with their values, `covering_array` chooses few jobs in which each pair of
values that job validation allows occurs. Each job trains on ranks that gloo joins, worlds of 2 to 8, and then
as one process on the same tokens, in float32; losses of all steps, every whole parameter and its moving
average must agree within 1e-5. The ranks then train the second half of the steps again, from the state that
they stored after the first, and must store the same bits. Where a parameter does not agree, it is shown how
far rounding alone moves it: one process trains again from initial values that are changed by half a unit in
their last place. What the layout changes by more than twice as much differs, and a gradient that lacks a
rank's part differs by far more. A router's scores may be so near each other that rounding alone gives a
token another expert. So jobs with experts that do not agree are trained again, with the experts that the one
process chose (`train.replay_routing`). Processes are started once for each size of world and run one job
after another. Finished jobs are kept in FOLDER, and a command that was interrupted continues there. Ends with
1 if a job failed or differs.

The jobs that cover the most pairs come first. ``--jobs 31-76`` trains only those, for a list that
is shared by several machines or evenings.

``--sample N`` prints the first N jobs, which cover the most pairs, and runs nothing: the tests run those of
``tests/processes/pairs.json``.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from covering_array import CoveringArray, Row, covering_array, pairs_of
from features import FEATURES, GLOBAL_BATCH, MOST_RANKS, NO_EFFECT, Features, job_of, reasons
from myriad.checkpoint.checkpoint_files import AVERAGE_PREFIX, MODEL_PREFIX, load, load_model, save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.progress_bar import count_bar
from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.config import Config
from myriad.model.config import ModelConfig
from myriad.parallel.engine import Engine
from myriad.parallel.routing_tape import RoutingFolders

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "processes"))

from parity_case import Case, make_engine, run_case, train_steps
from ranks import RankPool

TOLERANCE = 1e-5
HALF_UNIT = 2.0**-24
"""Relative change of the initial values that shows the effect of rounding."""
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Compared:
    """One job beside one process."""

    features: Features
    world: int
    loss_difference: float
    """Largest relative difference of a step's loss."""
    parameter_difference: float
    """Largest relative difference of a whole parameter, of those in `parameter`."""
    parameter: str
    error: str = ""
    resumes: bool = True
    """Whether the resumed ranks stored the same bits."""
    rounding_difference: float | None = None
    """The largest difference of a whole parameter between one process and the same one with changed initial
    values, where it was needed."""
    rounding_loss: float = 0.0
    """That of a step's loss."""
    replays_routing: bool = False
    """Whether the differences are those with the experts that one process chose."""

    @property
    def is_near(self) -> bool:
        """Whether all values agree within the tolerance."""
        return max(self.loss_difference, self.parameter_difference) <= TOLERANCE

    def beside(self, nudged: "Trained", expected: "Trained") -> "Compared":
        """Add how far rounding alone moves the one process."""
        loss, _, parameter = differences(nudged, expected)
        return replace(self, rounding_difference=parameter, rounding_loss=loss)

    @property
    def agrees(self) -> bool:
        """Whether all values agree within the tolerance, or within what rounding changes."""
        parameter, loss = (
            max(TOLERANCE, 2 * (one or 0)) for one in (self.rounding_difference, self.rounding_loss)
        )
        near = self.loss_difference <= loss and self.parameter_difference <= parameter
        return near and self.resumes and not self.error


Trained = tuple[list[tuple[float, float]], dict[str, np.ndarray]]
"""Losses and gradient norms of all steps, and the final whole tensors: parameters and optimizer state."""


class Pools:
    """Processes for each size of world, started when a job first needs them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pools: dict[int, RankPool] = {}

    def train(self, case: Case) -> Trained:
        """Train a job on its ranks."""
        return self.run(run_case, case)

    def train_twice(self, case: Case) -> tuple[Trained, Trained]:
        """Train a job, and the second half of its steps again from what it had stored before."""
        with tempfile.TemporaryDirectory() as folder:
            return self.run(run_and_store, case, Path(folder)), self.run(resume, case, Path(folder))

    def train_routed(self, case: Case, folder: Path, how: str) -> Trained:
        """Train a job that records which experts tokens get in ``folder``, or replays what is there."""
        with tempfile.TemporaryDirectory() as made:
            return self.run(run_routed, case, Path(made), folder, how)

    def run(self, function: Callable[..., Any], case: Case, *arguments: Path | str) -> Any:
        """What ``function`` gives on rank 0: first what must be the same on all ranks, such as losses."""
        if case.world not in self._pools:
            self._pools[case.world] = self._stack.enter_context(RankPool(case.world))
        ranks = self._pools[case.world].run(function, case, *arguments, timeout=TIMEOUT_SECONDS)
        assert all(losses == ranks[0][0] for losses, _ in ranks), "ranks of one run disagree on the loss"
        return ranks[0]


def num_ranks(features: Features) -> int:
    """Ranks of the layout; about what a job costs."""
    return features["layout.tp"] * features["layout.pp"] * features["layout.dp"]


def case_of(features: Features, steps: int) -> Case:
    """The job as the parity tests describe it."""
    job = job_of(features)
    return Case(
        job.layout, job.model, job.optimizer, steps, GLOBAL_BATCH, overlap=job.overlap, packed=job.packed
    )


def run_and_store(case: Case, folder: Path) -> tuple[list[tuple[float, float]], dict[str, Any] | None]:
    """One rank's side: as `run_case`, and the state after half of the steps is stored in ``folder``."""
    folders, half = CheckpointFolder(folder), case.steps // 2
    engine = make_engine(case)
    found = train_steps(case, engine, 0, half)
    save(folders, half, list(engine.shards()), engine.progress())
    found += train_steps(case, engine, half, case.steps)
    return found, stored_tensors(folders, case.steps, engine)


def resume(case: Case, folder: Path) -> tuple[list[tuple[float, float]], dict[str, Any] | None]:
    """One rank's side: train the second half of the steps again, from what `run_and_store` stored."""
    folders, half = CheckpointFolder(folder), case.steps // 2
    engine = make_engine(case)
    engine.load_progress(load(folders.of_step(half), list(engine.all_shards())))
    engine.loaded()
    found = train_steps(case, engine, half, case.steps)
    return found, stored_tensors(folders, case.steps + 1, engine)


def run_routed(
    case: Case, folder: Path, experts: Path, how: str
) -> tuple[list[tuple[float, float]], dict[str, Any] | None]:
    """One rank's side: as `run_case`; ``how`` is record or replay, of which ``experts`` tokens get."""
    engine = make_engine(case, routing=RoutingFolders(**{how: experts}))
    found = train_steps(case, engine, 0, case.steps)
    return found, stored_tensors(CheckpointFolder(folder), case.steps, engine)


def stored_tensors(folders: CheckpointFolder, step: int, engine: Engine) -> dict[str, Any] | None:
    """Store the state, end the engine, and return the whole tensors on rank 0."""
    path = save(folders, step, list(engine.shards()), {})
    engine.close()
    close_world()
    if os.environ["RANK"] != "0":
        return None
    return {name: tensor.numpy() for name, tensor in load_model(path, "").items()}


def compare(features: Features, steps: int, pools: Pools) -> Compared:
    """Train a job and its model as one process."""
    case = case_of(features, steps)
    try:
        alone = Case({}, case.model, case.optimizer, case.steps, GLOBAL_BATCH, packed=case.packed)
        expected = pools.train(alone)
        found, resumed = pools.train_twice(case)
        same = found[0][steps // 2 :] == resumed[0] and have_same_bits(found[1], resumed[1])
        first = compared(features, case, found, expected, resumes=same)
        if first.is_near:
            return first
        nudged = replace(alone, nudge=HALF_UNIT)
        if not case.model.get("experts"):
            return first.beside(pools.train(nudged), expected)
        with tempfile.TemporaryDirectory() as made:
            expected = pools.train_routed(alone, Path(made), "record")
            found, moved = (pools.train_routed(one, Path(made), "replay") for one in (case, nudged))
        again = compared(features, case, found, expected, resumes=same, replays_routing=True)
        return again if again.is_near else again.beside(moved, expected)
    except AssertionError as error:
        return Compared(features, case.world, 0.0, 0.0, "", str(error))


def compared(features: Features, case: Case, found: Trained, expected: Trained, **said: bool) -> Compared:
    """Return the differences of a job from one process."""
    loss, parameter, difference = differences(found, expected)
    return Compared(features, case.world, loss, difference, parameter, **said)


def have_same_bits(tensors: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    assert tensors.keys() == others.keys(), "resumed ranks store the same names"
    return all(values.tobytes() == others[name].tobytes() for name, values in tensors.items())


def differences(found: Trained, wanted: Trained) -> tuple[float, str, float]:
    """The largest relative difference of a loss; the parameter, or its average, that differs most, and by how
    much."""
    (losses, parameters), (expected, reference) = found, wanted
    loss = max(abs(a - b) / abs(b) for (a, _), (b, _) in zip(losses, expected, strict=True))
    assert parameters.keys() == reference.keys()
    each = {
        name: float(np.linalg.norm(parameters[name] - whole) / max(np.linalg.norm(whole), 1e-30))
        for name, whole in reference.items()
        if name.startswith((MODEL_PREFIX, AVERAGE_PREFIX))
    }
    worst = max(each, key=lambda name: each[name])
    return loss, worst, each[worst]


class Results:
    """A file with a line for each finished job."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._steps = steps
        self._found: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._found[entry.pop("key")] = entry

    def key(self, features: Features) -> str:
        text = json.dumps([features, self._steps], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def of(self, features: Features) -> Compared | None:
        found = self._found.get(self.key(features))
        return None if found is None else Compared(**found | {"features": features})

    def add(self, compared: Compared) -> None:
        entry = {"key": self.key(compared.features), **asdict(compared)}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def run(rows: Sequence[Row], steps: int, results: Results) -> list[Compared]:
    """Train every job that is not among the results."""
    compared = []
    with ExitStack() as stack, count_bar("training") as show:
        pools = Pools(stack)
        for number, row in enumerate(rows):
            show("training", number, len(rows))
            found = results.of(row)
            if found is None:
                found = compare(row, steps, pools)
                results.add(found)
            compared.append(found)
    return compared


def plain(features: Features) -> str:
    """The features that are not the plainest, as text."""
    return ", ".join(
        f"{name.removeprefix('model.').removeprefix('layout.')}={value}"
        for name, value in features.items()
        if value != FEATURES[name][0] or name in ("layout.tp", "layout.pp", "layout.dp")
    )


def print_table(array: CoveringArray, compared: Iterable[Compared], steps: int) -> bool:
    """Print the jobs by size of world, what differs, and return whether all agree."""
    print(f"{len(FEATURES)} features with {sum(map(len, FEATURES.values()))} values, {steps} steps each\n")
    print("| ranks | jobs | agree | largest difference of a loss | of a whole parameter |")
    print("|---|---|---|---|---|")
    found = list(compared)
    for world in range(2, MOST_RANKS + 1):
        jobs = [one for one in found if one.world == world]
        agree = [one for one in jobs if one.agrees]
        if jobs:
            plain_ones = [one for one in agree if one.rounding_difference is None]
            loss = max((one.loss_difference for one in plain_ones), default=0.0)
            parameter = max((one.parameter_difference for one in plain_ones), default=0.0)
            print(f"| {world} | {len(jobs)} | {len(agree)} | {loss:.1e} | {parameter:.1e} |")
    held = {pair for one in found if one.agrees for pair in pairs_of(one.features)}
    without = sum(_has_no_effect(pair) for pair in array.refused)
    print(f"\n{len(held & array.covered):,} of {len(array.covered):,} allowed pairs agree; of the others")
    print(f"{len(array.refused) - without} are refused by job validation, {without} test nothing")
    for one in found:
        if one.agrees and one.rounding_difference is not None:
            print(f"\nas far as rounding allows: {plain(one.features)}")
            print(f"  {differences_of(one)}, {rounding_of(one)}")
        elif one.agrees and one.replays_routing:
            print(f"\nwith the experts that one process chose: {plain(one.features)}")
    wrong = [one for one in found if not one.agrees]
    for one in wrong:
        print(f"\nDIFFERS: {plain(one.features)}")
        print(f"  {differences_of(one)}, {rounding_of(one)}")
        print("" if one.resumes else "  a resumed run has other bits\n", end="")
        print("".join(f"  {line}\n" for line in one.error.splitlines()[-12:]), end="")
    return not wrong


def differences_of(one: Compared) -> str:
    """How far a job is from one process, as text."""
    return f"loss {one.loss_difference:.1e}, {one.parameter} {one.parameter_difference:.1e}"


def rounding_of(one: Compared) -> str:
    """How far rounding alone moves a parameter of the job, as text."""
    found = one.rounding_difference
    routed = ", with the experts that one process chose" if one.replays_routing else ""
    return (
        "rounding not measured"
        if found is None
        else f"rounding alone {found:.1e}, loss {one.rounding_loss:.1e}{routed}"
    )


def _has_no_effect(pair: tuple[str, Any, str, Any]) -> bool:
    """Whether a refused pair is one that validation accepts."""
    a, x, b, y = pair
    base = {name: values[0] for name, values in FEATURES.items()}
    found = reasons(base | {a: x, b: y})
    return bool(found) and all(reason.startswith(NO_EFFECT) for reason in found)


def print_sample(rows: Sequence[Row], number: int) -> None:
    """The first jobs, which cover the most pairs, without values that are the defaults."""
    sample = []
    for row in rows[:number]:
        job = job_of(row)
        model, layout = (_changed(*one) for one in ((job.model, ModelConfig), (job.layout, Layout)))
        kept = {"model": model, "layout": layout, "optimizer": job.optimizer, "overlap": job.overlap}
        sample.append(kept | ({"packed": True} if job.packed else {}))
    print(json.dumps(sample, indent=1))


def _changed(keys: dict[str, Any], section: type[Config]) -> dict[str, Any]:
    """The keys that are not the section's defaults."""
    return {key: value for key, value in keys.items() if value != section.model_fields[key].default}


def job_range(text: str) -> slice:
    """The jobs from the first to the last of a range such as ``31-76``, counted from 1."""
    first, last = map(int, text.split("-"))
    if not 1 <= first <= last:
        raise ValueError(text)
    return slice(first - 1, last)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every pair of features and layouts against one process.")
    parser.add_argument("--folder", type=Path, help="keep finished jobs here, and continue from them")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=job_range, default=slice(None), help="only these, such as 31-76")
    parser.add_argument("--sample", type=int, help="only print so many jobs")
    options = parser.parse_args()
    array = covering_array(FEATURES, reasons, cost=lambda row: 2.0 + num_ranks(row))
    if options.sample:
        print_sample(array.rows, options.sample)
        return
    print(f"{len(array.rows)} jobs hold {len(array.covered):,} pairs", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        results = Results(folder / "pairs.jsonl", options.steps)
        compared = run(array.rows[options.jobs], options.steps, results)
    if not print_table(array, compared, options.steps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
