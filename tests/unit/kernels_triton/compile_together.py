"""Four processes compile the same three kernels for sm_90 at once, without a GPU: for each a line with the
kernels that it compiled itself."""

import multiprocessing
from multiprocessing.synchronize import Barrier
from typing import Any

from compile_kernels import compile_kernel
from triton.compiler import ASTSource

from myriad.kernels.triton import cross_entropy_kernels, optimizer_kernels, rotary_kernels

KERNELS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optimizer_kernels.adamw_kernel, {"MAY_STAY": True, "BLOCK": 2048}),
    (cross_entropy_kernels.facts_kernel, {"BLOCK": 4096}),
    (rotary_kernels.turn_kernel, {"HEADS": 16, "PAIRS": 64}),
)


def work(rank: int, start: Barrier) -> None:
    own: list[str] = []
    make = ASTSource.make_ir

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        own.append(self.fn.__name__)
        return make(self, *arguments, **options)

    ASTSource.make_ir = noted
    start.wait(60)
    for kernel, constants in KERNELS:
        compile_kernel(kernel, constants, "bf16")
    print(rank, *own, flush=True)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    ranks = [context.Process(target=work, args=(rank, barrier)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * 4
