"""``myriad eval``: score a model on tasks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.json_output import print_json
from myriad.cli.progress_bar import Counted, count_bar
from myriad.cli.shared_options import Oversubscribes, UsesAverage
from myriad.errors import BadInputError
from myriad.units import format_number

if TYPE_CHECKING:
    from myriad.comm.layout import Layout
    from myriad.evaluation.task_files import Task
    from myriad.evaluation.task_scores import TaskScores
    from myriad.job import Job

__all__ = ["evaluate", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("eval", cls=LayoutCommand, options_metavar="[OPTIONS] [--layout.KEY VALUE]...")(evaluate)


class LayoutCommand(OverrideCommand):
    """A verb that takes the keys of the layout that have an effect without training."""

    def takes(self, key: str) -> bool:
        """Return whether ``--help`` shows this key."""
        from myriad.job.scoring_layout import has_effect

        return has_effect(key)


def evaluate(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="Run (its folder, or its name under runs/), checkpoint (step-N), URL of one of these, or "
            "Hugging Face folder. Of several checkpoints, the newest.",
        ),
    ],
    tasks: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="JSONL file of requests in the shape of lm-evaluation-harness, or a folder of such files; "
            "may be given several times.",
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Score at most this many documents of each task.")
    ] = None,
    batch_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of one forward pass, and positions whose keys and values are held to "
            "generate text; less takes less memory.",
        ),
    ] = 8192,
    ema: UsesAverage = False,
    own_layout: Annotated[
        bool,
        typer.Option(
            "--own-layout",
            help="Compute in ranks, in the layout that the run was trained in; --layout keys change it.",
        ),
    ] = False,
    oversubscribe: Oversubscribes = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
) -> None:
    """Score a model: perplexity of texts, multiple choice, and exact match of generated text.

    One process on the CPU computes the scores. With --layout keys or --own-layout, ranks of this machine do:
    each loads only its part of the model, on GPUs if there is one for each rank. Both compute in float32.

    Every task is checked before anything is scored.

    Exit code: 0 done, 1 a rank failed, 2 bad input, 130 stopped by Ctrl-C.
    """
    from myriad.evaluation.task_files import read_tasks

    overrides = OverrideCommand.of(context)
    if oversubscribe and not (overrides or own_layout):
        raise BadInputError("--oversubscribe", True, "only with --layout keys or --own-layout")
    given = read_tasks(tasks, limit)
    with count_bar("loading the model") as show:
        if overrides or own_layout:
            ranks = _Ranks(run, overrides, own_layout=own_layout, oversubscribe=oversubscribe)
            where, results = ranks.scores(given, batch_tokens, show, ema=ema)
        else:
            where, results = _scores(run, given, batch_tokens, show, ema=ema)
    if as_json:
        print_json({"model": where, "ema": ema, "tasks": [_record(one) for one in results]})
    else:
        _show_table(where, results)


def _scores(
    run: str, tasks: "list[Task]", batch_tokens: int, show: Counted, *, ema: bool
) -> "tuple[str, list[TaskScores]]":
    """Return the place of the weights, and the scores of each task."""
    import torch

    from myriad.evaluation.full_model import FullModel
    from myriad.evaluation.task_requests import TaskRequests
    from myriad.system.spin_control import control_spinning
    from myriad.train.checkpoint_tools.whole_model import open_model

    found = open_model(run, "PATH", ema=ema)
    control_spinning(torch.get_num_threads())
    model = FullModel(found.layers, found.tokenizer, found.config.sequence)
    requests = TaskRequests(tasks, model.encoder)
    scored = model.score(
        requests.pieces, batch_tokens, lambda done, total: show("scoring windows of requests", done, total)
    )
    made = model.generate(
        requests.prompts, batch_tokens, lambda done, total: show("generating texts", done, total)
    )
    return found.where, requests.scores(scored, made)


@dataclass(frozen=True)
class _Ranks:
    """An evaluation in ranks of this machine."""

    run: str
    overrides: list[str]
    own_layout: bool
    oversubscribe: bool

    def scores(
        self, tasks: "list[Task]", batch_tokens: int, show: Counted, *, ema: bool
    ) -> "tuple[str, list[TaskScores]]":
        """Return the place of the weights, and the scores of each task."""
        from myriad.job.scoring_layout import scoring_layout
        from myriad.launchers.local import check_cores

        if not self.own_layout:  # refused before torch is imported
            check_cores(scoring_layout(self.overrides).world, oversubscribe=self.oversubscribe)

        from myriad.evaluation.task_requests import TaskRequests
        from myriad.evaluation.token_requests import RequestEncoder
        from myriad.launchers.local_ranks import run_ranks_here
        from myriad.train.checkpoint_tools.whole_model import describe_weights
        from myriad.train.rank_evaluation import MODULE, EvaluationRequest, EvaluationResult, check_tasks

        found = describe_weights(self.run, "PATH", ema=ema)
        layout = self._layout(found.job)
        check_tasks(found.model, layout, tasks)
        requests = TaskRequests(tasks, RequestEncoder(found.tokenizer, found.model.sequence))
        asked = EvaluationRequest.of(self.run, "PATH", found, requests, layout, batch_tokens, ema=ema)
        result = EvaluationResult.parse(run_ranks_here(MODULE, layout.world, asked.encode(), show))
        return result.where, requests.scores(result.scores, result.texts)

    def _layout(self, job: "Job | None") -> "Layout":
        from myriad.job.scoring_layout import scoring_layout
        from myriad.launchers.local import check_cores

        if self.own_layout and job is None:
            allowed = (
                "a run or one of its checkpoints; name the layout of a Hugging Face folder by --layout keys"
            )
            raise BadInputError("--own-layout", self.run, allowed)
        own = job.layout if self.own_layout and job is not None else None
        layout = scoring_layout(self.overrides, own)
        check_cores(layout.world, oversubscribe=self.oversubscribe)
        return layout


def _record(found: "TaskScores") -> dict[str, Any]:
    scores = {name: score._asdict() for name, score in found.scores.items()}
    return {
        "task": found.task,
        "request_type": found.request_type,
        "documents": found.num_documents,
        "scores": scores,
    }


def _show_table(where: str, results: "list[TaskScores]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(where, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("task", "score"):
        table.add_column(name)
    for name in ("value", "standard error", "documents"):
        table.add_column(name, justify="right")
    for found in results:
        for name, score in found.scores.items():
            error = "" if score.standard_error is None else f"± {format_number(score.standard_error, 3)}"
            value = format_number(score.value, 4)
            table.add_row(escape(found.task), name, value, error, f"{found.num_documents:,}")
    console.print(table, highlight=False)
