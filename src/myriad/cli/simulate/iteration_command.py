"""``myriad simulate --cluster``: print, draw or write one predicted iteration."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from myriad.cli.json_output import print_json
from myriad.cli.output_files import write_picture
from myriad.cli.progress_bar import count_bar
from myriad.errors import BadInputError
from myriad.system.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.forecasts.iteration_forecast import IterationForecast
    from myriad.forecasts.network_effect import NetworkEventRequest

__all__ = ["IterationOptions", "simulate_iteration"]


@dataclass(frozen=True)
class IterationOptions:
    """The options of ``myriad simulate --cluster``."""

    job: str
    overrides: Sequence[str]
    cluster: str
    out: Path | None
    spans: Path | None
    full: bool
    stragglers: Sequence[str]
    jitter: float
    seed: int
    network: "NetworkEventRequest"
    fabric: bool
    as_json: bool


def simulate_iteration(options: IterationOptions) -> None:
    """Predict an iteration, write the files, print the figures. Raises `BadInputError`."""
    from myriad.cli.measured_cluster import cluster_path
    from myriad.forecasts.iteration_forecast import IterationRequest, check_jitter, check_world, fabric_line
    from myriad.job import load_job
    from myriad.recipes.cluster import load_cluster

    check_jitter(options.jitter)
    job = load_job(options.job, options.overrides)
    cluster = load_cluster(cluster_path(options.cluster))
    check_world(job, cluster)
    if options.spans is not None:
        _check_folder(options.spans)
    question = IterationRequest(
        job, cluster, options.full, options.stragglers, options.jitter, options.seed, options.network
    )
    with count_bar("simulating an iteration") as show:
        found, on_fabric = question.forecast(), None
        if options.fabric:
            on_fabric = question.fabric_outlook(partial(show, "simulating draws of the hash seeds"))
    written = _write(options, found)
    if options.as_json:
        fabric = {} if on_fabric is None else {"fabric": on_fabric.as_json()}
        print_json(found.as_json() | {"written": [str(path) for path in written]} | fabric)
    else:
        _print(found, [] if on_fabric is None else [fabric_line(on_fabric)], written)


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError("--spans", str(folder), "must be a new or empty folder")


def _write(options: IterationOptions, found: "IterationForecast") -> list[Path]:
    from myriad.job import dump_toml
    from myriad.reports.charts.span_chart import ChartLane, Panel, draw_spans
    from myriad.telemetry.span_io.span_files import write_spans

    written = []
    if options.out is not None:
        lanes = [ChartLane(f"rank {rank}", spans) for rank, spans in found.spans.items()]
        panel = Panel("one iteration, predicted", 0.0, found.summary.seconds, lanes)
        write_picture("--out", options.out, draw_spans(found.headline, [panel]))
        written.append(options.out)
    if options.spans is not None:
        folder = options.spans / "spans"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_spans(folder / "step-1.parquet", found.spans, step=1)
            write_whole(options.spans / "job.toml", dump_toml(found.job))
        except OSError as error:
            raise BadInputError(
                "--spans", str(options.spans), f"cannot be written: {error.strerror}"
            ) from None
        written.append(options.spans)
    return written


def _print(found: "IterationForecast", fabric_lines: Sequence[str], written: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def show(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    show(found.headline, "bold")
    show(found.rate_line)
    head, *rows = found.table()
    show(head, "bold")
    for row in rows:
        show(row)
    if found.num_hidden_ranks:
        show(f"and {found.num_hidden_ranks:,} more: --json has all")
    for line in found.notes():
        show(line, "dim")
    for line in (*found.network_lines(), *fabric_lines, *map(str, written)):
        show(line)
