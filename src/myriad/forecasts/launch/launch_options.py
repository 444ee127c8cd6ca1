"""What the scripts for all frameworks share: values as a shell reads them, and layouts that no other
framework has."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.planner import Cluster, Framework

__all__ = [
    "KEY",
    "LaunchScript",
    "Value",
    "check_layout",
    "falling_steps",
    "hosts",
    "micro_batches",
    "option_line",
    "option_lines",
    "planned_type",
    "product_format",
    "torchrun",
]

Value = bool | int | float | str | None
"""A flag, a number or a word. ``None``: the framework's own default, or nothing."""
Separator = Literal[" ", "_", "="]
KEY = "--out"
"""The option that errors name."""


@dataclass(frozen=True)
class LaunchScript:
    """The parts of a script that depend on the framework."""

    command: tuple[str, ...]
    """Lines of the command. ``"${ARGUMENTS[@]}"`` in them stands for the options, ``"$@"`` for the script's
    own arguments."""
    options: tuple[str, ...] = ()
    """Options as lines of a shell array."""
    notes: str = ""
    """A comment: what to give to the script."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are exported unless they have a value."""
    config: tuple[str, str] | None = None
    """Suffix and text of a configuration file. Shell variables in the text are replaced."""


def option_line(name: str, value: Value, separator: Separator) -> str:
    """Return an option as a line of a shell array; "": nothing to give. ``separator``: " " gives ``--the-name
    value``, "_" gives ``--the_name value``, both flags without a value; "=" gives ``the_name=value``."""
    if separator == "=":
        word = "null" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
        if set(word) & set("|*(),"):
            return f"'{name}=\"{word}\"'"  # Hydra reads a word with these characters only in quotes.
        return f"{name}={word.lower() if isinstance(value, bool) else word}"
    option = f"--{name.replace('_', '-')}" if separator == " " else f"--{name}"
    if value is None or isinstance(value, bool):
        return option if value else ""
    word = f"{value:.10g}" if isinstance(value, float) else str(value)
    return f"{option} '{word}'" if set(word) & set('()[]*|{}" ') else f"{option} {word}"


def option_lines(options: Iterable[tuple[str, Value]], separator: Separator = " ") -> tuple[str, ...]:
    """Return the lines of all options that are to be given."""
    lines = (option_line(name, value, separator) for name, value in options)
    return tuple(line for line in lines if line)


_LARGEST_HOST, _TRAY = 16, 4
"""Accelerators of the largest host, and of a host in a rack whose accelerators one fabric connects (a
compute tray of GB200 NVL72 has 4 of its 72 GPUs)."""


def hosts(layout: Layout, cluster: Cluster) -> tuple[int, int]:
    """Return the number of hosts that a layout fills, and the accelerators of each. A node of the cluster
    is a host, unless it is a rack."""
    node = min(layout.world, cluster.accelerators_per_node)
    each = node if node <= _LARGEST_HOST else gcd(node, _TRAY)
    return layout.world // each, each


def torchrun(layout: Layout, cluster: Cluster, *program: str) -> tuple[str, ...]:
    """Return the lines that start one process for each accelerator."""
    number, each = hosts(layout, cluster)
    return (
        "torchrun",
        f"--nproc-per-node {each} --nnodes {number}",
        '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"',
        '--master-port "${MASTER_PORT:-29500}"',
        *program,
    )


def planned_type(job: Job) -> str:
    """Return the type of the job's computation: on an accelerator ``auto`` is bfloat16."""
    return "bfloat16" if job.train.precision == "auto" else job.train.precision


def product_format(job: Job, framework: Framework, cluster: Cluster) -> str:
    """Return the format of matrix products: NVFP4 where the framework's profile has it, MXFP8 for float8 in
    blocks on Blackwell, whose blocks are of 32 neighbours, else the job's type."""
    if framework.profile.quantization == "nvfp4":
        return "nvfp4"
    planned, is_blackwell = planned_type(job), cluster.accelerator.float8_any_order
    return "mxfp8" if planned == "float8-blocks" and is_blackwell else planned


def micro_batches(job: Job) -> int:
    """Return the number of micro-batches of a replica in an iteration; all replicas have the same."""
    return job.train.global_batch // (job.layout.dp * job.layout.micro_batch)


def falling_steps(job: Job) -> int:
    """Return the number of steps in which a schedule falls that is constant before (``wsd``)."""
    return max(1, round(job.optimizer.decay_ratio * job.train.steps))


_FIXED: Mapping[str, object] = {
    "offload_activations": 0.0,
    "offload_optimizer": False,
    "partition": "uniform",
    "shares": None,
}
"""Keys of the layout that no other framework gets."""


def check_layout(layout: Layout, schedules: Collection[str] = (), *, has_parts: bool = False) -> None:
    """Raise `BadInputError` for what the other framework does not have. ``schedules``: those that it has;
    ``()``: no pipelines. ``has_parts``: whether it recomputes a part of the layers."""
    fixed = _FIXED if has_parts else {**_FIXED, "recompute_ratio": 1.0}
    for key, value in fixed.items():
        if (given := getattr(layout, key)) != value:
            raise BadInputError(KEY, f"layout.{key} = {given}", f"{value}, for another framework")
    if layout.pp > 1 and not schedules:
        raise BadInputError(KEY, f"layout.pp = {layout.pp}", "1: the framework's plans have no pipelines")
    if layout.pp > 1 and layout.schedule_name not in schedules:
        given, allowed = f"layout.schedule = {layout.schedule_name}", f"one of {', '.join(schedules)}"
        raise BadInputError(KEY, given, allowed)
