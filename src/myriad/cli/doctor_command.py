"""``myriad doctor``: test this node, check by check, with advice for each failed check."""

import json as json_format
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myriad.cli.progress_bar import share_bar
from myriad.cli.shared_options import AsJson
from myriad.errors import BadInputError, RunFailedError
from myriad.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from myriad.doctor.diagnosis import Diagnosis, Expected, Item
    from myriad.doctor.pair_tests.pair_findings import Findings
    from myriad.doctor.pair_tests.pair_hosts import PairHost

__all__ = ["doctor", "register"]

_BASELINE_ROUNDS = 3
_NETWORK, _PAIR = "network between nodes", "all-reduce of two"
"""The place in a baseline of the expected rate of a good pair."""
_MOST_WAIT_SECONDS = 86_400.0
_NODES_PER_SWITCH = 4
_STYLES = {"ok": "green", "slow": "yellow", "bad": "bold red", "skipped": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("doctor")(doctor)


_Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="HOSTS",
        help="Test between nodes as well: all hosts separated by commas, or a file with one host a line, in"
        " order of neighbourhood. Run the same command on each host; the first one reports the suspects.",
    ),
]
_Node = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="Name of this host in --cluster. Default: found by its addresses."),
]
_Secret = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the shared secret of --cluster. Default: MYRIAD_DOCTOR_SECRET."
    ),
]
_Links = Annotated[
    bool,
    typer.Option(
        "--links", help="Test every pair of nodes instead of the few that reveal bad nodes (with --cluster)."
    ),
]
_Wait = Annotated[
    float, typer.Option(metavar="SECONDS", help="Seconds to wait for the other nodes (with --cluster).")
]


_NoCollectives = Annotated[
    bool,
    typer.Option(
        "--no-collectives",
        help="Test only pairs, without all-reduce and all-to-all of groups (with --cluster).",
    ),
]
_PerSwitch = Annotated[
    int,
    typer.Option(
        metavar="NODES",
        help="Nodes under one switch, adjacent in --cluster. They form the groups of the collective tests; "
        "groups across switches take one node of each.",
    ),
]
_Rails = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="RDMA ports (mlx5_0:1,mlx5_1:1) or interfaces (eth0,eth1) to test collectives on, one after the "
        "other (with --cluster). Default: the active RDMA ports that all nodes have, else the interface of "
        "the node's address.",
    ),
]


@dataclass(frozen=True)
class _Others:
    """The other nodes of the network tests, and the options of these tests."""

    nodes: "Sequence[PairHost]"
    index: int
    secret: bytes
    links: bool
    wait_seconds: float
    collectives: bool
    per_switch: int
    rails: tuple[str, ...]


def doctor(
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for runs or checkpoints; its disk is tested.")
    ] = Path("runs"),
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Baseline of healthy nodes. Default: the one stored for this user."
        ),
    ] = None,
    save_baseline: Annotated[
        bool,
        typer.Option(
            "--save-baseline", help="Measure this node three times and store the result as the baseline."
        ),
    ] = False,
    cluster: _Cluster = None,
    node: _Node = None,
    secret_file: _Secret = None,
    links: _Links = False,
    wait: _Wait = 60.0,
    no_collectives: _NoCollectives = False,
    per_switch: _PerSwitch = _NODES_PER_SWITCH,
    rails: _Rails = None,
    json: AsJson = False,
) -> None:
    """Test this node within seconds and report what is wrong with it.

    Checks memory, disk, network interfaces, transfers between ranks, accelerators, limits, versions and the
    clock; with --cluster also the network between nodes. Each check is ok, slow (below 80 % of the baseline),
    bad or skipped.

    Exit code: 0 all is well, 1 a check is slow or bad, 2 bad input.
    """
    from myriad.doctor.baseline import default_path, read_baseline

    if folder.exists() and not folder.is_dir():
        raise BadInputError("--folder", str(folder), "must be a folder, or a path where one can be created")
    path = baseline or default_path()
    others = _others(cluster, node, secret_file, links, wait, no_collectives, per_switch, rails)
    if save_baseline:
        _save(folder, path, others, json=json)
        return
    expected = read_baseline(path) if baseline is not None or path.is_file() else {}
    diagnosis = _diagnose(folder, expected)
    findings = _between(others, diagnosis, expected) if others is not None else None
    baseline_path = path if expected else None
    concerned = others is not None and findings is not None and _concerns(findings, others)
    freed = _free() if diagnosis.healthy and not concerned else ""
    if json:
        between = {} if findings is None else {"between_nodes": findings.model_dump(mode="json")}
        more = between | ({"freed": freed} if freed else {})
        typer.echo(
            json_format.dumps(diagnosis.as_json() | {"baseline": baseline_path and str(baseline_path)} | more)
        )
    else:
        _show(diagnosis, baseline_path)
        if findings is not None:
            _show_between(findings)
        if freed:
            typer.echo(f"{freed} was in quarantine, and may join runs again.")
    if not diagnosis.healthy or concerned:
        raise typer.Exit(1)


def _free() -> str:
    """Release this machine from quarantine where the doctor's checks cover the reason; return its name, or an
    empty string where it was not released."""
    from myriad.supervise.driver.admission import clear, read_offenders
    from myriad.system.machine import machine_name

    machine, now = machine_name(), time.time()
    try:
        if read_offenders().quarantine(machine, now) is None:
            return ""
        clear(machine, "doctor")
        return machine if read_offenders().quarantine(machine, now) is None else ""
    except OSError as error:
        logging.getLogger(__name__).warning("machines in quarantine are not known: %s", error)
        return ""


def _others(
    cluster: str | None,
    node: str | None,
    secret_file: Path | None,
    links: bool,
    wait: float,
    no_collectives: bool,
    per_switch: int,
    rails: str | None,
) -> _Others | None:
    """Return the options of the network tests; ``None`` without --cluster. All wrong options are refused
    here, before any measurement."""
    from myriad.doctor.pair_tests.pair_hosts import check_listening, find_self, read_nodes, read_secret

    if not 0 <= wait <= _MOST_WAIT_SECONDS:
        raise BadInputError("--wait", wait, f"0 to {_MOST_WAIT_SECONDS:,.0f} seconds")
    if not 2 <= per_switch <= 64:
        raise BadInputError("--per-switch", per_switch, "2 to 64 nodes")
    names = tuple(name.strip() for name in (rails or "").split(",") if name.strip())
    if any(re.fullmatch(r"[\w.-]{1,64}(:\d{1,3})?", name, re.ASCII) is None for name in names):
        raise BadInputError(
            "--rails",
            str(rails),
            "must be a comma-separated list of RDMA ports (mlx5_0:1) or interfaces (eth0)",
        )
    if cluster is None:
        for key, given in (
            ("--node", node),
            ("--secret-file", secret_file),
            ("--links", links or None),
            ("--no-collectives", no_collectives or None),
            ("--rails", rails),
        ):
            if given is not None:
                raise BadInputError(key, str(given), "only with --cluster")
        return None
    nodes = read_nodes(cluster)
    index = find_self(nodes, node)
    if index == 0:
        check_listening(nodes[0])
    secret = read_secret(secret_file)
    return _Others(nodes, index, secret, links, wait, not no_collectives, per_switch, names)


def _diagnose(folder: Path, expected: "Expected", *, title: str = "testing") -> "Diagnosis":
    from myriad.doctor.examine import diagnose

    with share_bar(title) as show:
        return diagnose(folder, expected, report=show)


def _between(others: _Others, diagnosis: "Diagnosis", expected: "Expected") -> "Findings":
    from myriad.doctor.pair_tests.participant import pairwise

    known = expected.get(_NETWORK, {}).get(_PAIR)
    with share_bar("testing") as show:
        show("between nodes", 0.9)
        return pairwise(
            others.nodes,
            others.index,
            others.secret,
            complaints=[item.name for item in diagnosis.complaints],
            wait_seconds=others.wait_seconds,
            expected=known if isinstance(known, int | float) else None,
            links=others.links,
            collectives=others.collectives,
            per_switch=others.per_switch,
            rails=others.rails,
        )


def _concerns(findings: "Findings", others: _Others) -> bool:
    """Return whether this node reports a problem: the first node reports on all nodes, each other node on
    itself."""
    return not findings.healthy if others.index == 0 else findings.is_suspect(str(others.nodes[others.index]))


def _save(folder: Path, path: Path, others: _Others | None, *, json: bool) -> None:
    from myriad.doctor.baseline import merge, read_baseline, summarize, write_baseline
    from myriad.doctor.diagnosis import Reading

    old = read_baseline(path) if path.exists() else {}
    rounds = []
    for number in range(_BASELINE_ROUNDS):
        found = _diagnose(folder, {}, title=f"baseline, {number + 1} of {_BASELINE_ROUNDS}")
        if not found.healthy:
            raise RunFailedError(f"no baseline was saved, this node is not healthy: {found.words}")
        rounds.append(found.readings)
    if others is not None:
        findings = _between(others, found, {})
        if not findings.healthy:
            raise RunFailedError(f"no baseline was saved: {'; '.join(findings.words)}")
        rounds.append([Reading(name=_PAIR, value=findings.expected, hardware=_NETWORK)])
    new = summarize(rounds)
    write_baseline(path, merge(old, new))
    count = sum(len(measures) for measures in new.values())
    if json:
        typer.echo(json_format.dumps({"baseline": str(path), "hardware": new}))
    else:
        typer.echo(f"{count} values of {len(new)} kinds of hardware\n{path}")


def _show(diagnosis: "Diagnosis", baseline: Path | None) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(diagnosis))
    if baseline is None:
        text = (
            "No baseline: rates are only compared with minimums that a working node exceeds. On a healthy "
            "node, run:"
        )
        console.print(f"{text}\n    myriad doctor --save-baseline", style="dim")
    else:
        console.print(f"Baseline: {baseline}", style="dim", soft_wrap=True)
    style = "green" if diagnosis.healthy else "bold red"
    console.print(f"{diagnosis.words} ({diagnosis.seconds:.1f} s)", style=style, soft_wrap=True)


def _show_between(findings: "Findings") -> None:
    from rich.console import Console

    console = Console()
    for line in findings.words or ["between nodes: healthy"]:
        console.print(
            line, style="green" if findings.healthy else "bold red", soft_wrap=True, highlight=False
        )
    rate = f"{format_bytes(findings.expected)}/s each way at once"
    text = f"{findings.tests} pairs in {findings.rounds} rounds; a good pair reaches {rate}"
    console.print(text, style="dim", highlight=False)
    for group in findings.groups:
        if not group.trouble:
            line = f"{group.title}: {group.words}"
            console.print(line, style="dim", highlight=False, soft_wrap=True)
    for text in findings.skipped:
        console.print(f"skipped: {text}", style="dim", highlight=False, soft_wrap=True)


def _table(diagnosis: "Diagnosis") -> "Table":
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("", no_wrap=True)
    grid.add_column("check", overflow="fold", ratio=3)
    grid.add_column("measured", overflow="fold", ratio=2)
    grid.add_column("in words", overflow="fold", ratio=4)
    for item in diagnosis.items:
        is_note = item.advisory and item.verdict != "ok"  # An advisory item does not affect the result.
        verdict = Text("note" if is_note else item.verdict, "dim" if item.advisory else _STYLES[item.verdict])
        grid.add_row(verdict, Text(item.name), Text(_measured(item)), Text(item.words))
    return grid


def _measured(item: "Item") -> str:
    value, unit = item.measured, item.unit
    if value is None or isinstance(value, str):
        return value or ""
    if unit.startswith("bytes"):
        return format_bytes(value) + unit.removeprefix("bytes")
    if unit in ("Mbit/s", "files"):
        return f"{value:,.0f} {unit}"
    if unit == "FLOP/s":
        return f"{value / 1e9:,.0f} GFLOP/s"
    if unit in ("s", "ppm"):
        return f"{value:.3g} {unit}"
    return f"{format_count(value)} {unit}"
