"""The ``[telemetry]`` section of a job. This module does not import torch."""

import importlib.util
from collections.abc import Sequence
from typing import Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field

from myriad.config import Config, Size
from myriad.errors import BadInputError

__all__ = ["LoggerName", "TelemetryConfig", "check_loggers", "is_address"]

LoggerName = Literal["tensorboard", "wandb", "mlflow"]
"""Experiment trackers that can receive a run's metrics. Each name is also the name of the tracker's
package."""


def check_loggers(names: Sequence[str], key: str = "telemetry.loggers") -> None:
    """Raise ``BadInputError`` for a tracker that does not exist, or whose package is not installed. ``key``:
    how the error names the setting."""
    known = get_args(LoggerName)
    for name in names:
        if name not in known:
            raise BadInputError(key, name, f"must be one of {', '.join(known)}")
        if importlib.util.find_spec(name) is None:
            allowed = f"needs the package {name} (pip install 'myriad-train[{name}]')"
            raise BadInputError(key, list(names), allowed)


class TelemetryConfig(Config):
    """Spans and metrics: what ranks record, and where it goes. Training never waits for it."""

    spans: bool = True
    """Record the spans of every rank under RUN/spans."""
    file_seconds: float = Field(5.0, ge=1, le=3600)
    """Seconds of spans per file of a node. Readers of the run folder lag by at most this."""
    keep: Size | None = Field(4 * 2**30, ge=1)
    """Bytes of span files to keep per node; the oldest are deleted first. off: keep all."""
    collector: str | None = None
    """Additional receiver of spans: https://HOST:PORT of a `myriad watch` on another machine, or http:// if
    it has no TLS. off: none."""
    collector_ca: str | None = None
    """Certificates to accept from the collector: a file (PEM) on each node, or sha256:FINGERPRINT as `myriad
    watch` prints it. MYRIAD_COLLECTOR_CA has precedence. off: those of the system, and on the collector's own
    machine the one that `myriad watch` made."""
    noise_scale: bool = False
    """Estimate the gradient noise scale of each step, in tokens: the batch up to which a larger one trains in
    proportionally fewer steps (McCandlish et al. 2018). The small batches are those of the replicas, or
    micro-batches with layout.dp = 1. Gradients of experts do not count. Needs layout.reduce = last."""
    noise_scale_decay: float = Field(0.99, ge=0, lt=1)
    """Decay of the running averages of which telemetry.noise_scale is the ratio."""
    layer_norms_every: int = Field(0, ge=0)
    """Steps between norms of the gradient, the parameters and their change in each layer. On these steps the
    host waits once more for the device, and one chunk's parameters are copied at a time. 0: never."""
    expert_loads_every: int = Field(50, ge=0)
    """Steps between loads of all experts in metrics.jsonl, which the page draws (with model.experts); also
    those of the first step. 0: never."""
    routing: bool = False
    """Write the chosen experts of every token of each step to RUN/routing (with model.experts), for
    train.replay_routing and `myriad parity`. For short runs: two bytes for each token, block and expert."""
    loggers: tuple[LoggerName, ...] = ()
    """Experiment trackers that receive the job, each step's metrics, the summary at the end and the paths of
    artifacts: tensorboard (RUN/tensorboard), wandb (RUN/wandb without an API key), mlflow (RUN/mlflow.db
    without MLFLOW_TRACKING_URI). Each runs in its own process beside the launcher."""


def is_address(text: str) -> bool:
    """Whether the text is the HTTP address of a collector."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return False
    return bool(known) and not (parts.query or parts.fragment or "@" in parts.netloc)
