"""Counts what a step starts on the fake device and the bytes that it moves, and notes where the host would
wait for a number of it.

A mode above FakeTensorMode: it sees every operator with the very tensors, also those of the backward, and
answers for a number that the host asks for, which a FakeTensor does not have.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fake_device import note_wait
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
_MEMORY = {"alias", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"} | {
    "_unsafe_view",
    "record_stream",
    "resize_",
    "set_",
}
"""Make, free or name memory, and start no kernel."""
_OVERWRITES = {"copy_", "fill_", "zero_"}
_pinned: list[torch.UntypedStorage] = []
"""Storages in pinned host memory."""
"""Read nothing of what they write to."""


class LaunchCounter(TorchDispatchMode):
    """Operators on CUDA tensors by name, views and allocations left out; kernels of Triton add theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        """Bytes of what kernels read and write, each of them once: no cache, nothing read twice."""
        self.watched: set[int] = set()
        """Storages (``_cdata``) whose traffic counts."""
        self.traffic: Counter[str] = Counter()
        """Bytes read and written of them, by operator; of Triton's kernels none."""

    def clear(self) -> None:
        """Forget what was counted."""
        for counter in (self.launches, self.moved, self.traffic):
            counter.clear()

    def note(self, name: str, tensors: Iterable[Any]) -> None:
        """A kernel was started that reads or writes each of ``tensors``; one that is given twice counts
        once."""
        self.launches[name] += 1
        found = {id(one): one for one in tensors if _on_cuda(one)}
        self.moved[name] += sum(map(_bytes, found.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (answer := _answer(func, args)) is not None:
            return answer
        _note_copy(func, args, kwargs)
        if func is _ATEN._pin_memory.default:
            pinned = args[0].clone()
            _pinned.append(pinned.untyped_storage())
            return pinned
        out = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            _pinned.append(out.untyped_storage())
        if not _is_free(func) and any(map(_on_cuda, tree_leaves((args, kwargs, out)))):
            self.launches[str(func)] += 1
            self._note_traffic(func, args, kwargs)
            given = set(map(id, tree_leaves((args, kwargs))))
            made = [one for one in tree_leaves(out) if _on_cuda(one) and id(one) not in given]
            self.moved[str(func)] += sum(map(_bytes, made))
        return out

    def _note_traffic(self, func: Any, args: Any, kwargs: Any) -> None:
        named = zip(func._schema.arguments, args, strict=False)
        given = [*named, *((one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs)]
        beta = next((value for one, value in given if one.name == "beta"), 1)
        for one, value in given:
            writes = one.alias_info is not None and one.alias_info.is_write
            is_sum = one.name == "self" and func._schema.name.removeprefix("aten::") not in _OVERWRITES
            reads = beta != 0 if one.name == "self" and "addmm" in func._schema.name else not writes or is_sum
            for x in tree_leaves(value):
                if not _on_cuda(x):
                    continue
                moved = _bytes(x) * (int(reads) + int(writes))
                self.moved[str(func)] += moved
                if x.untyped_storage()._cdata in self.watched:
                    self.traffic[str(func)] += moved


@contextmanager
def lists_in_one_copy() -> Iterator[None]:
    """`Tensor.tolist` waits once inside, however many numbers it reads."""

    def tolist(self: FakeTensor) -> Any:
        if _on_cuda(self):
            note_wait("tolist")
        return _ones(self.shape, self.dtype)

    with mock.patch.object(FakeTensor, "tolist", tolist):
        yield


def _ones(shape: torch.Size, dtype: torch.dtype) -> Any:
    return [_ones(shape[1:], dtype) for _ in range(shape[0])] if shape else _one(dtype)


def _one(dtype: torch.dtype) -> float | bool | int:
    return 1.0 if dtype.is_floating_point else False if dtype is torch.bool else 1


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _on_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _answer(func: Any, args: Any) -> Any:
    """What the host is told where it asks for a number; None: it does not."""
    if func is _ATEN._local_scalar_dense.default:
        answer: Any = _one(args[0].dtype)
    elif func in (_ATEN.is_nonzero.default, _ATEN.equal.default):
        answer = True
    else:
        return None
    if _on_cuda(args[0]):
        note_wait(func._schema.name.removeprefix("aten::"))
    return answer


def _note_copy(func: Any, args: Any, kwargs: Any) -> None:
    """A copy between the host and the device waits, unless it is asked not to and the memory is pinned."""
    if func is _ATEN._to_copy.default:
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        is_async = kwargs.get("non_blocking", False)
    elif func is _ATEN.copy_.default:
        source, target = args[1], args[0].device
        is_async = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    elif func is _ATEN.nonzero.default and _on_cuda(args[0]):
        return note_wait("nonzero")
    else:
        return None
    if source.device.type == "cpu":
        is_async = is_async and any(source.untyped_storage() is one for one in _pinned)
    if source.device.type != target.type and not is_async:
        note_wait(f"copy to {target.type}")
    return None


def _is_free(func: Any) -> bool:
    """No kernel: a view, or memory alone."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace == "prim" or (namespace == "aten" and name in _MEMORY):
        return True
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
