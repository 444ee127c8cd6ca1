"""``python compile_together.py FOLDER``: two processes compile the same three kernels for sm_90 at once,
without a GPU, three times: with an empty cache, with the same cache again, and each with Triton's own cache.
For each process a line with the time and the kernels that it compiled itself."""

import multiprocessing
import os
import sys
from multiprocessing.synchronize import Barrier
from typing import Any

from compile_kernels import compile_kernel
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.cache import FileCacheManager

from myriad.kernels.triton import cross_entropy_kernels, optimizer_kernels, rotary_kernels

KERNELS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optimizer_kernels.adamw_kernel, {"MAY_STAY": True, "BLOCK": 2048}),
    (cross_entropy_kernels.facts_kernel, {"BLOCK": 4096}),
    (rotary_kernels.turn_kernel, {"HEADS": 16, "PAIRS": 64}),
)


def work(time: str, folder: str, start: Barrier) -> None:
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "own" if time == "own" else "shared")
    if time == "own":
        knobs.cache.manager_class = FileCacheManager
    own: list[str] = []
    make = ASTSource.make_ir

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        own.append(self.fn.__name__)
        return make(self, *arguments, **options)

    ASTSource.make_ir = noted
    start.wait(60)
    for kernel, constants in KERNELS:
        compile_kernel(kernel, constants, "bf16")
    # In one write: with PYTHONUNBUFFERED, print writes the end of a line apart, and lines mix.
    os.write(sys.stdout.fileno(), (" ".join((time, *own)) + "\n").encode())


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    for time in ("cold", "warm", "own"):
        ranks = [context.Process(target=work, args=(time, sys.argv[1], barrier)) for _ in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0, 0]
