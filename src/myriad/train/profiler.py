"""torch's profiler between two steps of a run whose communication goes on meanwhile.

gloo records its operations from threads of its own. Those that are under way when a profile ends are written
into memory that it has given up: the trace is damaged, and minutes later the rank dies by SIGSEGV (seen with
torch 2.13). So only operators and their backwards are recorded, which this thread alone runs; what they were
for, and what a rank waits for, its spans tell, which come into the same file (`myriad.telemetry.span_lane`).
A GPU's own activity is recorded as ever, with the kernels of NCCL.
"""

import time
from pathlib import Path

import torch
from torch._C import _autograd
from torch._C._profiler import ProfilerActivity, RecordScope
from torch.autograd import profiler as autograd_profiler

__all__ = ["OperatorProfile"]

_SCOPES = {RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION}


class OperatorProfile(autograd_profiler.profile):
    """Of the thread that begins and ends it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)

    def begin(self) -> None:
        """The first one of a process loads libraries for a second."""
        self._prepare_trace()
        self._start_trace()

    def _start_trace(self) -> None:
        self.entered = True
        autograd_profiler._run_on_profiler_start()
        _autograd._enable_profiler(self.config(create_trace_id=False), self._activities(), _SCOPES)  # type: ignore[call-arg]
        self.profiling_start_time_ns = time.perf_counter_ns()

    def _activities(self) -> set[ProfilerActivity]:
        found: set[ProfilerActivity] = self.kineto_activities
        return found

    def end(self, path: Path) -> None:
        """Writes what it has recorded, as a Chrome trace."""
        self.__exit__(None, None, None)
        self.export_chrome_trace(str(path))
