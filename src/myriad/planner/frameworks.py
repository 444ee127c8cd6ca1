"""Training frameworks as data: what each overlaps, fuses and launches, with a source for every value.

A framework is a TOML file (`myriad.recipes.framework`). Each value is a table of the value and its source, so
that a reader can check it, and a test finds a value without one:

    title = "nanotron"
    extends = "torch"                         # values that this file does not repeat
    matches = ["nanotron"]                    # patterns of the source of a published row

    [profile]                                 # keys of FrameworkProfile
    fused_loss = {value = false, source = "src/nanotron/parallel/tensor_parallel/functional.py"}
    [memory]                                  # keys of FrameworkMemory
    [overlap]                                 # keys of OverlapConfig
    [layout]                                  # keys of LayoutHabits
    [limits]                                  # keys of LayoutLimits

A value that is fitted says so, with its rows: ``fitted_to = "rows of 8 GPUs"``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from myriad.comm.layout import ExpertDispatch, ScheduleName
from myriad.config import Config, explain
from myriad.errors import BadInputError
from myriad.planner.layout_limits import LayoutLimits
from myriad.planner.memory.framework_memory import FrameworkMemory
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig

__all__ = [
    "FlopCount",
    "Framework",
    "FrameworkFile",
    "Launcher",
    "LayoutHabits",
    "PartitionHabit",
    "read_framework",
]

Launcher = Literal["megatron-lm", "megatron-bridge", "torchtitan", "nanotron", "deepspeed", "maxtext"]
"""Whose options a plan for a framework is written in (`myriad.forecasts.launch`)."""
PartitionHabit = Literal["uniform", "with-ends", "balanced", "cumulative", "megatron"]
"""A rule of `LayoutHabits.partition`."""
FlopCount = Literal["model", "causal", "6n", "hardware"]
"""What TFLOP/s and MFU count. model: 3 forwards with full attention (PaLM, Megatron-LM until March 2025).
causal: half of the attention. 6n: 6 FLOPs for each parameter and token. hardware: what is computed,
recomputation included."""
_MOST_EXTENDED = 8
_Section = TypeVar("_Section", bound=Config)
_Values = TypeVar("_Values", FrameworkProfile, FrameworkMemory)


class SourcedValue(Config):
    """A value of a framework file."""

    value: Any
    source: str = Field(min_length=4)
    """Where the value is from: documentation, source code, a paper; or "assumed", with the reason."""
    fitted_to: str | None = None
    """Rows that the value was fitted to; off: none."""


class LayoutHabits(Config):
    """What a framework does where a row of a table, or a user, does not say it."""

    zero: Literal[0, 1, 2, 3] = 1
    """Degree of ZeRO."""
    pipeline_zero: Literal[0, 1, 2, 3] | None = None
    """Degree of ZeRO with pipeline stages, also where a row says only that it is FSDP; off: `zero`."""
    by_layer: bool = False
    """Whether ZeRO 3 gathers parameters layer by layer in each forward and backward (FSDP)."""
    reduce_each: bool = False
    """Whether ZeRO 2 and 3 reduce gradients after every micro-batch."""
    shard_group: int | None = Field(None, ge=2)
    """Largest number of replicas over which state is sharded (HSDP); off: all."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Recomputation of models without experts; off: the fastest that fits."""
    expert_recompute: Literal["none", "selective", "full"] | None = None
    """Recomputation of models with experts; off: the fastest that fits."""
    has_pipelines: bool = True
    """Whether pipelines go together with ``zero``; if not, plans have one pipeline rank."""
    exchanges_heads: bool = False
    """Whether all ranks that share a sequence exchange positions for heads (Ulysses) instead of sending keys
    and values around a ring."""
    schedule: ScheduleName | None = None
    """Pipeline schedule; off: interleaved with virtual stages, else 1f1b."""
    virtual_stages: int | None = Field(None, ge=1)
    """Virtual stages; off: the fastest number that fits."""
    expert_dispatch: ExpertDispatch = "expert"
    """How often a token travels to its experts."""
    whole_experts: bool = False
    """Whether experts are whole on a rank where tensor-parallel ranks share other matrices; off: only where
    layout.dp x layout.cp is no multiple of layout.ep."""
    partition: PartitionHabit = "uniform"
    """How layers are divided among stages. uniform: equal numbers of blocks. with-ends: equal numbers of
    layers, of which the embedding and the head are one each, where these numbers are equal. cumulative: the
    next stage begins after the layer whose products pass an equal share of all, with those of the head and
    without the embedding. balanced: the same; where that leaves stages empty, equal numbers of blocks, and
    the head on the last. megatron: uniform where stages divide the blocks, as Megatron-Core requires; else
    with-ends where they divide these layers; else equal numbers of blocks, rounded up, and what is left on
    the last stage."""
    flops: FlopCount = "model"
    """What its TFLOP/s and MFU count."""


class FrameworkFile(Config):
    """A framework's TOML file."""

    title: str
    """Name and release, as tables print it."""
    extends: str | None = None
    """Another framework, whose values hold where this file has none."""
    matches: tuple[str, ...] = ()
    """Regular expressions that name this framework. They are searched in a published row's source, table,
    model, kind and number of accelerators, notes and type, joined by " | "; the longest match counts."""
    launcher: Launcher | None = None
    """Whose options ``myriad plan --out`` writes, also if this file extends another; off: none."""
    profile: dict[str, SourcedValue] = Field(default_factory=dict)
    """What the framework launches, fuses and waits for: keys of `FrameworkProfile`, each with its source."""
    memory: dict[str, SourcedValue] = Field(default_factory=dict)
    """What its ranks hold in memory: keys of `FrameworkMemory`, each with its source."""
    overlap: dict[str, SourcedValue] = Field(default_factory=dict)
    """Which communication it overlaps: keys of `OverlapConfig`, each with its source."""
    layout: dict[str, SourcedValue] = Field(default_factory=dict)
    """What it does where a row does not say it: keys of `LayoutHabits`, each with its source."""
    limits: dict[str, SourcedValue] = Field(default_factory=dict)
    """Which layouts its plans have: keys of `LayoutLimits`, each with its source."""


@dataclass(frozen=True)
class Framework:
    """A framework at one point in time."""

    name: str
    title: str
    profile: FrameworkProfile
    overlap: OverlapConfig
    habits: LayoutHabits = field(default_factory=LayoutHabits)
    limits: LayoutLimits = field(default_factory=LayoutLimits)
    matches: tuple[str, ...] = ()
    launcher: Launcher | None = None
    """Whose options a plan is written in; ``None``: it is not written."""
    sources: Mapping[str, SourcedValue] = field(default_factory=dict)
    """Every value with its source, by its dotted key."""


_OWN = Framework("myriad", "Myriad", FrameworkProfile(), OverlapConfig())
"""What files extend that extend nothing: the defaults, which are Myriad's."""
_PROFILE: TypeAdapter[FrameworkProfile] = TypeAdapter(FrameworkProfile)
_MEMORY: TypeAdapter[FrameworkMemory] = TypeAdapter(FrameworkMemory)


def read_framework(name: str, load: Callable[[str], Mapping[str, Any]], depth: int = 0) -> Framework:
    """Return a framework from its file. ``load`` returns the tree of a file by its name. Raises
    `BadInputError`."""
    try:
        file = FrameworkFile.model_validate(load(name))
    except ValidationError as error:
        raise _refused(name, error, "") from None
    if depth == _MOST_EXTENDED:
        raise BadInputError(f"{name}: extends", file.extends, f"at most {_MOST_EXTENDED} files in a row")
    base = read_framework(file.extends, load, depth + 1) if file.extends else _OWN
    sections = {
        "profile": file.profile,
        "memory": file.memory,
        "overlap": file.overlap,
        "layout": file.layout,
        "limits": file.limits,
    }
    sources = dict(base.sources)
    for section, given in sections.items():
        sources |= {f"{section}.{key}": one for key, one in given.items()}
    return Framework(
        name,
        file.title,
        replace(
            _values(name, "profile", base.profile, file.profile, _PROFILE),
            memory=_values(name, "memory", base.profile.memory, file.memory, _MEMORY),
        ),
        _updated(name, "overlap", base.overlap, file.overlap),
        _updated(name, "layout", base.habits, file.layout),
        _updated(name, "limits", base.limits, file.limits),
        file.matches,
        file.launcher,
        sources,
    )


def _values(
    name: str, section: str, base: _Values, given: Mapping[str, SourcedValue], adapter: TypeAdapter[_Values]
) -> _Values:
    known = {one.name for one in fields(base)} - {"memory"}
    for key in given:
        if key not in known:
            raise BadInputError(f"{name}: {section}", key, f"one of {', '.join(sorted(known))}")
    values = {one: getattr(base, one) for one in known} | {key: one.value for key, one in given.items()}
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        raise _refused(name, error, f"{section}.") from None


def _updated(name: str, section: str, base: _Section, given: Mapping[str, SourcedValue]) -> _Section:
    values = base.model_dump() | {key: one.value for key, one in given.items()}
    try:
        return type(base).model_validate(values)
    except ValidationError as error:
        raise _refused(name, error, f"{section}.") from None


def _refused(name: str, error: ValidationError, prefix: str) -> BadInputError:
    first = error.errors()[0]
    key = prefix + ".".join(map(str, first["loc"]))
    return BadInputError(f"{name}: {key}", first["input"], explain(first))
