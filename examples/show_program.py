"""What every pipeline rank of a job does in one iteration, action by action, as the checker has proved it.

    python examples/show_program.py layout.pp=2 train.global_batch=3
    python examples/show_program.py layout.pp=2 train.global_batch=3 overlap.pipeline=false
    python examples/show_program.py layout.dp=2 layout.zero=2 overlap.chunks=2 train.global_batch=2

The words are those of `myriad.program.actions`: `forward(1.0)` is stage 1, micro-batch 0; `a0.2->1` the
activation that stage 0 made of micro-batch 2, sent to rank 1; `g` a gradient.
"""

import sys
from collections.abc import Sequence

from myriad.job import load_job
from myriad.program.build import build_program

__all__ = ["program_lines"]


def program_lines(keys: Sequence[str]) -> list[str]:
    """A line for each pipeline rank of the job `tiny` with these keys.

    ``overlap.chunks`` off is one chunk here: the engine takes one for each layer."""
    job = load_job("tiny", ["model.tied=false", *keys])
    cuts = job.layout.dp > 1 and job.overlap.data
    program = build_program(
        job.layout,
        job.overlap,
        job.num_micro_batches,
        tied=job.model.tied,
        training=True,
        num_chunks=(job.overlap.chunks or 1) if cuts else 1,
        orthogonalizes=job.optimizer.orthogonalizes,
    )
    return [f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(program.ranks)]


if __name__ == "__main__":
    print("\n".join(program_lines(sys.argv[1:])))
