"""If these break: a job script gets an environment that a shell, or NCCL, reads as something else."""

import json
import os
import subprocess
from xml.etree import ElementTree

import pytest

from myriad.cli.main import main

CLUSTER = ("--cluster", "megascale-12288xa100", "--what-if", "nodes=192", "--what-if", "nics.interface=bond0")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["network", "tune", *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_the_shell_output_sets_the_same_variables_as_the_json(capsys):
    wanted = json.loads(run(capsys, *CLUSTER, "--export", "json")[1])
    assert wanted["NCCL_CROSS_NIC"] == "0"
    assert wanted["NCCL_SOCKET_IFNAME"] == "=bond0"
    script = run(capsys, *CLUSTER, "--export", "sh")[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_"))}
    shown = subprocess.run(
        ["sh", "-c", f"{script}\nenv"], env=clean, capture_output=True, text=True, check=True
    )
    environment = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
    assert {name: environment[name] for name in wanted} == wanted
    pairs = run(capsys, *CLUSTER, "--export", "env")[1].splitlines()
    assert dict(pair.split("=", 1) for pair in pairs) == wanted


def test_people_see_reasons_and_what_is_missing(capsys):
    code, out, _ = run(capsys, *CLUSTER)
    assert code == 0
    assert "NCCL_IB_QPS_PER_CONNECTION=" in out and "left alone" in out
    assert "NCCL_IB_HCA" in out and "nics.names" in out
    assert "roce_adp_retrans_en=1" in out
    found = json.loads(run(capsys, *CLUSTER, "--json")[1])
    assert all(line["reason"] for line in found["lines"])


def test_the_picture_marks_what_is_asked_for(capsys, tmp_path):
    out = tmp_path / "tune.svg"
    asked = json.loads(run(capsys, *CLUSTER, "--out", str(out), "--json")[1])["lines"]
    (pairs,) = (line["value"] for line in asked if line["name"] == "NCCL_IB_QPS_PER_CONNECTION")
    drawn = ElementTree.parse(out).getroot()
    marks = ["".join(one.itertext()) for one in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert marks[0].startswith("1: ") and marks[1].startswith(f"{pairs}: ")
    assert marks[2].startswith("20: ")
    sockets = run(capsys, *CLUSTER, "--what-if", "nics.transport=tcp", "--out", str(out))
    assert sockets[0] == 2 and "RDMA" in sockets[2]


@pytest.mark.parametrize(
    "arguments", [("--cluster", "laptop"), ("--cluster", "vtrain-512xa100"), (*CLUSTER, "--down", "0")]
)
def test_bad_input_is_one_line_and_2(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
