"""What ranks of a node record of their time, on its way from their rings to whoever reads it.

    ranks ──► rings ──► Shipper (a thread) ──► RUN/spans, and the job's collector

Whatever happens here, the executor goes on. Times are told by the driver's clock.
"""

import logging
import tomllib

from myriad.run import Run
from myriad.telemetry.clock import ClockOffset
from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.ring import SpanRings
from myriad.telemetry.shipper import Shipper, open_outlets

__all__ = ["NodeSpans"]

_LOG = logging.getLogger(__name__)


class NodeSpans:
    """Of one node."""

    def __init__(self, run: Run, node: int, rings: SpanRings, clock: ClockOffset) -> None:
        """``clock``: the driver's."""
        self._run, self._node, self._rings, self._clock = run, node, rings, clock
        self._shipper: Shipper | None = None
        self._begun = False

    def begin(self, num_ranks: int) -> None:
        """So many are about to start; what those before them did last is kept."""
        if not self._begun:
            self._begun, self._shipper = True, self._start()
        if self._shipper is not None:
            self._shipper.begin(num_ranks)
        else:
            for row in range(num_ranks):
                self._rings.clear(row)

    def _start(self) -> Shipper | None:
        place, run = f"node-{self._node}", self._run
        try:
            how = self._how()
            if not how.spans:
                return None
            outlets = open_outlets(run.spans_path, place, run.path.name, how, self._tell)
            return Shipper(self._rings, self._node, outlets, self._clock.at)
        except RuntimeError as error:  # no thread can be started
            _LOG.warning("spans are not kept: %s", error)
            return None

    def address(self, row: int) -> str:
        """Where a rank writes."""
        return self._rings.address(row)

    def close(self) -> None:
        """What is there is written."""
        if self._shipper is not None:
            self._shipper.close()

    def _how(self) -> TelemetryConfig:
        """As the job says. It was checked when the run began; here nothing else of it matters."""
        try:
            tree = tomllib.loads(self._run.job_path.read_text())
            return TelemetryConfig.model_validate(tree.get("telemetry", {}))
        except (OSError, ValueError) as error:
            _LOG.warning("how spans are kept is not known, so it is as by default: %s", error)
            return TelemetryConfig()

    def _tell(self, place: str, problem: str, num_dropped: int) -> None:
        told = problem or "works again"
        _LOG.warning("spans to %s: %s; %d spans are lost", place, told, num_dropped)
        self._run.append_event(
            "telemetry", node=self._node, place=place, problem=problem, num_dropped=num_dropped
        )
