"""What FakeTensors cannot do, done otherwise: kernels of Triton and attention are counted, indices whose
number depends on data are made on the host, and a world is one rank that talks to nobody.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_device import DEVICE
from launch_counter import LaunchCounter
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from myriad.comm.grid import RankGrid
from myriad.comm.groups import Group, Groups
from myriad.comm.layout import Layout

GPUS_OF_NODE = 8


class FakeGroups(Groups):
    """Groups over a backend that moves nothing and is done at once."""

    def of(self, ranks: tuple[int, ...], purpose: str = "", **options: object) -> Group | None:
        if len(ranks) == 1:
            return None
        if (ranks, purpose) not in self._made:
            members = sorted(ranks)
            group, _ = c10d._new_process_group_helper(
                len(members),
                members.index(self.grid.rank),
                members,
                "fake",
                FakeStore(),
                c10d.GroupName(f"{purpose}:{members}"),
                timeout=c10d.default_pg_timeout,
                group_desc=purpose,
            )
            c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
            self._made[ranks, purpose] = group
        return self._made[ranks, purpose]


@contextmanager
def fake_world(layout: Layout, rank: int) -> Iterator[FakeGroups]:
    """The groups of one rank of a layout, on nodes of eight GPUs."""
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    local = {"LOCAL_RANK": str(rank % GPUS_OF_NODE), "LOCAL_WORLD_SIZE": str(min(layout.world, GPUS_OF_NODE))}
    with mock.patch.dict(os.environ, queues | local):
        if layout.world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        try:
            yield FakeGroups(RankGrid(layout, rank))
        finally:
            if layout.world > 1:
                dist.destroy_process_group()


@contextmanager
def counted_kernels(counter: LaunchCounter) -> Iterator[None]:
    """Triton's kernels and attention are counted instead of run inside."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        name = self.fn.__name__
        sizes = grid if isinstance(grid, tuple | list) else grid(options)
        assert all(isinstance(size, int) for size in sizes), f"{name}: grid of {sizes}"
        wrong = [value.device for value in args if isinstance(value, torch.Tensor) and not value.is_cuda]
        assert not wrong, f"{name}: tensors on {wrong}"
        counter.note(f"triton.{name}", args)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        assert len({x.dtype for x in (q, k, v)}) == 1, [x.dtype for x in (q, k, v)]
        return _Attention.apply(q, k, v, counter)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
    ):
        yield


class _Attention(torch.autograd.Function):
    """In the memory order of the queries, as cuDNN and FlashAttention have it (PyTorch's
    ``alloc_with_matching_layout`` and ``empty_like``)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counter: LaunchCounter
    ) -> torch.Tensor:
        out = _laid_out(q)
        counter.note("attention.forward", (q, k, v, out))
        ctx.like, ctx.counter = (q, k, v), counter
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert gradient.dtype == ctx.like[0].dtype, gradient.dtype
        grads = [*map(_laid_out, ctx.like)]
        out = gradient.detach().new_empty(gradient.shape)
        ctx.counter.note("attention.backward", (*ctx.like, out, gradient, *grads))
        return *grads, None


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@contextmanager
def indices_on_host() -> Iterator[None]:
    """Where the number of indices depends on data they are made without FakeTensors inside."""
    from myriad.kernels.triton import grouped_kernels, optimizer_kernels
    from myriad.optim import parameter_norms
    from myriad.parallel import forward_engine

    with ExitStack() as stack:
        for module, name in (
            (parameter_norms, "_cut"),
            (optimizer_kernels, "cut_blocks"),
            (grouped_kernels, "_table"),
            (forward_engine, "shapes_between_stages"),
        ):
            stack.enter_context(mock.patch.object(module, name, _on_host(getattr(module, name))))
        yield


@contextmanager
def addresses() -> Iterator[None]:
    """FakeTensors have addresses inside: those of one storage lie beside each other as they would."""
    of_host = torch.UntypedStorage.data_ptr
    numbers: dict[int, int] = {}

    def of_storage(self: torch.UntypedStorage) -> int:
        if self.device.type == "cpu":
            return of_host(self)
        return numbers.setdefault(self._cdata, len(numbers) + 1) << 40

    def of_tensor(self: FakeTensor) -> int:
        return of_storage(self.untyped_storage()) + self.storage_offset() * self.element_size()

    with (
        mock.patch.object(torch.UntypedStorage, "data_ptr", of_storage),
        mock.patch.object(FakeTensor, "data_ptr", of_tensor),
    ):
        yield


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(function, "__wrapped__", function)  # a cache would keep tensors of the wrong kind

    def made(*args: Any) -> Any:
        with unset_fake_temporarily(), _disable_current_modes():
            args = tree_map_only(torch.Tensor, _without_memory, args)
            found = function(*(torch.device("cpu") if one == DEVICE else one for one in args))
        return tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device=DEVICE), found)

    return made


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
