"""If these fail, `myriad network place` puts jobs where they are slower, or a scheduler is handed a file that
it cannot read."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from myriad.cli.main import main
from myriad.job import load_job
from myriad.recipes.cluster import load_cluster
from myriad.reports.run_report.network_section import network_parts

CLUSTER = """
name = "two-leaves"
nodes = 8
accelerators_per_node = 2
accelerator = "a100-sxm-80gb"
nodes_per_switch = 4
links.node = {bytes_per_second = 300e9, latency_seconds = 2e-6}
links.network = {bytes_per_second = 25e9, latency_seconds = 1e-5}
"""
JOB = ("tiny-3d", "--layout.dp", "4", "--train.global_batch", "32")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def _place(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["network", "place", *map(str, arguments)])
    return int(ended.value.code or 0)


def _told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert _place(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_placements_are_compared_and_the_best_is_no_worse(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "place.svg"
    told = _told(capsys, *JOB, "--cluster", cluster, "--draws", 8, "--out", out)
    by = {one["placement"]: one["jobs"][0] for one in told["placements"]}
    assert list(by) == ["as numbered", "random", "optimised"]
    assert by["as numbered"]["nodes"] == list(range(8))
    assert by["optimised"]["p50_seconds"] <= by["as numbered"]["p50_seconds"] * (1 + 1e-9)
    for one in by.values():
        assert sorted(one["nodes"]) == list(range(8))
        assert (
            told["jobs"][0]["plain_seconds"] <= one["p50_seconds"] * (1 + 1e-9) <= one["p95_seconds"] * 1.001
        )
    moved = [sum(one["bytes"].values()) for one in by.values()]
    assert moved == pytest.approx([moved[0]] * 3)
    picture = ElementTree.parse(out).getroot()
    paths = list(picture.iter("{http://www.w3.org/2000/svg}path"))
    assert sum(one.get("d", "").count("z") for one in paths) == 3 * 8  # a cell for each node


def test_several_jobs_share_the_cluster(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(capsys, "tiny-3d", "tiny-3d", "--cluster", cluster, "--draws", 2)
    assert [one["job"] for one in told["jobs"]] == ["tiny-3d (1)", "tiny-3d (2)"]
    for one in told["placements"]:
        taken = [node for job in one["jobs"] for node in job["nodes"]]
        assert len(set(taken)) == len(taken) == 8
    packed = next(one for one in told["placements"] if one["placement"] == "optimised")
    assert [len({node // 4 for node in job["nodes"]}) for job in packed["jobs"]] == [1, 1]


def test_a_person_reads_tables(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _place("tiny-3d", "--cluster", cluster, "--nodes", "0-2,7", "--draws", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny-3d: 8 of 16 accelerators of two-leaves")
    assert {"given", "random", "optimised"} <= set(" ".join(lines).split())


@pytest.mark.parametrize("use", ["numbered", "optimised"])
def test_ranks_are_written_for_launchers(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str
) -> None:
    names, to = tmp_path / "names", tmp_path / "hosts"
    names.write_text("\n".join(f"gpu-{n}" for n in range(8)))
    more = (
        "--export",
        "ranks",
        "--to",
        to,
        "--names",
        names,
        "--use",
        use,
        "--nodes",
        "3,2,1,0",
        "--draws",
        2,
    )
    told = _told(capsys, "tiny-3d", "--cluster", cluster, *more)
    wanted = {"numbered": "as given", "optimised": "optimised"}[use]
    nodes = next(one["jobs"][0]["nodes"] for one in told["placements"] if one["placement"] == wanted)
    assert to.read_text().split() == [f"gpu-{node}" for node in nodes for _ in range(2)]


def test_labels_and_switches_are_printed(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("tiny-3d", "--cluster", cluster, "--draws", 1)
    assert _place(*few, "--export", "kubernetes") == 0
    nodes = list(yaml.safe_load_all(capsys.readouterr().out))
    leaves = [one["metadata"]["labels"]["network.topology.nvidia.com/leaf"] for one in nodes]
    assert leaves == ["leaf0"] * 4 + ["leaf1"] * 4
    assert _place(*few, "--export", "slurm") == 0
    assert capsys.readouterr().out.splitlines() == [
        "SwitchName=leaf0 Nodes=node[0-3]",
        "SwitchName=leaf1 Nodes=node[4-7]",
        "SwitchName=spine0 Switches=leaf[0-1]",
    ]
    assert _place(*few, "--export", "slurm-blocks") == 0
    assert capsys.readouterr().out.endswith("BlockSizes=4\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--nodes", "0-3", "--nodes", "4-7"), "one for each of the 1 jobs"),
        (("--nodes", "0-3,3"), "each node may be listed once"),
        (("--nodes", "6-9"), "nodes from 0 to 7"),
        (("--nodes", "0-1"), "4: 8 ranks, 2 to a node"),
        (("--layout.dp", "8"), "at most the 16 accelerators"),
        (("--to", "x"), "only with --export"),
        (("--out", "x.gif"), ".svg"),
        (("--names", "/nowhere/names"), "cannot be read"),
        (("--cluster", "one-node-8xh100"), "more than one node"),
        (("--use", "best"), "optimised"),
    ],
)
def test_bad_input_is_one_line(
    cluster: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert _place("tiny-3d", "--cluster", cluster, "--draws", 1, *more) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_an_iteration_is_forecast_as_a_distribution(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *JOB, "--cluster", str(cluster), "--fabric", "--json"])
    assert not ended.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["iteration_seconds"] * (1 - 1e-9) <= told["fabric"]["p50_seconds"]
    assert told["fabric"]["p50_seconds"] <= told["fabric"]["p95_seconds"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *JOB, "--cluster", str(cluster), "--fabric", "--comm.node_order", "[0, 2, 1]"])
    assert ended.value.code == 2


def test_a_plan_includes_the_effect_of_the_switches(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--what-if", "accelerator.memory_bytes=4GiB")
    with pytest.raises(SystemExit) as ended:
        main(["plan", *JOB, "--cluster", str(cluster), "--fabric", *small, "--json"])
    assert not ended.value.code
    told = json.loads(capsys.readouterr().out)
    rows = told["fabric"]["plans"]
    assert 1 <= len(rows) <= 5 and rows[0]["rank"] in ("1", "as written")
    for row in rows:
        assert row["plain_seconds"] * (1 - 1e-9) <= row["p50_seconds"] <= row["p95_seconds"]


@pytest.mark.slow
def test_a_runs_report_shows_its_ranks_on_the_switches(cluster: Path) -> None:
    """In the order of nodes that the job says; nothing where the cluster's file says of no fabric."""
    replicas_apart = "comm.node_order=[0, 1, 4, 5, 2, 3, 6, 7]"
    job = load_job("tiny-3d", ["layout.dp=4", "train.global_batch=32", replicas_apart])
    assert list(network_parts(job, load_cluster(str(cluster)), lambda what, done: None)) == []
    begun = list[str]()
    changes = ["fabric.kind=rail", "fabric.oversubscription=8", "nics.transport=roce"]
    on_rails = load_cluster(str(cluster), changes)
    parts = list(network_parts(job, on_rails, lambda what, done: begun.append(what)))
    assert begun == ["placement", "hash conflicts", "congestion", "flaps", "settings"]
    pictures = re.findall("<svg.*?</svg>", "".join(parts), re.DOTALL)
    placement, conflicts, congestion, flaps, settings = map(ElementTree.fromstring, pictures)
    paths = placement.iter("{http://www.w3.org/2000/svg}path")
    assert sum(one.get("d", "").count("z") for one in paths) == 8
    assert "as given" in "".join(placement.itertext())
    assert "16 flows of its data-parallel rings" in "".join(conflicts.itertext())
    assert "of 16 flows" in "".join(congestion.itertext()) and "hybrid" in "".join(congestion.itertext())
    assert "NCCL_IB_TIMEOUT" in "".join(settings.itertext()) and "7 retries" in "".join(flaps.itertext())


def test_a_fact_that_a_report_lacks_is_a_line_of_it(cluster: Path) -> None:
    silent = load_cluster(str(cluster), ["fabric.kind=rail"])
    parts = list(network_parts(load_job("tiny-3d", []), silent, lambda what, done: None))
    assert any("No settings" in part and "nics.transport" in part for part in parts)


def test_a_report_shows_tokens_that_travel_to_experts(cluster: Path) -> None:
    """They are the heaviest traffic of many micro-batches: each step sends gradients once."""
    job = load_job("tiny-moe", ["layout.dp=16", "layout.ep=4", "train.global_batch=512"])
    parts = network_parts(job, load_cluster(str(cluster), ["fabric.kind=rail"]), lambda what, done: None)
    assert any("of its tokens to experts and back" in part for part in islice(parts, 8))


def test_a_mixture_of_experts_is_placed(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("tiny-moe", "--layout.dp", "16", "--layout.ep", "4", "--train.global_batch", "64")
    assert _place(*keys, "--cluster", cluster, "--draws", "2", "--json") == 0
    numbered = json.loads(capsys.readouterr().out)["placements"][0]["jobs"][0]
    assert 0 < numbered["slowest_exchange_p50_ratio"] <= 1 and numbered["bytes"]
