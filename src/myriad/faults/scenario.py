"""A scenario: a job and the faults to cause in it. A TOML file, or the name of one in ``recipes/faults``.

    about = "A rank is killed"
    job = "tiny"
    overrides = ["layout.dp=2", "train.steps=40"]
    seed = 1

    [[faults]]
    kind = "kill"           # all kinds: myriad faults list
    where = "rank"
    rank = 1                # default: drawn by the seed, as is the step
    step = 12               # and during = "saving", or a part of a step; or seconds = 3.5 instead

    [soak]                  # instead of [[faults]], or beside them: drawn by the seed, one after the other
    minutes = 1.0
    faults_per_minute = 6.0
    kinds = ["kill", "stop"]

All values are checked before anything starts.

`random_scenarios` draws incidents by a seed: one fault each, or two close to each other, many in one run:

    step   15        30              45        ...
           kill      stop + segv     hang          each with room for the run to recover before the next

A run has at most `INCIDENTS`: a run that fails costs no more than those. The job is `tiny` on two ranks.
"""

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.errors import BadInputError
from myriad.faults.fault_kinds import KINDS, MOMENTS, PHASES, SIGNALS
from myriad.faults.recovery_targets import KindName, Target
from myriad.faults.services import missing_for_redis
from myriad.job import Job, load_job
from myriad.recipes import read_recipe

__all__ = ["Fault", "FaultScenario", "Soak", "load_scenario", "planned_faults", "random_scenarios"]

_PER_NODE: tuple[Target, ...] = ("node", "executor", "fork-server", "keeper", "loader")
"""Targets that each node has once."""


class Fault(Config):
    """One fault: what is done, to which target, and when."""

    kind: KindName
    """Kind of the fault; `myriad faults list` shows all kinds."""
    where: Target = "rank"
    """Target of the fault."""
    rank: int | None = Field(None, ge=0)
    """The rank, if the target is one. Default: drawn by the seed."""
    node: int | None = Field(None, ge=0)
    """The node, if the target is a node or a process that each node has. Default: with several nodes, one
    drawn by the seed, or the process of any."""
    step: int | None = Field(None, ge=1)
    """Step in which, or after which, the fault comes. Default: drawn by the seed, unless seconds are
    given."""
    during: str | None = None
    """Phase or part of a step in which the fault comes. Default: any moment."""
    seconds: float | None = Field(None, ge=0)
    """Seconds after the start of the first step. Default: a step counts."""
    after_seconds: float | None = Field(None, ge=0)
    """Seconds after the previous fault of the list. Default: a step or seconds."""
    lasts_seconds: float = Field(2.0, gt=0)
    """Seconds for which the disk is full, the link down each time, Redis away, a process slow, or the run
    paused."""
    detected_seconds: float | None = Field(None, gt=0)
    """Target: seconds to detection. Default: as its kind says. This and the next two are for a fault
    that meets another one, which has to be found first or has used what recovery needs."""
    trains_seconds: float | None = Field(None, gt=0)
    """Target: seconds from detection until all ranks train again. Default: as its kind says."""
    steps_lost: int | None = Field(None, ge=0)
    """Target: the most steps that are recomputed. Default: as its kind says."""
    factor: float = Field(2.0, gt=1)
    """Factor on the compute time of a slow rank."""


class Soak(Config):
    """Random faults, one after the other."""

    minutes: float = Field(gt=0, le=1440)
    """Duration from the first step; the job must last longer."""
    faults_per_minute: float = Field(ge=1e-6, le=60)
    """Average rate of faults."""
    kinds: tuple[KindName, ...] = ("kill", "segv", "abort", "stop")
    """Kinds from which faults are drawn."""
    where: tuple[Target, ...] = ("rank",)
    """Targets from which the faults' targets are drawn, among those that the kind allows."""


class FaultScenario(Config):
    """A job and the faults to cause in it."""

    about: str = ""
    """Description in one line."""
    job: str = "tiny"
    """A job file, or the name of a recipe."""
    overrides: tuple[str, ...] = ()
    """Overrides of the job's keys: "layout.dp=2"."""
    hosts: bool = False
    """Put each node, and the driver, in a network namespace, with a link to the driver and one between
    ranks; needs root."""
    redis: bool = False
    """Start a Redis server for the scenario, as the run's store and for its journal."""
    standby: bool = False
    """Start a standby driver; needs redis."""
    watch: bool = False
    """Start `myriad watch` for the run."""
    only_end: bool = False
    """Grade only how the run ends: with the bits of the undisturbed run or with a reason, with no process
    left behind and an account that adds up. For many faults at the same time."""
    seed: int = Field(1, ge=0)
    """Seed for all values that are left open."""
    faults: tuple[Fault, ...] = ()
    """Faults of the scenario. Each is caused once, when it is due (an exception in every attempt)."""
    soak: Soak | None = None
    """Additional faults at random."""

    def resolved_job(self) -> Job:
        """Return the job with its overrides. Unless a rank is made slow, the result is compared bit for bit,
        so work must not move, not even on a busy machine. Raises `BadInputError`."""
        slow = any(fault.kind == "slow" for fault in self.faults)
        return load_job(self.job, [*([] if slow else ["resilience.on_slow=report"]), *self.overrides])


def load_scenario(name_or_path: str) -> FaultScenario:
    """Load and check a scenario and its job, by path or name. Raises `BadInputError`."""
    tree = read_recipe("faults", name_or_path, "scenario")
    try:
        scenario = FaultScenario.model_validate(tree)
    except ValidationError as error:
        raise _as_bad_input(error) from None
    _check(scenario, scenario.resolved_job())
    return scenario


def _as_bad_input(error: ValidationError) -> BadInputError:
    first: Any = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        sections = {"faults": Fault.model_fields, "soak": Soak.model_fields}
        section = sections.get(str(first["loc"][0]), FaultScenario.model_fields)
        return BadInputError(key, first["input"], f"unknown key; one of {', '.join(section)}")
    message: str = first["msg"][0].lower() + first["msg"][1:]
    return BadInputError(key, first["input"], message.removeprefix("input "))


def _check(scenario: FaultScenario, job: Job) -> None:
    for number, fault in enumerate(scenario.faults):
        if KINDS[fault.kind].needs_root and os.geteuid() != 0:
            raise BadInputError(f"faults.{number}.kind", fault.kind, "needs root")
        if KINDS[fault.kind].needs_hosts and not scenario.hosts:
            raise BadInputError(f"faults.{number}.kind", fault.kind, "needs hosts = true")
    if scenario.hosts and os.geteuid() != 0:
        raise BadInputError("hosts", True, "needs root")
    if scenario.redis and (problem := missing_for_redis()):
        raise BadInputError("redis", True, problem)
    if scenario.standby and not scenario.redis:
        raise BadInputError("standby", True, "needs redis = true")
    if not scenario.faults and scenario.soak is None:
        raise BadInputError("faults", [], "at least one [[faults]], or a [soak]")
    for number, fault in enumerate(scenario.faults):
        before = scenario.faults[number - 1] if number else None
        if fault.where in ("redis", "standby", "watch") and not getattr(scenario, fault.where):
            raise BadInputError(f"faults.{number}.where", fault.where, f"needs {fault.where} = true")
        for key, value, allowed in (*_wrong(fault, job), *_wrong_after(fault, before)):
            raise BadInputError(f"faults.{number}.{key}", value, allowed)
    soak = scenario.soak
    if soak is not None and (strange := [kind for kind in soak.kinds if not _may_soak(kind, soak.where)]):
        able = [kind for kind in KINDS if _may_soak(kind, soak.where)]
        raise BadInputError("soak.kinds", strange[0], f"one of {', '.join(able)}")
    if soak is not None and not soak.kinds:
        raise BadInputError("soak.kinds", [], "at least one kind")


def _may_soak(kind: KindName, where: Sequence[Target]) -> bool:
    return kind in (*SIGNALS, "freeze", "slow-process") and any(one in KINDS[kind].aims for one in where)


def _wrong(fault: Fault, job: Job) -> Iterator[tuple[str, object, str]]:
    kind, world, steps = KINDS[fault.kind], job.layout.world, job.train.steps
    if fault.where not in kind.aims:
        yield "where", fault.where, f"{fault.kind} is done to {', '.join(kind.aims)}"
    if fault.rank is not None and fault.where != "rank":
        yield "rank", fault.rank, f'only with where = "rank", not with "{fault.where}"'
    if fault.rank is not None and fault.rank >= world:
        yield "rank", fault.rank, f"the job has {world} ranks, 0 to {world - 1}"
    nodes = job.resilience.nodes
    if fault.node is not None and fault.where not in _PER_NODE:
        yield "node", fault.node, f"only with where = {', '.join(_PER_NODE)}, not with {fault.where}"
    if fault.node is not None and fault.node >= nodes:
        yield "node", fault.node, f"the job has {nodes} node{'s' if nodes > 1 else ''}, from 0 on"
    if fault.step is not None and fault.step > steps:
        yield "step", fault.step, f"at most train.steps = {steps}"
    if fault.step is not None and fault.seconds is not None:
        yield "seconds", fault.seconds, "a step or seconds, not both"
    if fault.during is not None and fault.during not in MOMENTS:
        yield "during", fault.during, f"one of {', '.join(MOMENTS)}"
    if any(aim.gives_way for aim in kind.aims.values()) and not job.resilience.spares:
        yield "kind", fault.kind, "needs resilience.spares > 0: the node gives way"
    if kind.inside and fault.seconds is not None:
        yield "seconds", fault.seconds, f"{fault.kind} comes at a step: the rank causes it itself"
    if fault.kind == "flip" and (job.layout.zero or not job.compares_replicas):
        allowed = "needs layout.zero = 0, layout.dp > 1 and resilience.verify_every > 0 to be detected"
        yield "kind", fault.kind, allowed
    if kind.inside and fault.during in PHASES and fault.during != "step":
        parts = [moment for moment in MOMENTS if moment not in PHASES]
        yield "during", fault.during, f"with {fault.kind} one of {', '.join(parts)}"
    needs_storage = fault.where in ("checkpoint", "storage") or (fault.where, fault.kind) == ("node", "kill")
    if needs_storage and not job.checkpoint.every:
        yield "where", fault.where, "needs checkpoint.every: nothing is stored before the end"
    if fault.where in ("checkpoint", "storage") and job.checkpoint.url is not None:
        yield "where", fault.where, f"needs checkpoint.url = off, not {job.checkpoint.url}"


def _wrong_after(fault: Fault, before: Fault | None) -> Iterator[tuple[str, object, str]]:
    after = fault.after_seconds
    if after is None:
        return
    if fault.step is not None or fault.seconds is not None:
        yield "after_seconds", after, "this alone, without a step or seconds"
    if before is None:
        yield "after_seconds", after, "the first fault has none before it"
    elif KINDS[before.kind].inside or KINDS[fault.kind].inside:
        inside = fault.kind if KINDS[fault.kind].inside else before.kind
        yield "after_seconds", after, f"not with {inside}: the rank causes it itself, at a step"


def planned_faults(scenario: FaultScenario, job: Job) -> list[Fault]:
    """Return the faults, with open values drawn by the seed: the same every time."""
    draw = random.Random(scenario.seed)
    faults = [_filled(fault, job, draw) for fault in scenario.faults]
    return faults + ([] if scenario.soak is None else list(_soaked(scenario.soak, job, draw)))


def _filled(fault: Fault, job: Job, draw: random.Random) -> Fault:
    """Fill in open values. The step is in the second quarter of the run: its speed is then known, and most of
    it remains."""
    steps, drawn = job.train.steps, {}
    if fault.where == "rank" and fault.rank is None:
        drawn["rank"] = draw.randrange(job.layout.world)
    if fault.where == "node" and fault.node is None and job.resilience.nodes > 1:
        drawn["node"] = draw.randrange(job.resilience.nodes)
    if fault.step is None and fault.seconds is None and fault.after_seconds is None:
        drawn["step"] = draw.randint(max(1, steps // 4), max(1, steps // 2))
    return fault.model_copy(update=drawn)


def _soaked(soak: Soak, job: Job, draw: random.Random) -> Iterator[Fault]:
    seconds = draw.expovariate(soak.faults_per_minute / 60)
    while seconds < 60 * soak.minutes:
        kind = draw.choice(soak.kinds)
        able = [one for one in soak.where if one in KINDS[kind].aims]
        rank, where = draw.randrange(job.layout.world), able[0] if len(able) == 1 else draw.choice(able)
        of_rank = {"rank": rank} if where == "rank" else {}
        if where in _PER_NODE and job.resilience.nodes > 1:
            of_rank = {"node": draw.randrange(job.resilience.nodes)}
        yield Fault(kind=kind, where=where, seconds=seconds, **of_rank)
        seconds += draw.expovariate(soak.faults_per_minute / 60)


INCIDENTS = 20
_APART_STEPS = 20
_WORLD = 2
_WEIGHTS: dict[tuple[KindName, Target], int] = {
    ("kill", "rank"): 5,
    ("segv", "rank"): 3,
    ("abort", "rank"): 2,
    ("stop", "rank"): 3,
    ("hang", "rank"): 1,
    ("kill", "executor"): 1,
    ("stop", "executor"): 1,
    ("kill", "node"): 1,
    ("kill", "driver"): 1,
    ("stop", "driver"): 1,
    ("kill", "loader"): 1,
    ("stop", "loader"): 1,
    ("kill", "keeper"): 1,
}
"""Weights of the drawn faults. Most end ranks, as in published failure mixes; none needs root or a device."""
_LATEST_SECONDS = 2.0
"""Latest time of a second fault: while the first is being detected, during the restart, or just after it."""


def random_scenarios(singles: int, doubles: int, seed: int) -> Iterator[tuple[str, FaultScenario]]:
    """Yield names and scenarios. Each scenario has only single or only double incidents."""
    draw = random.Random(seed)
    for name, count, faults_each in (("single", singles, 1), ("double", doubles, 2)):
        for number, first in enumerate(range(0, count, INCIDENTS), 1):
            incidents = min(INCIDENTS, count - first)
            faults = [fault for place in range(incidents) for fault in _incident(draw, place, faults_each)]
            yield f"{name}-{seed}-{number}", _scenario(faults, f"{incidents} {name} faults, seed {seed}")


def _scenario(faults: Sequence[Fault], about: str) -> FaultScenario:
    steps = _APART_STEPS * (INCIDENTS + 2)  # equal for all scenarios: they share the undisturbed run
    overrides = (
        f"layout.dp={_WORLD}",
        "layout.zero=3",
        "layout.micro_batch=2",
        "train.threads=1",
        f"train.steps={steps}",
        "checkpoint.memory_seconds=0",
        "checkpoint.every=10",
    )
    return FaultScenario(about=about, job="tiny", overrides=overrides, faults=tuple(faults))


def _incident(draw: random.Random, place: int, faults_each: int) -> Iterator[Fault]:
    yield _fault(draw, within=faults_each > 1).model_copy(update={"step": _APART_STEPS * (place + 1)})
    if faults_each > 1:
        after = draw.uniform(0.0, _LATEST_SECONDS)
        yield _fault(draw, within=True).model_copy(update={"after_seconds": after})


def _fault(draw: random.Random, *, within: bool) -> Fault:
    """Draw a fault. ``within``: it is part of a pair, so the rank must not cause it itself."""
    able = {what: weight for what, weight in _WEIGHTS.items() if not (within and KINDS[what[0]].inside)}
    kind, where = draw.choices(list(able), list(able.values()))[0]
    return Fault(kind=kind, where=where, rank=draw.randrange(_WORLD) if where == "rank" else None)
