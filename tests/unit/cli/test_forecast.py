"""If these break: `myriad simulate --cluster` says something else than it predicts, or refuses late."""

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from myriad.cli.main import main

JOB = ("tiny", "--layout.dp", "2", "--layout.pp", "2", "--layout.zero", "1")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *JOB, *arguments])
    out = capsys.readouterr()
    return out.out if ended.value.code == 0 else f"{ended.value.code} {out.err}"


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(capsys, "--cluster", "laptop", "--json", *arguments))
    return found


def test_a_prediction_is_a_line_for_each_pipeline_rank(capsys):
    lines = shown(capsys, "--cluster", "laptop").splitlines()
    assert "tiny on 4 of 4 accelerators of laptop" in lines[0] and "MFU" in lines[0]
    assert [line.split()[:2] for line in lines[3:5]] == [["0", "2"], ["1", "2"]]
    assert "nothing was run" in lines[-1]


def test_as_json_it_has_everything(capsys):
    found = predicted(capsys)
    assert found["accelerators"] == 4 and found["iteration_seconds"] > 0
    assert found["checkpoint_stall_seconds"] == 0 and found["checkpoint_store_seconds"] is None
    assert set(found["exposed_seconds"]) == {
        *("tensor", "experts", "context", "pipeline", "gather", "reduce", "tied", "norm", "host")
    }
    for rank in found["ranks"]:
        assert rank["memory_bytes"] == pytest.approx(sum(rank["memory"].values()))
        assert rank["fits_probability"] == pytest.approx(1.0)


def test_waiting_for_slow_storage_is_reported(capsys, tmp_path):
    cluster = tmp_path / "slow.toml"
    ready = resources.files("myriad.recipes") / "clusters" / "laptop.toml"
    cluster.write_text(
        ready.read_text().replace('name = "laptop"', 'name = "slow"\nstorage_bytes_per_second = 1e6')
    )
    arguments = ("--cluster", str(cluster), "--checkpoint.every", "10", "--overlap.checkpoint", "false")
    found = json.loads(shown(capsys, *arguments, "--json"))
    assert found["checkpoint_stall_seconds"] == pytest.approx(
        found["checkpoint_store_seconds"] / 10, rel=0.01
    )
    assert "snapshots add" in shown(capsys, *arguments)


def test_every_replica_and_stragglers_are_there_on_request(capsys):
    plain = predicted(capsys)
    assert len(predicted(capsys, "--full")["ranks"]) == 4
    slow = predicted(capsys, "--straggler", "node=0:2x", "--straggler", "rank=3:3x")
    assert 2 < slow["iteration_seconds"] / plain["iteration_seconds"] <= 3
    jittered = [predicted(capsys, "--jitter", "0.1", "--seed", seed) for seed in ("1", "1", "2")]
    assert jittered[0] == jittered[1] != jittered[2]


def test_picture_and_spans_are_written(capsys, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    picture, run = tmp_path / "a.svg", tmp_path / "run"
    out = shown(capsys, "--cluster", "laptop", "--out", str(picture), "--spans", str(run))
    assert str(picture) in out and str(run) in out
    assert "rank 0" in picture.read_text() and "rank 1" in picture.read_text()
    table = parquet.read_table(run / "spans")
    assert {"rank", "step", "name", "start_seconds", "duration_seconds"} <= set(table.column_names)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "a.svg", "job.toml", "step-1.parquet",
    ]  # fmt: skip
    assert shown(capsys, "--cluster", "laptop", "--spans", str(run)).startswith("2 myriad: error: --spans")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "lapto"], "--cluster = \"lapto\": did you mean laptop?"),
        (["--cluster", "laptop", "--straggler", "node=1:2x"], "node 0 to 0: the job's 4 ranks are on 1 node"),
        (["--cluster", "laptop", "--straggler", "node=0:0x"], "the factor must be above 0"),
        (["--cluster", "laptop", "--straggler", "slow"], "like node=17:1.1x"),
        (["--cluster", "laptop", "--layout.tp", "2"], "8: must be at most the 4 accelerators of laptop"),
        (["--cluster", "laptop", "--jitter", "2"], "--jitter = 2.0: must be 0 to 0.5"),
        (["--cluster", "laptop", "--program"], "give either --cluster CLUSTER to predict, or --program"),
        (["--program", "--full"], "--full = true: needs --cluster"),
        (["--cluster", "laptop", "--out", "a.gif"], "a file name that ends in .svg"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_refused_in_one_line(capsys, arguments: list[str], said: str):
    out = shown(capsys, *arguments)
    assert out.startswith("2 myriad: error: ") and said in out and out.count("\n") == 1


def test_torch_is_not_imported(capsys, tmp_path: Path):
    code = "import sys; from myriad.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    import subprocess

    command = [sys.executable, "-c", code, "simulate", *JOB, "--cluster", "laptop", "--out"]
    subprocess.run([*command, str(tmp_path / "a.svg")], check=True, capture_output=True)


NETWORK_JOB = (
    "gpt-13b",
    "--layout.dp",
    "4",
    "--layout.tp",
    "8",
    "--layout.pp",
    "1",
    "--cluster",
    "vegiant-32xa100-800g",
)


def network(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *NETWORK_JOB, *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_a_flap_in_an_iteration_states_what_it_costs(capsys, tmp_path):
    asked = ("--flap", "node=1:3s@5s", "--timers", "18x7", "--spans", str(tmp_path / "run"), "--json")
    code, out, err = network(capsys, *asked)
    assert code == 0, err
    found = json.loads(out)
    told = found["network"]
    assert found["iteration_seconds"] > told["plain_iteration_seconds"]
    assert told["flaps"][0]["wait_seconds"] > 1
    assert 0 <= told["lost_probability"] < 0.1
    assert list((tmp_path / "run" / "spans").iterdir())
    text = network(capsys, "--congested", "node=1:0.5")[1]
    assert "node 1 has 50% of the rate" in text and "waits longest" in text


def test_timers_without_a_flap_and_a_flap_without_a_cluster_are_refused(capsys):
    assert network(capsys, "--timers", "18x7")[0] == 2
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *JOB, "--program", "--flap", "node=1:1s@0s"])
    assert ended.value.code == 2


def test_a_picture_is_what_its_name_states(capsys, tmp_path):
    pytest.importorskip("resvg_py")
    out = tmp_path / "x.png"
    shown(capsys, "--cluster", "laptop", "--out", str(out))
    assert out.read_bytes().startswith(b"\x89PNG")
