"""A capturer that holds a CPU to what a CUDA graph does, for tests.

What work starts is noted (each operator of torch's dispatcher, with the very tensors it was given and gave)
and taken back; a replay does the noted operators again, on the same memory, and nothing else of the work:
Python in it is not run. An operator that gives a number to Python, or takes a tensor from it, is refused, as
a capture refuses it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
BRINGS = {"aten::lift_fresh"}


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Noting(TorchDispatchMode):
    """Does operators, notes them, and remembers how memory from before them was."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function._schema.name in ASKS | BRINGS:
            raise RuntimeError(f"{function._schema.name}: not permitted when stream is capturing")
        given = tensors_of((arguments, named))
        for tensor in self._written(function, arguments, named):
            if storage_of(tensor) not in self.made | self.before.keys():
                self.before[storage_of(tensor)] = tensor, tensor.clone()
        gave = function(*arguments, **named)
        places = {storage_of(tensor) for tensor in given}
        fresh = [t for t in tensors_of(gave) if storage_of(t) not in places]
        self.made |= {storage_of(tensor) for tensor in fresh}
        self.notes.append((function, arguments, named, fresh))
        return gave

    @staticmethod
    def _written(function: Any, arguments: tuple, named: dict) -> Iterator[torch.Tensor]:
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = named.get(argument.name, arguments[index] if index < len(arguments) else None)
                for tensor in tensors_of(value):
                    # all of its storage: the next operator may write to another part of it
                    yield tensor.new_empty(0).set_(tensor.untyped_storage())

    def take_back(self) -> None:
        for tensor, values in self.before.values():
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(values)

    def replay(self) -> None:
        """Autograd does not hear of it, as it does not of a graph's writes."""
        for function, arguments, named, fresh in self.notes:
            given = tensors_of((arguments, named))
            places = {storage_of(tensor) for tensor in given}
            with torch.autograd._unsafe_preserve_version_counter((*given, *fresh)):
                again = tensors_of(function(*arguments, **named))
                for place, values in zip(
                    fresh, [t for t in again if storage_of(t) not in places], strict=True
                ):
                    place.copy_(values)


class Replaying:
    """`myriad.parallel.captured.Capturer`."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    @contextmanager
    def warming(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        noting = Noting()
        with noting:
            work()
        with torch.no_grad():
            noting.take_back()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                noting.replay()

        return replay
