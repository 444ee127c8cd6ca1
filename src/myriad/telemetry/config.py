"""What a run records of where its time goes, and whom it tells. No torch here."""

from urllib.parse import urlsplit

from pydantic import Field

from myriad.config import Config, Size
from myriad.telemetry.logger_names import LoggerName

__all__ = ["TelemetryConfig", "is_address"]


class TelemetryConfig(Config):
    """What ranks record of themselves, and where it goes; training never waits for it."""

    spans: bool = True
    """Whether what each rank did when is kept, under RUN/spans."""
    file_seconds: float = Field(5.0, ge=1, le=3600)
    """Seconds that one file of a node spans: what a reader of the run folder is behind, at most."""
    keep: Size | None = Field(4 * 2**30, ge=1)
    """Files of spans of each node, in bytes: beyond it the oldest are removed; off: none are."""
    collector: str | None = None
    """Where else spans go: http://HOST:PORT of a `myriad watch` on another machine; off: nowhere."""
    loggers: tuple[LoggerName, ...] = ()
    """Other programs that get each step's metrics: tensorboard (RUN/tensorboard), wandb (RUN/wandb where it
    has no key), mlflow (RUN/mlflow.db where MLFLOW_TRACKING_URI is not set); each in a process beside the
    launcher."""


def is_address(text: str) -> bool:
    """Whether a collector can be there."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return bool(known) and not (parts.query or parts.fragment or "@" in parts.netloc)
