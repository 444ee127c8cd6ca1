"""If these break: `myriad network flap` recommends what its own table does not show to be best."""

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from myriad.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["network", "flap", *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, "--json", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_what_is_recommended_loses_least_of_all_that_is_shown(capsys):
    found = answered(capsys, "--no-driver", "--timeout", "14,16,18,20,22")
    least = min(one["hours_per_month"] for one in found["timers"])
    assert found["best"]["hours_per_month"] <= 1.01 * least
    settings = [line["setting"] for line in found["set"]]
    assert f"NCCL_IB_TIMEOUT={found['best']['timeout']}" in settings
    assert any("roce_adp_retrans_en=1" in one for one in settings)
    assert all(line["reason"] for line in found["set"])


def test_nics_that_cannot_resend_adaptively_get_no_such_advice(capsys):
    found = answered(capsys, "--no-adaptive")
    assert not any(one["adaptive"] for one in found["timers"])
    assert not any("mlxreg" in line["setting"] for line in found["set"])


def test_links_come_from_the_cluster_and_a_flap_lengthens_the_jobs_iteration(capsys):
    found = answered(capsys, "gpt2-124m", "--cluster", "megascale-256xa100")
    assert found["links"] == 32 * 8
    assert found["iteration_seconds"] > 0
    code, out, _ = run(capsys, "gpt2-124m", "--cluster", "megascale-256xa100")
    assert code == 0 and "an iteration of" in out


def test_a_patient_driver_lets_flaps_be_survived(capsys):
    hasty = answered(capsys)["best"]
    patient = answered(capsys, "--patience", "10")["best"]
    assert patient["abort_probability"] < 0.3 * hasty["abort_probability"]
    assert "resilience.timeout_scale" in run(capsys)[1]


def test_the_picture_has_a_line_for_each_set_of_timers_in_both_panels(capsys, tmp_path):
    out = tmp_path / "flap.svg"
    found = answered(capsys, "--out", str(out))
    lines = ElementTree.parse(out).findall(".//{*}polyline")
    assert len(lines) == 2 * len(found["timers"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--timeout", "0"), "--timeout"),
        (("--timeout", "²"), "--timeout"),
        (("--flaps", "1e300"), "--flaps"),
        (("--down", "1e-300"), "--down"),
        (("--restart", "nan"), "--restart"),
        (("--links", "9" * 20), "--links"),
        (("--timeout", "9" * 5000), "--timeout"),
        (("--longer", "4,1"), "--longer"),
        (("--down", "soon"), "--down"),
        (("--flaps", "-1"), "--flaps"),
        (("--patience", "0"), "--patience"),
        (("--out", "flap.pdf"), "--out"),
        (("--cluster", "nowhere"), "--cluster"),
        (("--cluster", "laptop"), "laptop: nodes = 1"),
    ],
)
def test_bad_input_is_one_line_and_2(capsys, arguments, said):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert said in err and err.count("\n") == 1
