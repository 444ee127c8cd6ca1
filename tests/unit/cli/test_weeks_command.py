"""If these break: `myriad simulate --weeks` says something else than it simulated, or refuses late."""

import json
import re
from importlib import resources
from xml.etree import ElementTree

import pytest

from myriad.cli.main import main

CLUSTER = ("--cluster", "megascale-12288xa100")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    out = capsys.readouterr()
    return out.out if ended.value.code == 0 else f"{ended.value.code} {out.err}"


def test_the_tables_show_the_ettr_of_each_policy(capsys):
    lines = shown(capsys, "--weeks", "0.5", *CLUSTER, "--runs", "2").splitlines()
    assert "0.5 weeks on 12,288 accelerators" in lines[0] and "5.8 faults a day, 2 runs" in lines[0]
    assert any(line.startswith("Myriad, corruption shows") for line in lines)
    (total,) = [line for line in lines if line.startswith("in all")]
    assert total.split()[2:] == ["100.00%"] * 4


def test_as_json_and_as_picture(capsys, tmp_path):
    out = tmp_path / "weeks.svg"
    how = ("--weeks", "0.1", *CLUSTER, "--runs", "1", "--sensitivity", "--json", "--out", str(out))
    found = json.loads(shown(capsys, *how, "--mix", "byterobust", "--spares", "3"))
    assert found["spares"] == 3 and found["mix"]["name"] == "byterobust"
    for policy in found["policies"]:
        assert sum(policy["shares"].values()) == pytest.approx(1.0)
        assert policy["p5"] <= policy["mean"] <= policy["p95"]
    assert {one["name"] for one in found["sensitivity"]} >= {"restart_seconds", "corrupt_shown_ratio"}
    text = "".join(ElementTree.parse(out).getroot().itertext())
    assert "MegaScale-like" in text and "restart seconds" in text


def test_a_job_sets_the_step_time_of_the_simulation(capsys):
    job = ("tiny", "--layout.dp", "2", "--weeks", "0.05", "--cluster", "laptop", "--runs", "1", "--json")
    found = json.loads(shown(capsys, *job))
    assert found["accelerators"] == 2 and found["times"]["step_seconds"] < 6


def test_a_job_sets_what_is_stored_and_compared(capsys):
    how = ("--weeks", "0.05", "--cluster", "laptop", "--runs", "1", "--json", "--layout.dp", "2")
    kept = ("--checkpoint.copies_every", "3", "--checkpoint.minutes", "5", "--checkpoint.every", "0")
    times = json.loads(shown(capsys, "tiny", *how, *kept, "--resilience.verify_every", "4"))["times"]
    assert (times["copies_every"], times["durable_seconds"], times["verify_every"]) == (3, 300, 4)
    alone = ("--layout.dp", "1", "--checkpoint.memory_every", "0")
    times = json.loads(shown(capsys, "tiny", *how, *kept, *alone))["times"]
    assert times["verify_every"] == 0, "there is nothing to compare with"
    assert times["memory_every"] * times["step_seconds"] == pytest.approx(300, rel=0.1)


def mix_of(tmp_path, faults: str) -> str:
    ready = (resources.files("myriad.recipes") / "mixes" / "llama3.toml").read_text()
    path = tmp_path / "mix.toml"
    path.write_text(re.sub(r"(?m)^faults = .*$", f"faults = {faults}", ready))
    return str(path)


def test_without_faults_only_starting_and_saving_cost_time(capsys, tmp_path):
    how = ("--weeks", "1", *CLUSTER, "--runs", "1", "--json", "--mix", mix_of(tmp_path, "0"))
    for policy in json.loads(shown(capsys, *how))["policies"]:
        shares = policy["shares"]
        spent = shares["saving"] + shares["starting"]
        assert policy["mean"] == pytest.approx(1 - spent, abs=1e-9)
        assert spent < 0.02 and policy["p5"] == policy["p95"]


@pytest.mark.parametrize(("faults", "said"), [("1e8", "at most 50,000 in a run"), ("nan", "a finite number")])
def test_rates_that_cannot_be_simulated_are_refused(capsys, tmp_path, faults, said):
    told = shown(capsys, "--weeks", "1", *CLUSTER, "--mix", mix_of(tmp_path, faults))
    assert told.startswith("2 ") and said in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--weeks", "4"), "--cluster"),
        (("--weeks", "0", *CLUSTER), "--weeks = 0.0: 0.01 to 52"),
        (("--weeks", "1", *CLUSTER, "--mix", "moon"), "byterobust, llama3, megascale"),
        (("--weeks", "1", *CLUSTER, "--spares", "-1"), "--spares"),
        (("--weeks", "1", *CLUSTER, "--runs", "0"), "--runs"),
        (("--weeks", "1", *CLUSTER, "--jitter", "0.1"), "--jitter"),
        (("--weeks", "1", *CLUSTER, "--out", "a.gif"), ".svg"),
        (("--weeks", "1", *CLUSTER, "--layout.dp", "2"), "JOB"),
        (("tiny", *CLUSTER, "--spares", "2"), "needs --weeks"),
        (CLUSTER, "JOB"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, said):
    told = shown(capsys, *arguments)
    assert told.startswith("2 ") and said in told and told.count("\n") == 1
