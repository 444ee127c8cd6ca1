"""A capturer that holds a CPU to what CUDA graphs do, and does the worst that they may, for tests.

What work starts is noted (operators of torch's dispatcher, and collectives of `nccl_like`) and taken back; a
replay does what was noted again, by the addresses of then, and nothing else of the work: Python in it is not
run. An operator that gives a number to Python, or takes a tensor from it, is refused, as a capture refuses
it. What a graph would do in silence is an error here:

    memory from before the capture that was freed, or that moved      said by the replay that would use it
    memory of a pool that a capture had not, or gave back             NaN when another capture of the same
                                                                      pool is replayed, which may take it
    a collective that is not waited for in the capture                said by the capture
    collectives in another order than on a peer                       said by the capture, before it hangs

A collective is done where a replay comes to its wait: what was read before has not arrived.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from nccl_like import NcclLike
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

ASKS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
BRINGS = {"aten::lift_fresh"}
COLLECTIVES = (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall_base",
    "all_to_all_single",
)


class StaleMemoryError(RuntimeError):
    """A replay would read or write memory that is no longer what it was."""


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Outside:
    """Memory from before a capture, which a graph knows by its address alone."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)
        self._address, self._size = storage.data_ptr(), storage.nbytes()

    def storage(self) -> torch.UntypedStorage:
        found = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if found is None:
            raise StaleMemoryError("a graph needs memory that was freed")
        if (found.data_ptr(), found.nbytes()) != (self._address, self._size):
            raise StaleMemoryError("a graph needs memory that has moved since its capture")
        return found


class Inside:
    """Memory of a pool: it stays, but it may be another tensor's once its own is gone."""

    def __init__(self, storage: torch.UntypedStorage, capture: int, dtype: torch.dtype) -> None:
        self._storage, self.capture, self._dtype = storage, capture, dtype

    def storage(self) -> torch.UntypedStorage:
        return self._storage

    @property
    def is_held(self) -> bool:
        """Somebody besides the pool has a tensor there."""
        return torch._C._storage_Use_Count(self._storage._cdata) > 1

    def spoil(self) -> None:
        if self._storage.nbytes() == 0:
            return
        whole = torch.empty(0, dtype=self._dtype).set_(self._storage)
        if self._dtype.is_floating_point and self._dtype.itemsize > 1:
            whole.fill_(torch.nan)
        else:
            whole.view(torch.uint8).fill_(0xFF)


@dataclass(frozen=True)
class Place:
    """Of one tensor that a capture saw."""

    memory: Outside | Inside
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    def tensor(self) -> torch.Tensor:
        found = torch.empty(0, dtype=self.dtype).set_(
            self.memory.storage(), self.offset, self.size, self.stride
        )
        found = found.conj() if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found


@dataclass
class Pool:
    """The memory of captures that share it."""

    memories: dict[int, Inside] = field(default_factory=dict)
    num_captures: int = 0


class NotedWork(dist.Work):
    """A collective in a capture."""

    def __init__(self, noting: "Noting", index: int) -> None:
        super().__init__()
        self._noting, self._index = noting, index

    def wait(self, timeout: Any = None) -> bool:
        self._noting.join(self._index)
        return True


class Noting(TorchDispatchMode):
    """Does operators, notes them, and remembers how memory from before them was."""

    now: "Noting | None" = None

    def __init__(self, pools: dict[Hashable, Pool], pool: Hashable) -> None:
        super().__init__()
        self._pools, self._pool, self._number = pools, pools[pool], pools[pool].num_captures
        self._pool.num_captures += 1
        self.notes: list[Callable[[], None]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outside: dict[int, Outside] = {}
        self.posted: list[Callable[[], None]] = []
        self.joined: set[int] = set()
        self._held_at_start = self._held()

    def _held(self) -> set[int]:
        gc.collect()
        return {key for key, memory in self._pool.memories.items() if memory.is_held}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function._schema.name in ASKS | BRINGS:
            raise RuntimeError(f"{function._schema.name}: not permitted when stream is capturing")
        written = list(self._written(function, arguments, named))
        for tensor in written:
            self._remember(tensor)
        places = tree_map_only(torch.Tensor, self._place, (arguments, named))
        given = {key_of(tensor) for tensor in tensors_of((arguments, named))}
        gave = function(*arguments, **named)
        fresh = [tensor for tensor in tensors_of(gave) if key_of(tensor) not in given]
        for tensor in fresh:
            storage = tensor.untyped_storage()
            self._pool.memories[storage._cdata] = Inside(storage, self._number, tensor.dtype)
        if written or fresh:
            self.notes.append(_again(function, places, [self._place(tensor) for tensor in fresh]))
        return gave

    def _place(self, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        key = storage._cdata
        inside = next((one.memories[key] for one in self._pools.values() if key in one.memories), None)
        if inside is None and key not in self._outside:
            self._outside[key] = Outside(storage)
        memory = self._outside[key] if inside is None else inside
        where = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return Place(memory, tensor.dtype, *where, tensor.is_conj(), tensor.is_neg())

    def _remember(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        if key not in self._pool.memories and key not in self.before:
            self.before[key] = tensor, tensor.clone()

    @staticmethod
    def _written(function: Any, arguments: tuple, named: dict) -> Iterator[torch.Tensor]:
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = named.get(argument.name, arguments[index] if index < len(arguments) else None)
                for tensor in tensors_of(value):
                    # all of its storage: the next operator may write to another part of it
                    yield tensor.new_empty(0).set_(tensor.untyped_storage())

    def collective(self, group: NcclLike, name: str, function: Any, arguments: tuple) -> NotedWork:
        """It is done at once, to know what comes of it; a replay does it where it is waited for."""
        with _disable_current_modes():
            for tensor in tensors_of(arguments):
                self._remember(tensor.new_empty(0).set_(tensor.untyped_storage()))
            places = tree_map_only(torch.Tensor, self._place, arguments)
            what = f"{name} {[tuple(tensor.shape) for tensor in tensors_of(arguments)]}"
            with _noting(None):
                everyone: list[Any] = [None] * group.size()
                dist.all_gather_object(everyone, what, group=group)
                if any(other != what for other in everyone):
                    raise RuntimeError(f"ranks capture other collectives, or in another order: {everyone}")
                function(group, *arguments).wait()

            def again() -> None:
                function(group, *tree_map_only(Place, Place.tensor, places)).wait()

        self.posted.append(again)
        return NotedWork(self, len(self.posted) - 1)

    def join(self, index: int) -> None:
        if index not in self.joined:
            self.joined.add(index)
            self.notes.append(self.posted[index])

    def end(self) -> None:
        """The capture is made."""
        if len(self.joined) < len(self.posted):
            raise RuntimeError("a collective is not waited for: capture has unjoined work")
        held = self._held()
        mine = {key for key, memory in self._pool.memories.items() if memory.capture == self._number}
        self._kept = held & (self._held_at_start | mine)
        self._ends = (self._held_at_start | mine) - held

    def take_back(self) -> None:
        for tensor, values in self.before.values():
            tensor.copy_(values)

    def replay(self) -> None:
        memories = self._pool.memories
        for key, memory in memories.items():
            if memory.capture == self._number or key not in self._held_at_start:
                memory.spoil()
        for note in self.notes:
            note()
        for key in self._ends:
            memories[key].spoil()


def _again(function: Any, places: tuple, fresh: list[Place]) -> Callable[[], None]:
    leaves, form = tree_flatten(places)

    def note() -> None:
        values = [leaf.tensor() if isinstance(leaf, Place) else leaf for leaf in leaves]
        arguments, named = tree_unflatten(values, form)
        given = {key_of(value) for value in values if isinstance(value, torch.Tensor)}
        gave = function(*arguments, **named)
        if not fresh:
            return
        again = [t for t in tensors_of(gave) if key_of(t) not in given]
        for place, values in zip(fresh, again, strict=True):
            place.tensor().copy_(values)

    return note


@contextmanager
def _noting(noting: Noting | None) -> Iterator[None]:
    before, Noting.now = Noting.now, noting
    try:
        yield
    finally:
        Noting.now = before


def note_collectives() -> None:
    """Those of `nccl_like` come into captures of this process from now on."""
    for name in COLLECTIVES:
        setattr(NcclLike, name, _noted(name, getattr(NcclLike, name)))
    for name in ("send", "recv"):
        setattr(NcclLike, name, _refused(name, getattr(NcclLike, name)))


def _noted(name: str, function: Any) -> Any:
    @wraps(function)
    def post(group: NcclLike, *arguments: Any) -> Any:
        noting = Noting.now
        if noting is None:
            return function(group, *arguments)
        return noting.collective(group, name, function, arguments)

    return post


def _refused(name: str, function: Any) -> Any:
    @wraps(function)
    def post(group: NcclLike, *arguments: Any) -> Any:
        assert Noting.now is None, f"{name} in a capture"
        return function(group, *arguments)

    return post


class Replaying:
    """`myriad.parallel.cuda_graphs.Capturer`."""

    def __init__(self) -> None:
        self.captured = self.replayed = self.collectives = 0
        self.pools: dict[Hashable, Pool] = defaultdict(Pool)

    @contextmanager
    def warming(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None], pool: Hashable) -> Callable[[], None]:
        noting = Noting(self.pools, pool)
        with noting, _noting(noting):
            work()
        noting.end()
        with torch.no_grad():
            noting.take_back()
        noting.before.clear()
        self.captured += 1
        self.collectives += len(noting.posted)

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                noting.replay()

        return replay
