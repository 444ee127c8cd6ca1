"""If these break: `myriad network congestion` does not say what it simulated, or refuses late."""

import json
from xml.etree import ElementTree

import pytest

from myriad.cli.main import main

SMALL = ("--hosts", "8", "--scale", "0.2")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["network", "congestion", *arguments])
    out = capsys.readouterr()
    return out.out if ended.value.code == 0 else f"{ended.value.code} {out.err}"


def test_each_scenario_has_a_table_with_each_control(capsys) -> None:
    out = shown(capsys, *SMALL, "--scenario", "incast,ring", "--control", "dcqcn,swift,hpcc,hybrid")
    assert "incast: 7 to 1, 2 MB each (fluid level)" in out and "ring: 8 hosts" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(" hybrid")] == ["hybrid"] * 2
    assert "HPCC pays for it with throughput" in out
    assert "The hybrid control against its parents" in out


def test_as_json_and_as_picture(capsys, tmp_path) -> None:
    out = tmp_path / "congestion.svg"
    text = shown(
        capsys, *SMALL, "--scenario", "victim", "--control", "swift,hybrid", "--json", "--out", str(out)
    )
    found = json.loads(text)
    assert [(row["scenario"], row["control"]) for row in found["rows"]] == [
        ("victim", "swift"),
        ("victim", "hybrid"),
    ]
    assert all(row["slowdown_p99"] >= 1 and row["num_unfinished"] == 0 for row in found["rows"])
    drawn = "".join(ElementTree.parse(out).getroot().itertext())
    assert "victim: 8 MB beside" in drawn and "hybrid" in drawn


def test_at_the_flow_level_controls_do_not_differ(capsys) -> None:
    found = json.loads(shown(capsys, *SMALL, "--level", "flow", "--scenario", "incast", "--json"))
    (row,) = found["rows"]
    assert (
        row["control"] == "max-min fair" and row["throughput_ratio"] == 1 and row["queue_p99_bytes"] is None
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--control", "cubic"), '--control = "cubic": all, or some of dcqcn-paper'),
        (("--scenario", "outcast"), '--scenario = "outcast": all, or some of incast'),
        (("--level", "quantum"), '--level = "quantum": one of flow, fluid, packet'),
        (("--hosts", "2"), "hosts = 2: from 8 to 1024"),
        (("--out", "picture.gif"), '--out = "picture.gif"'),
        (("--level", "packet", "--scenario", "ring", "--hosts", "257"), "at most 256 at the packet level"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, said) -> None:
    out = shown(capsys, *arguments)
    assert out.startswith("2 ") and said in out and len(out.strip().splitlines()) == 1
