"""``myriad train`` as a user meets it: what is on the screen, what is on disk, the exit code."""

import functools
import json
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from myriad.cli.main import main
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers import local
from myriad.run import Run
from myriad.train.inputs import note_corpus, open_inputs, refuse_replaced_corpus, tokenizer_of

WORKER = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]


@pytest.fixture(autouse=True)
def fake_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "run_local", functools.partial(local.run_local, command=WORKER))


@pytest.fixture
def myriad(capsys):
    """Runs a command; gives its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return call


def test_a_run_shows_its_progress_and_ends_with_sample_curve_and_figures(myriad):
    code, out, err = myriad("train", "tiny", "--train.steps", "12")
    assert (code, err) == (0, "")
    progress = ["1 rank on cpu", "3.2M parameters", "validation loss 2.5000, 1.250 bits per byte"]
    ending = ["12 of 12", "[bold]pass[/bold]", "⠑", "160 GFLOP/s (measured)", "myriad sample runs/tiny"]
    assert [said for said in [*progress, *ending] if said not in out] == []
    assert ET.parse("runs/tiny/loss.svg").getroot().tag.endswith("svg")
    assert Run("runs/tiny").job().train.steps == 12


def test_json_is_one_object_and_nothing_else(myriad):
    code, out, err = myriad("train", "tiny", "--json", "--run", "other/place", "--layout.dp", "2")
    summary = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (summary["state"], summary["steps"], summary["world"]) == ("finished", 20, 2)
    assert summary["validation_bits_per_byte"] == 1.25
    assert summary["run"] == "other/place" and Path("other/place/job.toml").exists()


def files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


REFUSED = [
    ("layout.pp", ["--layout.pp", "2"]),
    ("optimizer.learning_rate", ["--optimizer.learning_rate", "1e-4"]),
    ("train.steps", ["--train.steps", "10"]),
    ("checkpoint.restart_from_scratch", ["--checkpoint.restart-from-scratch"]),
]


def test_a_finished_run_is_left_alone_and_can_be_made_longer(myriad):
    assert myriad("train", "tiny", "--run", "runs/my run")[0] == 0
    before = files()
    code, out, _ = myriad("train", "my run")
    assert code == 0 and "already finished" in out and "--train.steps 40" in out
    for key, keys in REFUSED:  # it would ignore them
        code, out, err = myriad("train", "my run", *keys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"myriad: error: {key} = ") and "was not used" in err
        assert "--train.steps 40" in err and "--run NAME" in err
    code, _, err = myriad("train", "my run", "--train.seed", "9")
    assert (code, err.count("\n")) == (2, 1)
    assert "train.seed = 9" in err and "which a resume cannot change" in err
    assert files() == before
    code, out, _ = myriad("train", "my run", "--train.steps", "25")
    assert code == 0 and "resuming from step 20" in out
    assert "myriad train 'runs/my run' --train.steps 50" in out
    assert [line["step"] for line in Run("runs/my run").read_metrics()] == list(range(1, 26))


def test_a_start_over_is_allowed_on_the_command_line_alone(myriad):
    Path("job.toml").write_text("checkpoint.restart_from_scratch = true\n")
    code, _, err = myriad("train", "job.toml", "--run", "one")
    assert code == 2 and "checkpoint.restart_from_scratch = true: applies to one start" in err
    assert myriad("train", "tiny", "--checkpoint.restart-from-scratch")[0] == 0
    assert not Run("runs/tiny").job().checkpoint.restart_from_scratch


def test_ctrl_c_saves_and_prints_a_command_that_resumes(myriad, monkeypatch):
    monkeypatch.setenv("FAKE_STOP_STEP", "7")
    code, out, _ = myriad("train", "tiny", "--train.seed", "3")
    assert code == 130
    assert "saving" in out and "stopped at step 7; `myriad train runs/tiny` resumes from there" in out
    monkeypatch.delenv("FAKE_STOP_STEP")
    run = Run("runs/tiny")
    before, was = run.job_path.read_bytes(), run.job().optimizer.learning_rate
    code, _, err = myriad("train", "tiny", "--train.seed", "3", "--checkpoint.url", "wrong")
    assert code == 2 and "which stored step 7 in runs/tiny/checkpoints" in err and err.count("\n") == 1
    assert run.job_path.read_bytes() == before

    code, out, err = myriad("train", "runs/tiny", "--optimizer.learning_rate", "0.0005")
    assert (code, err) == (0, "") and "resuming from step 7" in out
    assert f"changed after step 7: optimizer.learning_rate = {was} -> 0.0005" in out
    assert "myriad train runs/tiny --train.steps 40" in out
    job = run.job()
    assert (job.train.seed, job.optimizer.learning_rate) == (3, 0.0005)


@pytest.mark.slow
def test_a_failed_rank_ends_the_command_with_one_line_and_exit_code_1(myriad, monkeypatch):
    monkeypatch.setenv("FAKE_NAN_STEP", "5")
    code, out, err = myriad("train", "tiny")
    assert (
        code == 1
        and "before the first step was saved; `myriad train runs/tiny` starts from the first step" in out
    )
    assert err.startswith(
        "myriad: error: rank 0: loss = nan: step 5, rank 0, first bad tensor blocks.1.mlp.up"
    )
    assert err.count("\n") == 1
    code, out, err = myriad("train", "tiny", "--json")
    told = json.loads(out)  # one object, of the run and of what ended it
    assert (code, told["state"], err.count("\n")) == (1, "failed", 1)
    assert told["error"]["exit_code"] == 1 and told["error"]["message"].startswith("rank 0: loss = nan")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tiny", "--layout.tp", "3"], "layout.tp = 3: must divide"),
        (["tiny", "--layot.tp", "2"], "did you mean layout.tp?"),
        (["tiny", "--tp", "2"], "did you mean --layout.tp?"),
        (["tiny", "--bs", "8"], "did you mean --train.global_batch?"),
        (["tiny", "--optimiser.lr", "1"], "did you mean optimizer.learning_rate?"),
        (["tiny", "--oversubscrib"], "did you mean --oversubscribe?"),
        (["tiny", "--layout.dp", "1024", "--train.global_batch", "1024"], "layout (ranks) = 1024: at most"),
        (["tinny"], "did you mean tiny?"),
        (["tiny", "--train.kernels", "triton"], "no kernel for norm: no CUDA device"),
        (["tiny", "--train.device", "cuda"], "no CUDA device here"),
        (["tiny", "stray"], "unexpected extra argument"),
        (["tiny", "--run", "/proc/none/run"], "must be a writable folder"),
        (["."], "run folder"),
        (["tiny", "--run", ""], '--run = "": must not be empty'),
    ],
)
def test_bad_input_gets_one_line_exit_code_2_and_leaves_no_trace(myriad, monkeypatch, arguments, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, err = myriad("train", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("myriad: error: ") and told in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_more_ranks_than_cores_run_when_asked_for(myriad, monkeypatch):
    monkeypatch.setattr(local, "num_cores", lambda: 1)
    assert myriad("train", "tiny", "--layout.pp", "2")[0] == 2
    code, out, _ = myriad("train", "tiny", "--layout.pp", "2", "--oversubscribe")
    assert code == 0 and "2 ranks on cpu" in out and "runs/tiny --oversubscribe --train.steps" in out


def corpus_file(path: Path, vocabulary: int) -> None:
    """A folder with Megatron files and a tokenizer, of random tokens."""
    from myriad.data.indexed import IndexedWriter, token_type
    from myriad.data.tokenizer import Tokenizer

    path.mkdir()
    Tokenizer.train([" ".join(str(number**3) for number in range(900))], vocabulary).save(path)
    with IndexedWriter(path / "text", token_type(vocabulary)) as writer:
        writer.add([number % 256 for number in range(4096)])


@pytest.mark.parametrize(
    ("corpus", "told"), [("nowhere", "no such corpus"), ("empty", "empty"), ("empty/none", "no such corpus")]
)
def test_a_missing_or_empty_corpus_is_reported_before_anything_starts(myriad, corpus, told):
    Path("empty").mkdir()
    code, _, err = myriad("train", "tiny", "--data.corpus", corpus)
    assert code == 2 and corpus in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_run_keeps_its_tokenizer_and_does_not_continue_with_another(myriad):
    corpus_file(Path("corpus"), 300)
    keys = ["--data.corpus", "corpus/text", "--run", "one"]
    assert myriad("train", "tiny", *keys)[0] == 0
    shutil.rmtree("corpus")
    kept = tokenizer_of(Run("runs/one"), Run("runs/one").job())
    assert kept is not None and kept.vocabulary == 300, "text is made of the weights without the corpus"
    corpus_file(Path("corpus"), 280)
    code, _, err = myriad("train", "tiny", *keys, "--train.steps", "30")
    assert code == 2 and "tokenizer" in err and err.count("\n") == 1
    Run("runs/one").events_path.unlink()
    code, _, err = myriad("train", "tiny", *keys, "--train.steps", "30")
    assert code == 2 and "tokenizer is not the one" in err, "the run's own tokenizer.json says so too"


@pytest.mark.slow
def test_a_damaged_tokenizer_is_written_again_and_a_longer_corpus_is_noted(myriad, monkeypatch):
    from myriad.data.indexed import IndexedWriter, token_type

    corpus_file(Path("corpus"), 300)
    keys = ["--data.corpus", "corpus/text", "--run", "one"]
    monkeypatch.setenv("FAKE_STOP_STEP", "7")
    myriad("train", "tiny", *keys)
    monkeypatch.delenv("FAKE_STOP_STEP")
    kept = Path("runs/one/tokenizer.json")
    good = kept.read_bytes()
    kept.write_bytes(good[: len(good) // 2])
    with IndexedWriter(Path("corpus/text"), token_type(300)) as writer:
        writer.add([number % 256 for number in range(8192)])
    code, out, _ = myriad("train", "tiny", *keys)
    assert code == 0 and "changed after step 7: tokens of data.corpus = 4096 -> 8192" in out
    assert kept.read_bytes() == good


def test_a_corpus_with_more_tokens_than_the_model_has_is_refused(myriad):
    corpus_file(Path("corpus"), 300)
    keys = ["--data.corpus", "corpus/text", "--model.vocabulary", "290"]
    code, _, err = myriad("train", "tiny", *keys)
    assert code == 2 and "at least the corpus's" in err and err.count("\n") == 1


def test_a_later_attempt_does_not_read_a_corpus_that_was_replaced():
    corpus_file(Path("corpus"), 300)
    run, job = Run("run"), load_job("tiny", ["data.corpus=corpus/text"])
    run.create_or_resume(job)
    corpora = open_inputs(job, print)
    refuse_replaced_corpus(run, job, corpora.content)
    assert note_corpus(run, corpora) == []
    refuse_replaced_corpus(run, job, corpora.content)
    with pytest.raises(
        BadInputError, match=r"data\.corpus = \"corpus/text\": the corpus that this run began"
    ):
        refuse_replaced_corpus(run, job, "another")
