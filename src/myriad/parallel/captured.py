"""A stage's forward and backward captured once each, as CUDA graphs, and replayed for every micro-batch.

A GPU that computes little for each operator waits for Python, which needs some microseconds to start one. A
captured graph starts all operators of a stage at once. What it does is fixed: the operators and the addresses
they read and write. So it is right as long as

    addresses stay      parameters and gradient sums lie in flat buffers that stay (ZeRO 0 and 1); what enters
                        is copied to where the capture found it
    order stays         all captures share a pool of memory: what one gives back another may take. So they are
                        replayed in the order in which they were captured: micro-batch by micro-batch, all
                        forwards and then all backwards, nothing else in flight (`comes_in_turn`)
    Python decides      nothing from one micro-batch to the next: dropout is a hash of sample and place, and
                        no operator asks the device for a number

Everything between the computes (gathers, reductions, messages, the step) is done as ever. How PyTorch
captures: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Protocol

import torch

from myriad.model.definition import Context
from myriad.parallel.compute import Backward, Eager
from myriad.program.actions import COMPUTE, Action, Kind

__all__ = ["Captured", "Capturer", "CudaGraphs", "comes_in_turn"]


def comes_in_turn(actions: Iterable[Action]) -> bool:
    """Each micro-batch is computed from its first forward to its last backward, in one piece each, before the
    next one is begun, and all of them alike."""
    computes = [action for action in actions if action.kind in COMPUTE]
    runs = [
        (micro_batch, [(action.kind, action.stage) for action in run])
        for micro_batch, run in groupby(computes, lambda action: action.micro_batch)
    ]
    once = len({micro_batch for micro_batch, _ in runs}) == len(runs)
    whole = all(action.kind in (Kind.FORWARD, Kind.BACKWARD) for action in computes)
    return once and whole and all(steps == runs[0][1] for _, steps in runs)


class Capturer(Protocol):
    """What notes the work of a device."""

    def warming(self) -> AbstractContextManager[None]:
        """Around the same work done once as ever, before: what is compiled or found out at the first time is
        done then."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Notes what ``work`` starts, of which nothing is done yet; gives what does it."""
        ...


class CudaGraphs:
    """Of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """On the stream of the captures: autograd's nodes of parameters remember the stream they were made
        on, and one that is not captured must not come into a capture
        (https://github.com/pytorch/pytorch/pull/180090)."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Only this thread may not do what a capture forbids: NCCL's watchdog asks for its events meanwhile
        (https://github.com/pytorch/pytorch/pull/104555)."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass
class _Stage:
    """Two captures, and the memory where they read and write."""

    entering: torch.Tensor
    output: torch.Tensor
    start: Callable[[], None]
    backward: Backward
    gradient: torch.Tensor | None = None
    entering_gradient: torch.Tensor | None = None
    start_backward: Callable[[], None] | None = None


class Captured:
    """`myriad.parallel.compute.Computes` that capture what they are first asked for. Outputs and gradients
    are good until the same stage's next ones."""

    def __init__(self, eager: Eager, capturer: Capturer) -> None:
        self._eager, self._capturer = eager, capturer
        self._stages: dict[int, _Stage] = {}
        self._context: Context | None = None

    def forward(
        self, stage: int, entering: torch.Tensor, context: Context, *, backward_is_next: bool
    ) -> tuple[torch.Tensor, Backward]:
        """As `Eager` would."""
        if stage == 0:
            self._enter(context)
        if stage not in self._stages:
            # what the stage before made is at the same place each time
            own = entering if stage - 1 in self._stages else entering.clone()
            self._stages[stage] = self._capture_forward(stage, own, backward_is_next=backward_is_next)
        found = self._stages[stage]
        _fill(found.entering, entering)
        found.start()
        return found.output, partial(self._backward, stage)

    def _enter(self, context: Context) -> None:
        """A micro-batch begins."""
        targets, samples = context.targets, context.samples
        assert samples is not None
        if self._context is None:
            self._context = replace(context, targets=targets.clone(), samples=samples.clone())
        _fill(self._context.targets, targets)
        _fill(self._context.samples, samples)

    def _capture_forward(self, stage: int, entering: torch.Tensor, *, backward_is_next: bool) -> _Stage:
        made: list[tuple[torch.Tensor, Backward]] = []
        context = self._context
        assert context is not None

        def work() -> None:
            made.append(self._eager.forward(stage, entering, context, backward_is_next=backward_is_next))

        start = self._capturer.capture(work)
        ((output, backward),) = made
        return _Stage(entering, output.detach(), start, backward)

    def _backward(self, stage: int, gradient: torch.Tensor) -> torch.Tensor | None:
        found = self._stages[stage]
        if found.start_backward is None:
            found.gradient = gradient if stage + 1 in self._stages else gradient.clone()
            self._capture_backward(found, found.gradient)
        assert found.start_backward is not None
        _fill(found.gradient, gradient)
        found.start_backward()
        return found.entering_gradient

    def _capture_backward(self, found: _Stage, gradient: torch.Tensor) -> None:
        """Autograd's graph is given up with it: what it held is the captures' alone."""
        backward = found.backward

        def work() -> None:
            found.entering_gradient = backward(gradient)

        found.start_backward = self._capturer.capture(work)
        found.backward = _spent


def _spent(gradient: torch.Tensor) -> torch.Tensor | None:
    raise AssertionError("a backward is captured once")


def _fill(place: torch.Tensor | None, values: torch.Tensor | None) -> None:
    """Where a capture reads. ``.data``: between the capture of a forward and that of its backward autograd is
    not to take it for a change of what it keeps."""
    if place is not None and values is not None and place.data_ptr() != values.data_ptr():
        place.data.copy_(values)
