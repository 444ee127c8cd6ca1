"""DeepSpeed's ZeRO 3: parameters are gathered module by module, and the host waits for the device.

Source: DeepSpeed v0.4.2, `runtime/zero/stage3.py` and `partition_parameters.py`. Before a module's forward,
and before its backward, a hook

    fetches      each parameter of the module that is not gathered: one all-gather for each parameter, and a
                 `torch.cuda.synchronize` before each; then waits for everything in flight, on every stream
    prefetches   only if no gather is in flight: the next parameters of the recorded order until their
                 elements reach `prefetch_elements`. Each begins with a synchronize, so all but the last have
                 arrived before the module's own compute is launched: one gather overlaps with one module's
                 compute
    releases     after the module, unless it is needed again within `reuse_elements` of parameters

Gradients are reduced parameter by parameter when the next one would overflow a bucket, and the host waits for
the previous reduction. The next fetch also waits for reductions.

    compute   | qkv |      | out |      | up   |        a gather that is longer than the module
    gathers   | out        | up         | down    |     that it overlaps with leaves the device idle

With large parameters the seconds of a step are a sum of max(compute, gather) over modules. A later module's
compute cannot overlap with an earlier module's gather. So a link that is too slow for the narrowest module
stalls every module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Module", "ModuleGathers", "Use", "module_order", "step_seconds"]


@dataclass(frozen=True)
class ModuleGathers:
    """The keys of DeepSpeed's ``zero_optimization`` that decide when it communicates; the defaults are those
    of v0.4.2."""

    prefetch_elements: float = 5e7
    """Value of DeepSpeed's key ``stage3_prefetch_bucket_size``."""
    live_elements: float = 1e9
    """Value of DeepSpeed's key ``stage3_max_live_parameters``: it does not prefetch while more elements are
    live."""
    reuse_elements: float = 1e9
    """Value of DeepSpeed's key ``stage3_max_reuse_distance``."""
    persistent_elements: float = 1e5
    """Value of DeepSpeed's key ``stage3_param_persistence_threshold``: smaller parameters are never
    released."""
    bucket_elements: float = 5e8
    """Value of DeepSpeed's key ``reduce_bucket_size``."""
    gather_passes: float = 3.0
    """Passes over memory for each byte gathered: the buffer is zeroed, and PyTorch copies the list of parts
    out of the one that NCCL writes."""
    reduce_passes: float = 4.0
    """Passes over memory for each byte reduced: divided in place, copied from a list of parts."""


@dataclass(frozen=True)
class Module:
    """A module with a large parameter, including the compute until the next such module."""

    name: str
    elements: float
    """Number of elements of the module's parameters."""
    forward_seconds: float
    backward_seconds: float
    gather_seconds: float
    reduce_seconds: float


@dataclass(frozen=True)
class Use:
    """One visit to a module in a micro-batch."""

    module: int
    is_backward: bool


def module_order(layers: Sequence[range], recompute: bool) -> list[Use]:
    """Return the order of a micro-batch: forward, then layer by layer backward. ``layers``: the modules of
    each layer. With ``recompute``, each layer but the last (the head) repeats its forward before its
    backward."""
    order = [Use(module, False) for layer in layers for module in layer]
    for number, layer in reversed(list(enumerate(layers))):
        if recompute and 0 < number < len(layers) - 1:
            order += [Use(module, False) for module in layer]
        order += [Use(module, True) for module in reversed(layer)]
    return order


def step_seconds(
    modules: Sequence[Module], order: Sequence[Use], keys: ModuleGathers, busy_ratio: float
) -> tuple[float, float]:
    """Return the seconds from the start of a micro-batch to its loss, and from its loss to its reduced
    gradients. ``busy_ratio``: share of overlapped communication time by which compute slows down."""
    run = _Run(modules, order, keys, busy_ratio)
    first_backward = next(at for at, use in enumerate(order) if use.is_backward)
    for at in range(first_backward):
        run.visit(at)
    forward = max(run.host, run.compute)
    for at in range(first_backward, len(order)):
        run.visit(at)
    run.flush()
    return forward, max(run.host, run.compute, run.stream) - forward


class _Run:
    """Three clocks: the host, which launches; compute; and the single stream of a group's collectives."""

    def __init__(
        self, modules: Sequence[Module], order: Sequence[Use], keys: ModuleGathers, busy_ratio: float
    ) -> None:
        self.modules, self.order, self.keys, self.busy_ratio = modules, order, keys, busy_ratio
        self.host = self.compute = self.stream = self.reduced = 0.0
        self.there = {i for i, one in enumerate(modules) if one.elements < keys.persistent_elements}
        self.persistent = frozenset(self.there)
        self.in_flight: set[int] = set()
        self.bucket: list[tuple[int, float]] = []
        self.kept = _kept(modules, order, keys.reuse_elements)

    def visit(self, at: int) -> None:
        """Fetch, prefetch, compute, reduce and release for one visit."""
        use = self.order[at]
        if use.module not in self.there:
            if use.module not in self.in_flight:
                self._gather(use.module)
            self._synchronize()
            self.there |= self.in_flight
            self.in_flight.clear()
        self._prefetch(at)
        module = self.modules[use.module]
        self._compute(module.backward_seconds if use.is_backward else module.forward_seconds)
        if use.is_backward:
            self._add_gradient(use.module)
        if at not in self.kept and use.module not in self.persistent:
            self.there.discard(use.module)

    def flush(self) -> None:
        """Reduce the bucket; the host waits for the previous reduction."""
        self.host = max(self.host, self.reduced)
        for module, ready in self.bucket:
            self.stream = max(self.host, self.stream, ready) + self.modules[module].reduce_seconds
        if self.bucket:
            self.reduced = self.stream
        self.bucket.clear()

    def _synchronize(self) -> None:
        self.host = max(self.host, self.compute, self.stream)

    def _gather(self, module: int) -> None:
        self._synchronize()
        self.stream = self.host + self.modules[module].gather_seconds
        self.in_flight.add(module)

    def _prefetch(self, at: int) -> None:
        live = sum(self.modules[module].elements for module in self.there)
        if self.in_flight or live >= self.keys.live_elements:
            return
        wanted = 0.0
        for use in self.order[at:]:
            if wanted >= self.keys.prefetch_elements:
                return
            if use.module not in self.there and use.module not in self.in_flight:
                self._gather(use.module)
                wanted += self.modules[use.module].elements

    def _compute(self, seconds: float) -> None:
        start = max(self.host, self.compute)
        behind = max(0.0, min(self.stream - start, seconds))
        self.compute = start + seconds + self.busy_ratio * behind

    def _add_gradient(self, module: int) -> None:
        held = sum(self.modules[one].elements for one, _ in self.bucket)
        if self.bucket and held + self.modules[module].elements > self.keys.bucket_elements:
            self.flush()
        self.bucket.append((module, self.compute))


def _kept(modules: Sequence[Module], order: Sequence[Use], reuse_elements: float) -> frozenset[int]:
    """Return the visits after which a module keeps its parameters, because few parameters are used until its
    next visit."""
    visits: dict[int, list[int]] = {}
    for at, use in enumerate(order):
        visits.setdefault(use.module, []).append(at)
    before = [0.0]
    for use in order:
        before.append(before[-1] + modules[use.module].elements)
    pairs = (pair for found in visits.values() for pair in pairwise(found))
    return frozenset(at for at, again in pairs if before[again] - before[at + 1] < reuse_elements)
