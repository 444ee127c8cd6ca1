"""``myriad alerts``: send a test alarm to every place of a job, and show what a run has sent."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.cli.shared_options import AsJson, RunName
from myriad.errors import BadInputError, RunFailedError
from myriad.run import existing_run

if TYPE_CHECKING:
    from myriad.alerts.config import AlertsConfig
    from myriad.alerts.senders import Sender

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb `alerts` to the command line."""
    verb = typer.Typer(
        no_args_is_help=True, help="Test the alarm receivers of a job, or show the alarms of a run."
    )
    verb.command("test", cls=OverrideCommand)(_test)
    verb.command("show")(_show)
    app.add_typer(verb, name="alerts")


def _test(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="Job file, recipe, or run."),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Test only this receiver: webhook, slack, feishu, mail or exec. Default: all.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a test alarm and its end to each receiver of the job.

    Each receiver is tried once, whatever its level; nothing is written and no run is needed. Job keys may
    follow, as for `myriad train`: --alerts.slack.url env:SLACK_WEBHOOK.

    Exit code: 0 every receiver accepted it, 1 a receiver did not, 2 bad input.
    """
    from myriad.alerts.config import check_alert_places
    from myriad.alerts.senders import senders_of

    name, alerts = _alerts_of(job, OverrideCommand.of(context))
    check_alert_places(alerts)
    senders = senders_of(alerts)
    if not senders:
        allowed = (
            "names no place: set alerts.webhook.url, .slack.url, .feishu.url, .mail.server or .exec.command"
        )
        raise BadInputError("alerts", job, allowed)
    chosen = [one for one in senders if to in (None, one.name)]
    if not chosen:
        raise BadInputError(
            "--to", to, f"one of this job's destinations: {', '.join(one.name for one in senders)}"
        )
    problems = {one.name: _send(one, name, alerts) for one in chosen}
    _print_problems(problems, as_json)
    if failed := [place for place, problem in problems.items() if problem]:
        raise RunFailedError(f"{', '.join(failed)}: the test alarm was not sent")


def _alerts_of(job: str, overrides: list[str]) -> "tuple[str, AlertsConfig]":
    from pathlib import Path

    from myriad.job import load_job

    for path in (Path(job), Path("runs") / job):
        if (path / "job.toml").is_file():
            return path.resolve().name, load_job(str(path / "job.toml"), overrides).alerts
    found = load_job(job, overrides)
    return found.name, found.alerts


def _send(sender: "Sender", name: str, alerts: "AlertsConfig") -> str:
    """Send a test alarm; return the problem, or an empty string."""
    from myriad.alerts.grouping import AlarmGroups
    from myriad.alerts.senders import RefusedMessageError

    groups, now = AlarmGroups(name, alerts.group_seconds, alerts.repeat_seconds), time.time()
    try:
        sender.send(groups.test_message("test", now, sender.level))
        sender.send(groups.test_message("resolved", now, sender.level))
    except (OSError, RefusedMessageError) as error:
        return str(error)
    return ""


def _print_problems(problems: dict[str, str], as_json: bool) -> None:
    from myriad.cli.json_output import print_json

    if as_json:
        print_json({"places": [{"place": one, "problem": text or None} for one, text in problems.items()]})
        return
    for place, problem in problems.items():
        typer.echo(f"{place}: {problem or 'sent'}")


def _show(
    run: RunName,
    as_json: AsJson = False,
) -> None:
    """Show the alarms of a run: which are open, and what each receiver got or still has to get.

    Exit code: 0 done, 2 bad input.
    """
    from myriad.cli.json_output import print_json
    from myriad.system.whole_file import read_json

    path = existing_run(run)
    try:
        state: Any = read_json(path / "alerts" / "state.json")
    except (OSError, ValueError) as error:
        raise BadInputError("run", run, f"alerts/state.json cannot be read: {error}") from None
    shown = _state(state if isinstance(state, dict) else {})
    if as_json:
        print_json(shown)
        return
    if not shown["places"]:
        typer.echo("no alarm of this run was sent: the job names no place, or nothing has happened yet")
    for one in shown["open"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["since"]))
        typer.echo(f"open since {at}: {one['cause']} ({one['level']}, {one['events']} events)")
    for one in shown["places"]:
        problem = f"; {one['problem']}" if one["problem"] else ""
        typer.echo(f"{one['place']}: {one['sent']} sent, {one['waiting']} waiting{problem}")


def _state(found: dict[str, Any]) -> dict[str, Any]:
    """Return the valid contents of the file."""
    places, opened = found.get("places"), found.get("open")
    keys = ("cause", "level", "since", "events")
    return {
        "open": [
            {key: one[key] for key in keys}
            for one in (opened if isinstance(opened, list) else [])
            if isinstance(one, dict) and set(keys) <= one.keys() and isinstance(one["since"], int | float)
        ],
        "places": [
            {
                "place": name,
                "sent": one.get("sent", 0),
                "waiting": len(one.get("queue", [])) + sum(one.get("held", {}).values()),
                "problem": one.get("problem") or "",
            }
            for name, one in (places if isinstance(places, dict) else {}).items()
            if isinstance(one, dict)
        ],
    }
