"""If these break: a micro-batch is cut in more parts than its messages are worth, or predictions hide what
the runtime will not."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.overlap_parts import num_parts, part_sizes
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.workload import Workload
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(layers=4, hidden=4096, heads=32, sequence=2048, vocabulary=8192)


@given(
    st.integers(1, 64),
    st.integers(1, 4096),
    st.integers(1, 2**15),
    st.integers(2, 16),
    st.integers(1, 2**22),
    st.booleans(),
)
def test_parts_are_worth_a_message_each(sequences, positions, position_bytes, chunks, message_bytes, on_cpu):
    cut = {"chunks": chunks, "message_bytes": message_bytes, "on_cpu": on_cpu}
    parts = num_parts(sequences, positions, position_bytes, **cut)
    assert parts == int(parts) >= 1
    assert parts == 1 or sequences * positions * position_bytes / parts >= message_bytes
    most = chunks * (1 + on_cpu) if sequences == 1 else min(chunks, sequences)
    assert parts <= most


@given(st.integers(1, 600), st.integers(1, 8), st.sampled_from([1, 2, 8, 16]))
def test_parts_add_up_and_keep_the_multiple(units, parts, multiple):
    sizes = part_sizes(units * multiple, parts, multiple)
    assert sum(sizes) == units * multiple and len(sizes) == min(parts, units)
    assert all(size % multiple == 0 for size in sizes) and max(sizes) - min(sizes) in (0, multiple)
    assert sizes == sorted(sizes, reverse=True)


def test_many_layouts_at_once_are_cut_as_each_alone():
    sequences, positions = np.array([1.0, 2.0, 3.0, 8.0]), np.array([3.0, 64.0, 64.0, 64.0])
    together = num_parts(sequences, positions, 8192, chunks=4, message_bytes=2**18, on_cpu=True)
    alone = [
        num_parts(*pair, 8192, chunks=4, message_bytes=2**18, on_cpu=True)
        for pair in zip(sequences, positions, strict=True)
    ]
    assert together.tolist() == alone == [1, 2, 3, 4]  # 24 KiB, 1 MiB, 1.5 MiB, 4 MiB in messages of 256 KiB


def exposed_seconds(micro_batch: int, sequence: int = 2048, **overlap: int) -> float:
    layout, model = Layout(tp=8, micro_batch=micro_batch), MODEL.model_copy(update={"sequence": sequence})
    work = Workload(model, layout, 16, OverlapConfig(**overlap))
    return float(Costs(work, load_cluster("megascale-256xa100")).stages[0].parts.tensor)


def test_a_prediction_follows_the_job_s_chunks_and_messages():
    assert exposed_seconds(4, tensor_chunks=4) < exposed_seconds(4, tensor_chunks=2)
    assert exposed_seconds(1, 8192, tensor_message=2**30) > exposed_seconds(1, 8192)


def test_small_parts_cost_more_than_they_hide():
    """Each part starts from its own costs; otherwise a plan would split where the runtime is faster
    without."""
    small = exposed_seconds(1, 1024, tensor_message=2**16, tensor_chunks=8)
    assert small > exposed_seconds(1, 1024, tensor_message=2**30)
