"""A stage's forward and backward captured as CUDA graphs, and replayed for every micro-batch.

On a GPU with little work per operator, the GPU waits for Python, which needs some microseconds to launch one.
A captured graph launches all operators of a stage at once. Its content is fixed: the operators, the addresses
they read and write, and the numbers that Python passed. So each stage has one slot per micro-batch in flight,
and each slot has its own captures:

    slot 0   F m0 ........... B m0   F m3 ........... B m3
    slot 1        F m1 ........... B m1   F m4 ...
    slot 2             F m2 ........... B m2

Replays are correct as long as

    addresses stay      parameters and the gradient buffer have fixed addresses (`myriad.parallel.chunk`);
                        the input of a slot is copied to where its captures read, and the gradient that leaves
                        it is copied out, because its receiver may use it after the slot is reused
    order stays         captures that share a memory pool are replayed in the order of their capture: one may
                        reuse memory that another has freed. A slot replays forward, backward, forward, ...,
                        so each slot has its own pool. If each micro-batch's backward follows its forward
                        (`comes_in_turn`), all stages share one slot and one pool, and copy nothing
    Python is constant  Python decides nothing that differs between micro-batches: dropout is a hash of
                        sample and position, and no operator reads a number back from the device
    peers agree         tensor-parallel ranks capture the same collectives in the same order, and each is
                        waited for in the stage that issued it. NCCL supports this: its stream joins the
                        capture through the events that synchronize it with the compute stream

Messages between pipeline ranks are not captured: a graph's replay order would delay them, and the proof that
a program is deadlock-free covers the program's order only. Captures are made before the first step, with no
message in flight, because the start of a capture waits for the device. Everything between the compute actions
(gathers, reductions, messages, the step) runs eagerly. Spans inside a capture are not recorded: an event in a
graph has no time. How PyTorch captures: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from myriad.errors import BadInputError
from myriad.kernels.constant_tensors import constants_kept_in
from myriad.model.definition import Context
from myriad.parallel.compute import Backward, EagerCompute, WeightPart
from myriad.program.in_flight import InFlight

__all__ = ["CapturedCompute", "Capturer", "CudaGraphs"]


class Capturer(Protocol):
    """Captures and replays the work of a device."""

    def warming(self) -> AbstractContextManager[None]:
        """Return a context for one eager run of the same work before the capture, so that compilation and
        other first-run work happens there."""
        ...

    def capture(self, work: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        """Capture the operators that ``work`` launches, without running them, and return a function that
        replays them. The memory comes from ``pool``, which captures with the same key share."""
        ...


_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
"""With 0, a communicator must not be used both in a captured graph and outside, as tensor parallelism
does."""
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class CudaGraphs:
    """Captures as CUDA graphs on one GPU."""

    def __init__(self, device: torch.device, tp: int) -> None:
        """``tp``: number of tensor-parallel ranks, whose collectives are captured. Raises `BadInputError` if
        an environment variable makes a wait for them block the host, or forbids their communicator
        elsewhere."""
        for name in _BLOCKING if tp > 1 else ():
            if (value := os.environ.get(name, "0")) not in ("", "0"):
                allowed = "unset for train.cuda_graphs with layout.tp > 1: the host cannot wait in a capture"
                raise BadInputError(name, value, allowed)
        if tp > 1 and os.environ.get(_MIXING) == "0":
            allowed = (
                "unset, or 1, for train.cuda_graphs with layout.tp > 1: some collectives are not captured"
            )
            raise BadInputError(_MIXING, "0", allowed)
        self._stream = torch.cuda.Stream(device)
        self._pools: defaultdict[Hashable, Any] = defaultdict(torch.cuda.graph_pool_handle)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Return a context that runs on the capture stream. Autograd nodes of parameters remember the stream
        on which they were created, and a node of an uncaptured stream must not enter a capture
        (https://github.com/pytorch/pytorch/pull/180090)."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def capture(self, work: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        """Capture ``work`` in the thread-local mode, which restricts this thread only. NCCL's watchdog may
        query events of earlier collectives meanwhile (https://github.com/pytorch/pytorch/pull/104555); it
        never queries those of captured ones (https://github.com/pytorch/pytorch/pull/103503)."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pools[pool], self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass(eq=False)
class _Slot:
    """The captures of one stage for one micro-batch in flight, and the memory that they read and write. A
    slot is also the `myriad.parallel.compute.Backward` of the micro-batch that it holds."""

    owner: "CapturedCompute"
    stage: int
    pool: Hashable
    context: Context | None = None
    entering: torch.Tensor | None = None
    output: torch.Tensor | None = None
    start: Callable[[], None] | None = None
    backward: Backward | None = None
    """Autograd's graph until the backward is captured. Afterwards the captures own the memory that the graph
    held."""
    gradient: torch.Tensor | None = None
    entering_gradient: torch.Tensor | None = None
    parts: list[Callable[[], None]] = field(default_factory=list)
    """The captures of the backward: one for the whole, or one for the input's and one for the weights'
    part."""

    @property
    def keeps_output(self) -> bool:
        return self.output is not None

    def whole(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.owner.fill_gradient(self, gradient)
        for start in self.parts:
            start()
        return self.owner.ended(self)

    def in_parts(self, gradient: torch.Tensor) -> tuple[torch.Tensor | None, WeightPart]:
        self.owner.fill_gradient(self, gradient)
        start, start_weights = self.parts
        start()

        def weight_part() -> None:
            start_weights()
            self.owner.release(self)

        return self.owner.leaving(self), weight_part


class CapturedCompute:
    """`myriad.parallel.compute.StageCompute` that capture each action when it first runs.

    An output is valid until the backward of its micro-batch has ended; a gradient is valid as long as it is
    referenced. If micro-batches are computed one after the other, both are valid until the stage's next ones.
    """

    def __init__(
        self,
        eager: EagerCompute,
        capturer: Capturer,
        in_flight: InFlight,
        silent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``silent``: a context for each capture, in which no span is recorded."""
        self._eager, self._capturer, self._silent = eager, capturer, silent
        self._in_turn, self._ends_next = in_flight.in_turn, in_flight.ends_next
        self._splits = in_flight.splits
        self._first = min(in_flight.slots)
        self._slots = {
            stage: [
                _Slot(self, stage, None if self._in_turn else (stage, index))
                for index in reversed(range(most))
            ]
            for stage, most in in_flight.slots.items()
        }
        self._free = {stage: list(slots) for stage, slots in self._slots.items()}
        self._constants: list[Any] = []
        """Cached tensors that replays read."""

    @property
    def num_slots(self) -> int:
        """The largest number of slots of a stage."""
        return max(map(len, self._slots.values()))

    def only(self, index: int) -> None:
        """Restrict every stage to the slot of this number, or to its last slot if it has fewer."""
        for stage, slots in self._slots.items():
            self._free[stage] = [slots[max(0, len(slots) - 1 - index)]]

    def all_slots(self) -> None:
        """Let every stage use all its slots again."""
        self._free = {stage: list(slots) for stage, slots in self._slots.items()}

    def forward(
        self, stage: int, entering: torch.Tensor, context: Context, *, backward_is_next: bool
    ) -> tuple[torch.Tensor, Backward]:
        """Replay the captured forward; capture it first if needed. The arguments and the result are those of
        `EagerCompute.forward`."""
        assert self._free[stage], "more micro-batches in flight than the program has"
        slot = self._free[stage].pop()
        if slot.start is None:
            self._capture_forward(slot, entering, context)
        elif not self._in_turn or stage == self._first:
            assert slot.context is not None
            _fill(slot.context.targets, context.targets)
            _fill(slot.context.samples, context.samples)
        _fill(slot.entering, entering)
        assert slot.start is not None and slot.output is not None
        slot.start()
        return slot.output, slot

    def _capture_forward(self, slot: _Slot, entering: torch.Tensor, context: Context) -> None:
        slot.context = own_context = self._own_context(slot, context)
        slot.entering = own = self._own_entering(slot, entering)
        made: list[tuple[torch.Tensor, Backward]] = []

        def work() -> None:
            ends = slot.stage in self._ends_next
            made.append(
                self._eager.forward(
                    slot.stage, own, own_context, backward_is_next=ends, keeps_generators=False
                )
            )

        slot.start = self._capture(work, slot.pool)
        ((output, slot.backward),) = made
        slot.output = output.detach()

    def _own_context(self, slot: _Slot, context: Context) -> Context:
        """Return the slot's own copy of the context. If micro-batches are computed one after the other, all
        stages share the copy of the first stage."""
        if self._in_turn and slot.stage != self._first:
            (first,) = self._slots[self._first]
            assert first.context is not None
            return first.context
        targets, samples = context.targets, context.samples
        assert targets is not None and samples is not None
        return replace(context, targets=targets.clone(), samples=samples.clone())

    def _own_entering(self, slot: _Slot, entering: torch.Tensor) -> torch.Tensor:
        """Return the tensor from which the slot's forward reads its input: a copy, unless the stage before on
        this rank always writes its output to the same address."""
        if self._in_turn and slot.stage - 1 in self._slots:
            return entering
        return entering.detach().clone().requires_grad_(entering.requires_grad)

    def _capture(self, work: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        with self._silent(), constants_kept_in(self._constants):
            return self._capturer.capture(work, pool)

    def fill_gradient(self, slot: _Slot, gradient: torch.Tensor) -> None:
        """Write the gradient of the output to where the slot's captures read it. Capture the backward first
        if needed: in parts where the program splits some backwards."""
        if not slot.parts:
            from_here = self._in_turn and slot.stage + 1 in self._slots
            slot.gradient = gradient if from_here else gradient.clone()
            self._capture_backward(slot, slot.gradient)
        _fill(slot.gradient, gradient)

    def _capture_backward(self, slot: _Slot, gradient: torch.Tensor) -> None:
        backward, slot.backward = slot.backward, None
        assert backward is not None
        weight_parts: list[WeightPart] = []

        def whole() -> None:
            slot.entering_gradient = backward.whole(gradient)

        def input_part() -> None:
            slot.entering_gradient, weights = backward.in_parts(gradient)
            weight_parts.append(weights)

        slot.parts = [self._capture(input_part if self._splits else whole, slot.pool)]
        if self._splits:
            slot.parts.append(self._capture(weight_parts.pop(), slot.pool))

    def leaving(self, slot: _Slot) -> torch.Tensor | None:
        """Return the gradient of the stage's input. It is a copy, because another rank may use it after later
        replays. No copy is needed if the stage before uses it on this rank, one micro-batch at a time."""
        found = slot.entering_gradient
        stays = self._in_turn and slot.stage - 1 in self._slots
        return found if found is None or stays else found.clone()

    def ended(self, slot: _Slot) -> torch.Tensor | None:
        """End the backward: return the gradient as `leaving` does, and free the slot."""
        found = self.leaving(slot)
        self.release(slot)
        return found

    def release(self, slot: _Slot) -> None:
        """Free the slot for another micro-batch."""
        self._free[slot.stage].append(slot)


def _fill(place: torch.Tensor | None, values: torch.Tensor | None) -> None:
    """Write values to where a capture reads them. ``.data`` hides the write from autograd, which would
    otherwise see a change of a saved tensor between the captures of forward and backward."""
    if place is not None and values is not None and place.data_ptr() != values.data_ptr():
        place.data.copy_(values)
