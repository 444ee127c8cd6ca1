"""Sliced products on GPUs, with the fused operators of PyTorch's symmetric memory.

    torch.ops.symm_mem.fused_all_gather_matmul      each rank copies its peers' shares and multiplies each
    torch.ops.symm_mem.fused_matmul_reduce_scatter  each rank makes a peer's share and writes it there

Both operators cut by rank: a slice is one rank's share (torch/distributed/_symmetric_memory, PyTorch 2.11 to
2.13; Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023). They
access the peers' memory directly, so all tensor-parallel ranks must be in one node, with peer access between
all its GPUs.

Not run on GPUs yet: the tests run this module on CPUs with PyTorch's own fallbacks of the two operators.

Legend: T tokens, R tokens of one rank, K and N lengths of a matrix.
"""

import os
from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from myriad.parallel.tp_async import Peers

__all__ = ["SymmetricSliceTransport", "lacks_symmetric_memory"]

_OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def lacks_symmetric_memory(device: torch.device, dtype: torch.dtype, ranks: int) -> str:
    """Return why sliced products cannot run among ``ranks`` tensor-parallel ranks on GPUs; empty if they
    can."""
    try:
        import torch.distributed._symmetric_memory  # defines the operators
    except ImportError:
        return f"PyTorch {torch.__version__} has no symmetric memory"
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        return f"PyTorch {torch.__version__} has no symm_mem.{missing[0]}"
    if dtype not in _TYPES:
        return f"the fused operators take float32, bfloat16 and float16, not {str(dtype)[6:]}"
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    if of_node % ranks:
        return f"layout.tp = {ranks} ranks are not within a node of {of_node}"
    return _lacks_access(device, ranks, of_node) or _lacks_allocation(device)


def _lacks_access(device: torch.device, ranks: int, of_node: int) -> str:
    """Return which peer access is missing between the consecutive GPUs of this rank's peers; empty if none.
    The process must see all GPUs of the node: PyTorch identifies the GPUs of peers by number, so ranks that
    each see only their own GPU would all appear as the same one."""
    if device.type != "cuda" or device.index is None:
        return "no CUDA device"
    visible = torch.cuda.device_count()
    if visible < of_node:
        return f"each rank sees {visible} of the GPUs of a node's {of_node} ranks (CUDA_VISIBLE_DEVICES)"
    first = device.index // ranks * ranks
    for one, other in permutations(range(first, min(first + ranks, visible)), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"GPU {one} has no access to the memory of GPU {other}"
    return ""


def _lacks_allocation(device: torch.device) -> str:
    """Return why this rank's driver cannot allocate memory that peers can map; empty if it can. Each rank
    checks this alone, before ranks wait for each other in an operator that one of them cannot start."""
    import torch.distributed._symmetric_memory as symmetric_memory

    try:
        symmetric_memory.empty(1, dtype=torch.float32, device=device)
    except RuntimeError as error:
        return f"no symmetric memory: {error}".partition("\n")[0]
    return ""


class SymmetricSliceTransport:
    """A `myriad.parallel.sliced_products.SliceTransport` for ranks whose GPUs access each other's memory."""

    def __init__(self, peers: Peers) -> None:
        assert peers.group is not None, "one rank has nothing to gather"
        self._name = peers.group.group_name

    def gather_products(
        self,
        rows: torch.Tensor,
        matrices: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        meanwhile: Callable[[], None],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
            rows.contiguous(), list(matrices), 0, self._name
        )
        meanwhile()
        pairs = zip(outputs, biases, strict=True)
        return gathered, [output if bias is None else output.add_(bias) for output, bias in pairs]

    def scatter_products(
        self, products: Sequence[tuple[torch.Tensor, torch.Tensor]], meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        rows, matrix = products[0]
        if len(products) > 1:  # the operator takes one product: concatenate along K to make them one
            rows = torch.cat([own for own, _ in products], 1)
            matrix = torch.cat([own for _, own in products], 0)
        total: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            rows.contiguous(), matrix, "sum", 0, self._name
        )
        meanwhile()
        return total
