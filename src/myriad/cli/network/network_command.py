"""``myriad network``: the effect of a cluster's fabric on a job."""

from types import ModuleType

import typer

from myriad.cli.network import (
    congestion_command,
    ecmp_command,
    flap_command,
    place_command,
    tune_command,
)

__all__ = ["register"]

_VERBS: tuple[ModuleType, ...] = (
    ecmp_command,
    congestion_command,
    flap_command,
    place_command,
    tune_command,
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    text = (
        "Predict the effects of a cluster's network: hash conflicts, congestion, link flaps, placement, "
        "settings."
    )
    verb = typer.Typer(no_args_is_help=True, help=text)
    for each in _VERBS:
        each.register(verb)
    app.add_typer(verb, name="network")
