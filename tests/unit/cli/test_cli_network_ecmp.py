"""If these fail, `myriad network ecmp` answers another question than was asked, or fails in many lines."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from myriad.cli.main import main


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["network", "ecmp", *arguments])
    return int(ended.value.code or 0)


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert _run(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_one_switch_defaults_to_32_flows_on_32_uplinks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "ecmp.svg"
    told = _told(capsys, "--out", str(picture))
    asked = told["rows"][0]
    assert asked["is_asked"] and round(asked["slowest_ratio"], 2) == 0.3
    assert _told(capsys, "--flows", "8", "--split", "2")["rows"][0]["slowest_ratio"] > 0.98
    root = ElementTree.parse(picture).getroot()
    assert len(root.findall("{*}polyline")) == 4 and "32 flows: 0.30" in picture.read_text()


def test_the_ecmp_table_lists_the_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 0
    shown = capsys.readouterr().out
    assert "32 flows on 32 uplinks" in shown and "What helps, most first: adaptive routing" in shown


def test_a_cluster_is_asked_by_placement_and_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ecmp.svg"
    part = ("--cluster", "megascale-12288xa100", "--gpus", "1024", "--draws", "3")
    told = _told(capsys, *part, "--placement", "random", "--ring-nodes", "16", "--out", str(picture))
    assert (told["nodes"], told["ring_nodes"], told["fabric"]["split"]) == (128, 16, 2)
    rows = {row["name"]: row["slowest_ratio"] for row in told["rows"]}
    assert rows["baseline"] < rows["placement packed"] == 1
    narrow = ("--what-if", "fabric.split=1", "--what-if", "fabric.ports_per_switch=128")
    without = _told(capsys, *part, "--placement", "random", *narrow)
    assert without["fabric"]["split"] == 1 and "split 2, half the uplinks" in str(without["rows"])
    assert len(ElementTree.parse(picture).getroot().findall("{*}rect/{*}title")) == len(told["rows"])


def test_a_fabric_at_its_capacity_is_compared_with_what_can_be_built(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Switches of half as many ports cannot join 2,048 NICs in two tiers: that row is left out."""
    told = _told(capsys, "--cluster", "deepseek-2048xh800", "--draws", "1")
    names = [row["name"] for row in told["rows"]]
    assert "adaptive routing" in names and not any("split" in name for name in names)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--flows", "0"], "--flows = 0: at least 1"),
        (["--placement", "random"], '--placement = "random": only with --cluster'),
        (["--cluster", "megascale-256xa100", "--split", "2"], "--split = 2: only without --cluster"),
        (["--cluster", "megascale-256xa100", "--placement", "alphabetical"], "packed, spread, random"),
        (["--cluster", "megascale-256xa100", "--ring-nodes", "33"], "--ring-nodes = 33: 2 to 32"),
        (["--cluster", "megascale-256xa100", "--what-if", "fabric.kind=torus"], '"clos2", "clos3", "rail"'),
        (["--cluster", "megascale-256xa100", "--what-if", "fabric.rail=1"], "did you mean fabric.rails?"),
        (["--cluster", "laptop"], "inside a node there is no fabric"),
        (["--out", "ecmp.gif"], "a file name that ends in .svg"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*arguments) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
