"""A scenario: a job, and what is done to it. A TOML file, or the name of one in ``recipes/faults``.

    about = "A rank is killed"
    job = "tiny"
    overrides = ["layout.dp=2", "train.steps=40"]
    seed = 1

    [[faults]]
    kind = "kill"           # all kinds: myriad faults list
    where = "rank"
    rank = 1                # left out: drawn by the seed, as is what comes next
    step = 12               # and during = "saving", or a part of a step; or seconds = 3.5 instead

    [soak]                  # instead of [[faults]], or beside them: drawn by the seed, one after the other
    minutes = 1.0
    faults_per_minute = 6.0
    kinds = ["kill", "stop"]

Everything is checked before anything starts.
"""

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, ValidationError

from myriad.config import Config
from myriad.errors import BadInputError
from myriad.job import Job, load_job
from myriad.recipes import read_recipe
from myriad.resilience.faults.kinds import KINDS, MOMENTS, PHASES, SIGNALS, KindName, Target
from myriad.resilience.faults.services import missing_for_redis

__all__ = ["Fault", "Scenario", "Soak", "load_scenario", "planned_faults"]


_OF_NODES: tuple[Target, ...] = ("node", "executor", "fork-server", "keeper", "loader")
"""Each node has one."""


class Fault(Config):
    """What is done, to whom, when."""

    kind: KindName
    """What is done."""
    where: Target = "rank"
    """To what."""
    rank: int | None = Field(None, ge=0)
    """To which, where that is a rank; off: drawn by the seed."""
    node: int | None = Field(None, ge=0)
    """To which, where that is a node or a process that each node has; off: where a job has several nodes, one
    drawn by the seed, or the process of any."""
    step: int | None = Field(None, ge=1)
    """When this step is under way, or has been; off: drawn by the seed, unless seconds are given."""
    during: str | None = None
    """And when this goes on: a phase, or a part of a step; off: at any moment."""
    seconds: float | None = Field(None, ge=0)
    """So long after the first step began; off: a step counts."""
    after_seconds: float | None = Field(None, ge=0)
    """So long after the fault before it in the list; off: a step or seconds."""
    lasts_seconds: float = Field(2.0, gt=0)
    """How long the disk stays full, the link down each time, Redis away, a process slow, the run paused."""
    detected_seconds: float | None = Field(None, gt=0)
    """Aim: it is found in this time; off: as its kind says. This and the next two are for a fault that meets
    another one, which has to be found first or has taken what recovery needs."""
    trains_seconds: float | None = Field(None, gt=0)
    """Aim: all train again so soon after it is found; off: as its kind says."""
    steps_lost: int | None = Field(None, ge=0)
    """Aim: at most so many steps are computed again; off: as its kind says."""
    factor: float = Field(2.0, gt=1)
    """How many times as long a slow rank computes."""


class Soak(Config):
    """Faults at random."""

    minutes: float = Field(gt=0)
    """How long, from the first step on; the job is to last longer."""
    faults_per_minute: float = Field(gt=0)
    """On average."""
    kinds: tuple[KindName, ...] = ("kill", "segv", "abort", "stop")
    """From which they are drawn."""
    where: tuple[Target, ...] = ("rank",)
    """From which processes are drawn, of those that the kind can be done to."""


class Scenario(Config):
    """All of it."""

    about: str = ""
    """A line for people."""
    job: str = "tiny"
    """A job file, or the name of a recipe."""
    overrides: tuple[str, ...] = ()
    """Of the job's keys: "layout.dp=2"."""
    hosts: bool = False
    """Each node, and the driver, is a network namespace, with a link to the driver and one under ranks; needs
    root."""
    redis: bool = False
    """The run has a Redis server, as its store and for its journal; it is started for the scenario."""
    standby: bool = False
    """A driver stands by; needs redis."""
    watch: bool = False
    """`myriad watch` shows the run."""
    only_end: bool = False
    """Grade only how the run ends: with the bits of the undisturbed run or with a reason, with no process
    left behind and an account that adds up. For many faults at the same time."""
    seed: int = Field(1, ge=0)
    """Of whatever is left open."""
    faults: tuple[Fault, ...] = ()
    """Each is caused once, when its time has come (an exception in every attempt)."""
    soak: Soak | None = None
    """More of them, at random."""

    def resolved_job(self) -> Job:
        """Where nobody is made slow, the result is compared bit for bit: work stays where it is, also on a
        machine that is busy with other things. Raises `BadInputError`."""
        slow = any(fault.kind == "slow" for fault in self.faults)
        return load_job(self.job, [*([] if slow else ["resilience.on_slow=tell"]), *self.overrides])


def load_scenario(name_or_path: str) -> Scenario:
    """By path or name; it and its job are checked. Raises `BadInputError`."""
    tree = read_recipe("faults", name_or_path, "scenario")
    try:
        scenario = Scenario.model_validate(tree)
    except ValidationError as error:
        raise _as_bad_input(error) from None
    _check(scenario, scenario.resolved_job())
    return scenario


def _as_bad_input(error: ValidationError) -> BadInputError:
    first: Any = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        sections = {"faults": Fault.model_fields, "soak": Soak.model_fields}
        section = sections.get(str(first["loc"][0]), Scenario.model_fields)
        return BadInputError(key, first["input"], f"unknown key; one of {', '.join(section)}")
    message: str = first["msg"][0].lower() + first["msg"][1:]
    return BadInputError(key, first["input"], message.removeprefix("input "))


def _check(scenario: Scenario, job: Job) -> None:
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
    if fault.node is not None and fault.where not in _OF_NODES:
        yield "node", fault.node, f"only with where = {', '.join(_OF_NODES)}, not with {fault.where}"
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
        allowed = "needs layout.zero = 0, layout.dp > 1 and resilience.verify_every > 0: else nobody sees it"
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


def planned_faults(scenario: Scenario, job: Job) -> list[Fault]:
    """With all that was left open drawn by the seed: the same every time."""
    draw = random.Random(scenario.seed)
    faults = [_filled(fault, job, draw) for fault in scenario.faults]
    return faults + ([] if scenario.soak is None else list(_soaked(scenario.soak, job, draw)))


def _filled(fault: Fault, job: Job, draw: random.Random) -> Fault:
    """In the second quarter of the run: its pace is known, and most is still to come."""
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
        if where in _OF_NODES and job.resilience.nodes > 1:
            of_rank = {"node": draw.randrange(job.resilience.nodes)}
        yield Fault(kind=kind, where=where, seconds=seconds, **of_rank)
        seconds += draw.expovariate(soak.faults_per_minute / 60)
