"""If these fail, a job whose communication cannot work starts all the same, or one that can is refused."""

import tomllib

import pytest

from myriad.errors import BadInputError
from myriad.job import Job, dump_toml, load_job
from myriad.units import parse_bytes, parse_rate

CANNOT_BE = [
    (
        ["overlap.max_in_flight_bytes=1"],
        "overlap.max_in_flight_bytes",
        "overlap.message_bytes = 4194304 bytes",
    ),
    (["overlap.message_bytes=32 MiB"], "overlap.max_in_flight_bytes", "message_bytes = 33554432 bytes"),
    (["overlap.message_bytes=0"], "overlap.message_bytes", "at least 1"),
    (["overlap.message_bytes=0 MiB"], "overlap.message_bytes", "at least 1"),
    (["overlap.message_bytes=-4"], "overlap.message_bytes", "at least 1"),
    (["overlap.message_bytes=4 MiBs"], "overlap.message_bytes", "MiB, GiB or TiB"),
    (["overlap.message_bytes=1.5"], "overlap.message_bytes", "MiB, GiB or TiB"),
    (["overlap.message_bytes=true"], "overlap.message_bytes", "MiB, GiB or TiB"),
    (["overlap.message_bytes=[1]"], "overlap.message_bytes", "MiB, GiB or TiB"),
    (["overlap.chunks=0"], "overlap.chunks", "at least 1"),
    (["overlap.chunks=two"], "overlap.chunks", "whole number"),
    (["overlap.tensor=both"], "overlap.tensor", '"auto", "turns" or "slices"'),
    (["overlap.tensor=1"], "overlap.tensor", '"auto", "turns" or "slices"'),
    (
        ["overlap.tensor=slices", "train.precision=float8"],
        "overlap.tensor",
        "turns, auto or off with train.precision = float8",
    ),
    (["overlap.tensor_chunks=1"], "overlap.tensor_chunks", "at least 2"),
    (["overlap.tensor_message=0"], "overlap.tensor_message", "at least 1"),
    (["overlap.tensor_chunks=17"], "overlap.tensor_chunks", "at most 16"),
    (["overlap.receive_ahead=0"], "overlap.receive_ahead", "at least 1"),
    (["overlap.data=maybe"], "overlap.data", "true or false"),
    (["overlap.pipelin=off"], "overlap.pipelin", "did you mean overlap.pipeline?"),
    (["comm.compress_gradients=fp4"], "comm.compress_gradients", '"bfloat16" or "int8"'),
    (["comm.compress_gradients=true"], "comm.compress_gradients", '"bfloat16" or "int8"'),
    (["comm.compress_parameters=float16"], "comm.compress_parameters", '"bfloat16" or "int8"'),
    (["comm.compress_parameters=int8"], "comm.compress_parameters", "needs layout.zero = 1 or 2"),
    (
        ["comm.compress_parameters=int8", "layout.dp=2", "layout.zero=3"],
        "comm.compress_parameters",
        "needs layout.zero = 1 or 2",
    ),
    (["comm.node_size=0"], "comm.node_size", "at least 1"),
    (["comm.node_size=3", "layout.dp=4"], "comm.node_size", "must divide the 4 ranks"),
    (["comm.switch_size=2"], "comm.switch_size", "needs comm.node_size"),
    (
        ["comm.node_size=2", "comm.switch_size=3", "layout.dp=8"],
        "comm.switch_size",
        "must divide the 4 nodes",
    ),
    (["comm.hierarchy=switch"], "comm.hierarchy", "needs comm.switch_size"),
    (["comm.hierarchy=switch", "comm.node_size=1"], "comm.hierarchy", "needs comm.switch_size"),
    (["comm.hierarchy=ring"], "comm.hierarchy", '"auto", "flat", "node" or "switch"'),
    (
        ["comm.hierarchy=node", "comm.node_size=4", "layout.dp=4", "layout.pp=3", "train.global_batch=4"],
        "comm.hierarchy",
        "unevenly on nodes of 4",
    ),
    (["comm.network_bandwidth=fast"], "comm.network_bandwidth", "Mbit/s, Gbit/s"),
    (["comm.network_bandwidth=0 Gbit/s"], "comm.network_bandwidth", "above 0"),
    (["comm.node_bandwidth=-1"], "comm.node_bandwidth", "above 0"),
    (["comm.switch_bandwidth=nan"], "comm.switch_bandwidth", "finite number"),
    (["comm.switch_bandwidth=true"], "comm.switch_bandwidth", "Mbit/s, Gbit/s"),
    (["comm.timeout_seconds=0"], "comm.timeout_seconds", "above 0"),
    (["comm.timeout_seconds=inf"], "comm.timeout_seconds", "finite number"),
    (["comm.sync_every=0"], "comm.sync_every", "at least 1"),
    (["comm.sync_every=4", "layout.dp=2", "layout.zero=1"], "comm.sync_every", "needs layout.zero = 0"),
    (
        ["comm.sync_every=4", "layout.dp=2", "comm.compress_gradients=int8"],
        "comm.compress_gradients",
        "needs comm.sync_every = 1",
    ),
    (
        ["model.experts=4", "layout.dp=4", "layout.ep=2", "comm.sync_every=4"],
        "comm.sync_every",
        "1, or layout.ep x layout.etp = layout.tp: with DiLoCo replicas do not exchange tokens",
    ),
    (["comm.sync_every=3"], "train.steps", "multiple of comm.sync_every = 3"),
    (["comm.sync_every=4", "train.validate_every=6"], "train.validate_every", "multiple of comm.sync_every"),
    (["comm.sync_every=4", "checkpoint.every=5"], "checkpoint.every", "multiple of comm.sync_every"),
    (["comm.outer_momentum=1"], "comm.outer_momentum", "below 1"),
    (["comm.outer_learning_rate=0"], "comm.outer_learning_rate", "above 0"),
    (["comm=2"], "comm", "is a section with the keys comm.store"),
    (["train.collect_garbage_every=-1"], "train.collect_garbage_every", "at least 0"),
]


@pytest.mark.parametrize(("overrides", "key", "says"), CANNOT_BE, ids=[" ".join(row[0]) for row in CANNOT_BE])
def test_what_cannot_be_is_one_line_with_key_value_and_what_is_allowed(
    overrides: list[str], key: str, says: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        load_job("tiny", overrides)
    assert caught.value.key == key
    assert says in caught.value.allowed
    assert str(caught.value).startswith(f"{key} = ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["overlap.message_bytes=1", "overlap.max_in_flight_bytes=1"],
        ["overlap.message_bytes=16 MiB"],
        ["overlap.chunks=off"],
        ["overlap.chunks=1000"],
        ["overlap.pipeline=off", "overlap.data=off", "overlap.tensor=off", "overlap.optimizer=off"],
        ["comm.compress_gradients=int8", "comm.compress_parameters=bfloat16", "layout.dp=2", "layout.zero=2"],
        ["comm.node_size=1", "layout.dp=4"],
        ["comm.hierarchy=switch", "comm.node_size=2", "comm.switch_size=2", "layout.dp=8"],
        ["comm.hierarchy=node", "comm.node_size=4", "layout.dp=2", "layout.tp=2", "layout.pp=2"],
        ["comm.hierarchy=node"],
        ["comm.network_bandwidth=200 Mbit/s", "comm.node_bandwidth=25 GB/s"],
        ["comm.sync_every=5", "layout.dp=2", "checkpoint.every=10"],
        ["comm.timeout_seconds=0.5"],
        ["train.collect_garbage_every=0"],
    ],
    ids=" ".join,
)
def test_what_can_be_is_not_refused(overrides: list[str]) -> None:
    load_job("tiny", overrides)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("true", "turns"),
        ("turns", "turns"),
        ("slices", "slices"),
        ("auto", "auto"),
        ("false", None),
        ("off", None),
    ],
)
def test_a_job_of_before_there_were_two_ways_to_hide_tensors_means_what_it_did(
    given: str, kind: str | None
) -> None:
    job = load_job("tiny", [f"overlap.tensor={given}"])
    assert job.overlap.tensor == kind
    assert Job.model_validate(tomllib.loads(dump_toml(job))).overlap.tensor == kind


def test_a_size_and_a_rate_are_what_is_written() -> None:
    assert [parse_bytes(text) for text in ("4 MiB", "1.5kB", 7, "12")] == [4 * 2**20, 1500, 7, 12]
    rates = ("200 Mbit/s", "25 GB/s", "1.5 kbit", "8 B/s", 3e9)
    assert [parse_rate(text) for text in rates] == [2e8, 2e11, 1500.0, 64.0, 3e9]


@pytest.mark.parametrize(
    ("override", "lossy"),
    [
        ("comm.hierarchy=auto", ()),
        ("comm.sync_every=4", ("replicas synchronize every 4 steps",)),
        ("comm.compress_gradients=int8", ("gradients are sent as int8",)),
        ("comm.compress_parameters=bfloat16", ("parameters are sent as bfloat16",)),
    ],
)
def test_only_what_is_asked_for_is_lossy(override: str, lossy: tuple[str, ...]) -> None:
    layout = ["layout.dp=2", "layout.zero=1"] if "compress" in override else ["layout.dp=2"]
    assert load_job("tiny", [override, *layout]).comm.lossy == lossy
    capped = load_job("tiny-moe", ["model.expert_capacity=1.25"]).model
    assert capped.lossy == ("experts drop tokens beyond 1.25 times their even share",)
    assert load_job("tiny-moe").model.lossy == ()
