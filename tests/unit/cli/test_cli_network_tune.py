"""If these break: a job script gets an environment that a shell, or NCCL, reads as something else."""

import json
import os
import subprocess

import pytest

from myriad.cli.main import main

CLUSTER = ("--cluster", "megascale-12288xa100", "--what-if", "nodes=192", "--what-if", "nics.interface=bond0")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["network", "tune", *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_a_shell_reads_what_json_says(capsys):
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


@pytest.mark.parametrize(
    "arguments", [("--cluster", "laptop"), ("--cluster", "vtrain-512xa100"), (*CLUSTER, "--down", "0")]
)
def test_bad_input_is_one_line_and_2(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
