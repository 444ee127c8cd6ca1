"""The door: help that answers at once and names everything; verbs that fail early and in one line."""

import subprocess
import sys
from itertools import pairwise

import pytest

from myriad import __version__
from myriad.cli.main import main
from myriad.job import job_keys


def shown(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_of_train_lists_every_key_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = shown(capsys, "train", "--help")
    missing = [key for key, _ in job_keys() if f"--{key} " not in out]
    assert missing == []
    assert "Ranks that share each weight" in out


def test_paragraphs_flow_to_the_terminals_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    said = shown(capsys, "faults", "run", "--help").split("\u256d")[0]
    lines = [line.strip() for line in said.splitlines()]
    full = [line for line, after in pairwise(lines) if line and after]
    assert len(full) > 6 and all(len(line) > 45 for line in full), "only a paragraph's last line is short"


def test_myriad_alone_shows_its_verbs(capsys):
    out = shown(capsys)
    assert "train" in out and "sample" in out


def test_version(capsys):
    assert shown(capsys, "--version") == f"myriad {__version__}\n"


def test_help_does_not_import_torch():
    code = "import sys; from myriad.cli.main import build_app; build_app(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("module", ["myriad.train.checkpoint_tools.text_sampler", "myriad.train.worker"])
def test_ranks_and_sampling_do_not_wait_for_imports_that_they_do_not_need(module):
    """Each of these takes half a second or more."""
    slow = {"sympy", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo"}
    code = f"import sys, {module}; print(*{slow!r} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60, text=True).split() == []


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["sample", "nowhere"], ["sample", ".", "--tokens", "0"], ["train", "tiny", "--run", "a/b"]],
)
def test_slips_get_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith("myriad: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("verb", ["sample", "report", "checkpoint list", "evict"])
def test_a_run_of_a_similar_name_is_suggested(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first-try"
    folder.mkdir(parents=True)
    (folder / "job.toml").touch()
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "frist-try", *(["0"] if verb == "evict" else [])])
    assert ended.value.code == 2 and "did you mean first-try?" in capsys.readouterr().err
