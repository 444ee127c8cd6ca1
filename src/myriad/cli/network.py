"""``myriad network``: what a cluster's fabric does to a job."""

from types import ModuleType

import typer

from myriad.cli import network_congestion, network_ecmp, network_flap, network_place, network_tune

__all__ = ["register"]

_VERBS: tuple[ModuleType, ...] = (
    network_ecmp,
    network_congestion,
    network_flap,
    network_place,
    network_tune,
)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    text = "A cluster's fabric: hash conflicts, congestion control, link flaps, placement, settings."
    verb = typer.Typer(no_args_is_help=True, help=text)
    for each in _VERBS:
        each.register(verb)
    app.add_typer(verb, name="network")
