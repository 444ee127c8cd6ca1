"""``myriad simulate --weeks``: weeks with faults on a cluster, as tables, chart or JSON.

The chart shows the lost time of each policy by class, and the effect of each change:

    Myriad            ▇▇▇▇▇▅▅▃▃            2.4 %     bars: share of the wall time without training
    ByteRobust-like   ▇▇▇▇▇▇▇▇▇▇▇▅▅▅▃      4.4 %

    faults a day      ◄▇▇▇▇▇│▇▇▇►                    bars: points to the left and right of Myriad's mean
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import share_bar
from myriad.errors import BadInputError
from myriad.forecasts.fleet.fleet_study import PolicyOutcome, SensitivityEffect
from myriad.reports.charts.ledger_chart import COLOURS
from myriad.reports.charts.svg import INK, box, document, legend, rule, text
from myriad.supervise.accounting.ledger import KINDS
from myriad.units import format_number

if TYPE_CHECKING:
    from myriad.forecasts.fleet.fleet_study import StudySetting
    from myriad.planner import Cluster

__all__ = ["WeeksRequest", "simulate_weeks"]

_MOST_WEEKS, _MOST_RUNS, _MOST_SPARES = 52.0, 1000, 100_000
_MOST_FAULTS = 50_000
"""Largest number of expected faults in a run: more take hours to simulate."""


@dataclass(frozen=True)
class WeeksRequest:
    """The options of ``myriad simulate --weeks``."""

    weeks: float
    job: str | None
    overrides: Sequence[str]
    cluster: str
    seed: int
    sensitivity: bool
    out: Path | None
    as_json: bool
    mix: str = "llama3"
    spares: int = 16
    runs: int = 20

    def with_given(self, mix: str | None, spares: int | None, runs: int | None) -> "WeeksRequest":
        """Return the options with the given values in place of defaults."""
        return replace(
            self,
            mix=self.mix if mix is None else mix,
            spares=self.spares if spares is None else spares,
            runs=self.runs if runs is None else runs,
        )


def simulate_weeks(wanted: WeeksRequest) -> None:
    """Simulate the weeks, write the chart, print the tables. Raises `BadInputError`."""
    from myriad.forecasts.fleet.fleet_study import compare, num_policies, sensitivity, sensitivity_changes

    if wanted.out is not None:
        check_picture("--out", wanted.out)
    cluster, setting = _setting(wanted)
    changes = sum(1 for _ in sensitivity_changes(setting)) if wanted.sensitivity else 0
    total = wanted.runs * (num_policies() + changes)
    counted = count(1)
    with share_bar("simulating") as show:

        def done() -> None:
            number = next(counted)
            show(f"run {number} of {total}", number / total)

        outcomes = compare(setting, done)
        effects = sensitivity(setting, done) if wanted.sensitivity else []
    headline = _headline(wanted, cluster, setting)
    if wanted.out is not None:
        write_picture("--out", wanted.out, _draw_chart(headline, outcomes, effects))
    if wanted.as_json:
        print_json(_as_json(wanted, setting, outcomes, effects))
    else:
        _print(headline, wanted, setting, outcomes, effects)


def _setting(wanted: WeeksRequest) -> "tuple[Cluster, StudySetting]":
    from myriad.cli.measured_cluster import cluster_path
    from myriad.forecasts.fleet.fault_mix import DAY, load_mix
    from myriad.forecasts.fleet.fleet_study import StudySetting
    from myriad.forecasts.fleet.policy_times import load_times, times_of
    from myriad.recipes.cluster import load_cluster

    for option, value, least, most in (
        ("--weeks", wanted.weeks, 0.01, _MOST_WEEKS),
        ("--runs", wanted.runs, 1, _MOST_RUNS),
        ("--spares", wanted.spares, 0, _MOST_SPARES),
    ):
        if not least <= value <= most:
            raise BadInputError(option, value, f"{least:g} to {most:,g}")
    mix, cluster = load_mix(wanted.mix), load_cluster(cluster_path(wanted.cluster))
    times, world, patience = load_times(), cluster.world, 1.0
    if wanted.job is not None:
        from myriad.forecasts.iteration_forecast import predict_iteration
        from myriad.job import load_job

        job = load_job(wanted.job, wanted.overrides)
        step_seconds = predict_iteration(job, cluster)
        world, times, patience = job.layout.world, times_of(job, step_seconds), job.resilience.timeout_scale
    elif wanted.overrides:
        raise BadInputError("JOB", None, f"{wanted.overrides[0]} needs a job that it changes")
    seeds = range(wanted.seed, wanted.seed + wanted.runs)
    seconds = wanted.weeks * 7 * DAY
    expected = mix.per_day(world) * seconds / DAY
    if not expected <= _MOST_FAULTS:
        shown = f"{format_number(expected)} faults in {wanted.weeks:g} weeks"
        raise BadInputError(f"--mix {wanted.mix}", shown, f"at most {_MOST_FAULTS:,} in a run")
    return cluster, StudySetting(mix, world, seconds, wanted.spares, times, seeds, patience=patience)


def _headline(wanted: WeeksRequest, cluster: "Cluster", setting: "StudySetting") -> str:
    runs = f"{wanted.runs} run{'s' if wanted.runs > 1 else ''}"
    where = f"{setting.accelerators:,} accelerators of {cluster.name} and {wanted.spares} spare nodes"
    weeks = f"{wanted.weeks:g} week{'s' * (wanted.weeks != 1)}"
    return f"{weeks} on {where}: {setting.faults_per_day:.1f} faults a day, {runs}"


def _print(
    headline: str,
    wanted: WeeksRequest,
    setting: "StudySetting",
    outcomes: Sequence[PolicyOutcome],
    effects: Sequence[SensitivityEffect],
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def show(rows: Sequence[Sequence[str]]) -> None:
        head, *lines = _aligned(rows)
        console.print(Text(head, style="bold"), soft_wrap=True)
        for line in lines:
            console.print(Text(line), soft_wrap=True)
        console.print()

    console.print(Text(headline, style="bold"), soft_wrap=True)
    console.print(Text(f"faults: {setting.mix.source}", style="dim"), soft_wrap=True)
    console.print()
    show(_ratio_rows(outcomes))
    show(_ledger_rows(outcomes))
    if effects:
        show(_effect_rows(outcomes[0].mean, effects))
    note = (
        f"Myriad runs its real recovery decisions. A step takes "
        f"{format_number(setting.times.step_seconds)} s."
    )
    note += " This is a simulation: nothing was run."
    console.print(Text(note, style="dim"), soft_wrap=True)
    if wanted.out is not None:
        console.print(str(wanted.out), soft_wrap=True)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _ratio_rows(outcomes: Sequence[PolicyOutcome]) -> list[list[str]]:
    rows = [["effective training time", "mean", "p5", "p95", "attempts", "idle spare node-days"]]
    for one in outcomes:
        low, high = one.interval
        attempts = sum(ledger.attempt for ledger in one.ledgers) / len(one.ledgers)
        ratios = [f"{ratio:.1%}" for ratio in (one.mean, low, high)]
        rows.append([one.title, *ratios, f"{attempts:.0f}", f"{one.spare_node_seconds / 86400:.0f}"])
    return rows


def _ledger_rows(outcomes: Sequence[PolicyOutcome]) -> list[list[str]]:
    """Return the rows of the ledger; classes that no policy spends time in are left out."""
    shares = [one.shares for one in outcomes]
    rows = [["wall time", *(one.title for one in outcomes)]]
    rows += [
        [kind, *(f"{one[kind]:.2%}" for one in shares)] for kind in KINDS if any(s[kind] for s in shares)
    ]
    return [*rows, ["in all", *(f"{sum(one.values()):.2%}" for one in shares)]]


def _effect_rows(base: float, effects: Sequence[SensitivityEffect]) -> list[list[str]]:
    """Return the rows of changes, largest effect first, in points of the effective training time."""
    rows = [["change to Myriad", "to", "mean", "points"]]
    for one in sorted(effects, key=lambda one: -abs(one.ratio - base)):
        points = 100 * (one.ratio - base)
        rows.append([one.name, one.change, f"{one.ratio:.2%}", f"{points:+.2f}"])
    return rows


def _as_json(
    wanted: WeeksRequest,
    setting: "StudySetting",
    outcomes: Sequence[PolicyOutcome],
    effects: Sequence[SensitivityEffect],
) -> dict[str, Any]:
    policies = [
        {
            "policy": one.title,
            "mean": one.mean,
            "p5": one.interval[0],
            "p95": one.interval[1],
            "runs": one.ratios,
            "shares": one.shares,
            "spare_node_seconds": one.spare_node_seconds,
        }
        for one in outcomes
    ]
    return {
        "accelerators": setting.accelerators,
        "seconds": setting.seconds,
        "spares": setting.spares,
        "mix": {"name": wanted.mix, "source": setting.mix.source},
        "faults_per_day": setting.faults_per_day,
        "times": setting.times.model_dump(),
        "policies": policies,
        "sensitivity": [{"name": one.name, "change": one.change, "mean": one.ratio} for one in effects],
        "out": None if wanted.out is None else str(wanted.out),
    }


_LOSSES = tuple(kind for kind in KINDS if kind != "training")
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 860.0, 210.0, 760.0, 26.0, 16.0
_LESS, _MORE = "#b3403a", "#3a8f5c"


def _draw_chart(
    headline: str, outcomes: Sequence[PolicyOutcome], effects: Sequence[SensitivityEffect]
) -> str:
    """Draw the lost time of each policy, and the effect of each change."""
    parts = [
        text(24, 30, headline, size=15, ink=INK),
        text(24, 58, "lost time, as a share of the wall time"),
    ]
    top, widest = 70.0, max(1 - one.shares["training"] for one in outcomes) or 1.0
    for one in outcomes:
        parts += _losses(one, top, (_RIGHT - _LEFT) / widest)
        top += _ROW
    parts += _legend(outcomes, top + 12)
    top += 44
    if effects:
        parts.append(
            text(
                24,
                top,
                "Myriad with one thing changed: difference in effective training time, in percentage points",
            )
        )
        drawn, top = _tornado(effects, outcomes[0].mean, top + 12)
        parts += drawn
    return document(_WIDTH, top + 12, headline, parts)


def _losses(one: PolicyOutcome, top: float, scale: float) -> list[str]:
    shares, x = one.shares, _LEFT
    parts = [text(_LEFT - 8, top + 12, one.title, "end")]
    for kind in _LOSSES:
        width = shares[kind] * scale
        parts.append(box(x, top, width, _BAR, COLOURS[kind], f"{one.title}: {kind} {shares[kind]:.2%}"))
        x += width
    low, high = one.interval
    said = f"{one.mean:.1%}"
    parts.append(text(x + 6, top + 12, said))
    parts.append(f"<title>{escape(f'{one.title}: {said}, p5 {low:.1%}, p95 {high:.1%}')}</title>")
    return ["<g>", *parts, "</g>"]


def _legend(outcomes: Sequence[PolicyOutcome], top: float) -> list[str]:
    shown = [kind for kind in _LOSSES if any(one.shares[kind] for one in outcomes)]
    return legend([(COLOURS[kind], kind) for kind in shown], 24.0, top)


def _tornado(effects: Sequence[SensitivityEffect], base: float, top: float) -> tuple[list[str], float]:
    """Draw the effects, largest first; the zero line is placed so that losses and gains both fit."""
    names = list(dict.fromkeys(one.name for one in effects))
    of = {name: [one for one in effects if one.name == name] for name in names}
    names.sort(key=lambda name: -max(abs(one.ratio - base) for one in of[name]))
    least = min(0.0, *(one.ratio - base for one in effects))
    most = max(0.0, *(one.ratio - base for one in effects))
    scale = (_RIGHT - _LEFT - 80) / ((most - least) or 1.0)
    zero = _LEFT + 40 - least * scale
    parts = []
    for name in names:
        parts.append(text(_LEFT - 8, top + 12, name.replace("_", " "), "end"))
        for one in of[name]:
            points = one.ratio - base
            x, width = zero + min(0.0, points) * scale, abs(points) * scale
            hint = f"{name} {one.change}: {100 * points:+.2f} points"
            parts.append(box(x, top, width, _BAR, _MORE if points > 0 else _LESS, hint))
            if abs(points) >= 0.0005:
                at, anchor = (x - 4, "end") if points < 0 else (x + width + 4, "start")
                parts.append(text(at, top + 12, one.change, anchor))
        top += _ROW - 6
    parts.append(rule((zero, top), (zero, top - len(names) * (_ROW - 6)), INK))
    return parts, top
