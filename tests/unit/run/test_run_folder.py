"""The run folder: what is refused, what may change, and that a kill at any instant leaves it readable."""

import json
import re
import shutil
from pathlib import Path

import pytest

from myriad.config import dump_toml
from myriad.errors import BadInputError
from myriad.job import job_keys, load_job
from myriad.job.job_changes import RESUME_RULES, ResumeRule
from myriad.run import Run
from myriad.system.jsonl import JsonlTail


def files(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "runs" / "one")


def test_a_new_run_keeps_its_whole_job(run):
    job = load_job("tiny", ["layout.tp=2"])
    assert run.create_or_resume(job) is False
    assert run.job() == job
    assert run.create_or_resume(job) is True


def test_a_changed_job_file_is_read_again_and_so_is_a_model_that_it_names(run, tmp_path):
    for steps in (300, 400):
        run.create_or_resume(load_job("tiny", [f"train.steps={steps}"]))
        assert run.job().train.steps == steps
    own = load_job("tiny").model
    text = 'model = "{}"\ndata = {{ vocabulary = 512 }}\ntrain = {{ global_batch = 8, steps = 300 }}\n'
    for hidden in (64, 128):
        (tmp_path / "own.toml").write_text(dump_toml(own.model_copy(update={"hidden": hidden})))
        run.job_path.write_text(text.format(tmp_path / "own.toml"))
        assert run.job().model.hidden == hidden


def test_weights_and_logs_of_a_new_run_can_be_read_by_its_user_alone(run):
    with run.lock():
        run.create_or_resume(load_job("tiny", []))
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.path.chmod(0o750)
    run.create_or_resume(load_job("tiny", []))
    assert run.path.stat().st_mode & 0o777 == 0o750, "shared on purpose"


def test_a_folder_that_others_can_write_is_named_and_its_new_files_are_not_theirs(run, caplog):
    run.path.mkdir(parents=True)
    with run.lock():
        pass
    assert not caplog.messages
    run.path.chmod(0o777)
    with run.lock():
        run.create_or_resume(load_job("tiny", []))
    assert "all users can replace what is in this folder" in caplog.text
    assert not [path for path in run.path.rglob("*") if path.stat().st_mode & 0o002]


def test_readers_of_a_run_cannot_take_its_lock(run):
    run.path.mkdir(parents=True)
    (run.path / "lock").touch(0o644)  # of an earlier version
    with run.lock():
        run.create_or_resume(load_job("tiny", ["run.mode=0755"]))
    assert run.path.stat().st_mode & 0o777 == 0o755
    assert (run.path / "lock").stat().st_mode & 0o777 == 0o600, "who can open a file can lock it"


@pytest.mark.parametrize(
    "override",
    ["layout.dp=2", "layout.zero=1", "train.threads=1", "train.steps=40", "train.validate_every=5",
     "train.device=cpu", "checkpoint.every=3", "train.collect_garbage_every=0", "overlap.tensor_chunks=4",
     "comm.hierarchy=node", "comm.timeout_seconds=60", "comm.network_bandwidth=1e9",
     "train.cuda_graphs=true", "train.memory_budget=1 GiB", "optimizer.learning_rate=2e-3",
     "optimizer.clip_norm=off", "optimizer.warmup_steps=9", "data.corpus=elsewhere",
     "train.precision=float8", "train.global_batch=16"],
)  # fmt: skip
def test_a_resume_may_change_this_and_the_old_value_is_an_event(run, override):
    run.create_or_resume(load_job("tiny"))
    run.append_metrics({"step": 7})
    before, changed = run.job(), load_job("tiny", [override])
    assert run.create_or_resume(changed) is True
    assert run.job() == changed
    section, key = override.partition("=")[0].split(".")
    (event,) = run.read_events()
    assert (event["event"], event["key"], event["step"]) == ("job_changed", f"{section}.{key}", 7)
    assert event["before"] == getattr(getattr(before, section), key)
    assert event["after"] == getattr(getattr(changed, section), key)
    assert run.create_or_resume(changed) is True and len(run.read_events()) == 1, "nothing has changed"


@pytest.mark.parametrize(
    "override", ["optimizer.name=lamb", "train.seed=7", "model.layers=3", "data.vocabulary=300"]
)
def test_what_a_resume_cannot_change_is_refused_with_both_values_and_nothing_is_touched(run, override):
    run.create_or_resume(load_job("tiny"))
    before = files(run.path)
    key = override.partition("=")[0]
    with pytest.raises(BadInputError, match=rf"^{key} = .*which a resume cannot change .*--run") as caught:
        run.create_or_resume(load_job("tiny", [override]))
    assert "\n" not in str(caught.value)
    assert files(run.path) == before


def test_every_key_has_one_rule_which_the_docs_page_repeats():
    keys = [key for key, _ in job_keys()]
    matches = {key: [rule for rule in RESUME_RULES if is_of(rule, key)] for key in keys}
    assert [key for key, rules in matches.items() if len(rules) != 1] == []
    page = (Path(__file__).parents[3] / "docs" / "guide" / "resume.md").read_text()
    rows = {
        tuple(re.findall(r"`([^`]+)`", row[0])): (row[1].strip(), row[2].strip())
        for row in (
            line.strip("|").split("|")
            for line in page.split("## When")[0].splitlines()
            if line.startswith("| `")
        )
    }
    assert rows == {rule.keys: ("yes" if rule.may_change else "no", rule.why) for rule in RESUME_RULES}


def is_of(rule: ResumeRule, key: str) -> bool:
    named = any(key in other.keys for other in RESUME_RULES)
    return key in rule.keys or (not named and f"{key.partition('.')[0]}.*" in rule.keys)


@pytest.mark.parametrize("damage", ["", "name = ", "cut"])
def test_a_damaged_job_file_is_refused_with_the_copy_to_restore(run, damage):
    run.create_or_resume(load_job("tiny"))
    copy = run.checkpoints_path / "step-3" / "job.toml"
    copy.parent.mkdir()
    text = run.job_path.read_text()
    copy.write_text(text)
    run.job_path.write_text(text[: text.index("[optimizer]")] if damage == "cut" else damage)
    with pytest.raises(BadInputError, match=rf"is damaged .*: cp {copy} {run.job_path}$") as caught:
        run.job()
    assert "\n" not in str(caught.value)
    run.job_path.write_text('name = "mine"\n')
    assert run.job().name == "mine", "a person may write a short one, for torchrun"


def test_a_job_file_of_another_version_is_named_with_the_key_that_is_not_known(run):
    run.create_or_resume(load_job("tiny"))
    text = run.job_path.read_text()
    run.job_path.write_text(text.replace("[train]\n", "[train]\nof_later = 3\n", 1))
    words = (
        rf"run = \"{run.job_path}\": has train.of_later = 3: unknown key.*the version of Myriad that wrote it"
    )
    with pytest.raises(BadInputError, match=words) as caught:
        run.job()
    assert "\n" not in str(caught.value)


def test_the_permission_to_start_over_holds_for_one_start_and_is_never_kept(run):
    run.create_or_resume(load_job("tiny", ["checkpoint.restart_from_scratch=true"]))
    assert "restart_from_scratch = false" in run.job_path.read_text()
    run.append_event("checkpoint", step=20)
    assert run.past().stored_step == 20 and not run.past().may_start_over
    run.allow_restart(allowed=True)
    assert run.past().may_start_over
    run.allow_restart(allowed=False)
    assert not run.past().may_start_over, "the next start was typed without it"
    run.allow_restart(allowed=True)
    run.append_event("start", world=1)
    past = run.past()
    assert (past.may_start_over, past.stored_step, past.has_started_over) == (False, 0, True)
    run.append_event("checkpoint", step=5)
    assert run.past().stored_step == 5


def test_replicas_that_train_alone_must_stay_as_many_as_they_are(run):
    alone = ["comm.sync_every=5", "layout.dp=2"]
    run.create_or_resume(load_job("tiny", alone))
    before = files(run.path)
    with pytest.raises(BadInputError, match=r"^layout\.dp = 4: must stay 2: with comm\.sync_every > 1"):
        run.create_or_resume(load_job("tiny", ["comm.sync_every=5", "layout.dp=4"]))
    assert files(run.path) == before
    assert run.create_or_resume(load_job("tiny", [*alone, "train.steps=40"])) is True


def test_a_folder_with_other_files_is_not_taken_for_a_run(run):
    run.path.mkdir(parents=True)
    (run.path / "thesis.txt").write_text("precious")
    with pytest.raises(BadInputError, match="holds other files"):
        run.create_or_resume(load_job("tiny"))
    assert [path.name for path in run.path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_made_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"must be a writable folder \(Not a directory\)$"):
        Run(tmp_path / "file" / "run").create_or_resume(load_job("tiny"))
    with pytest.raises(BadInputError, match="must be a folder"):
        Run(tmp_path / "file").create_or_resume(load_job("tiny"))


def test_looking_at_a_run_that_is_not_there_is_reported(run):
    with pytest.raises(BadInputError, match="no run here"):
        run.job()
    assert run.read_metrics() == [] and run.read_events() == []
    assert not run.path.exists()


def test_a_run_at_work_is_not_started_twice(run):
    with run.lock():
        with pytest.raises(BadInputError, match="being trained by another process"), Run(run.path).lock():
            pass
    with run.lock():
        run.create_or_resume(load_job("tiny"))


def test_a_run_whose_folder_was_removed_while_it_trains_is_not_started_twice(run):
    """Both would write into the new folder."""
    with run.lock():
        shutil.rmtree(run.path)
        with pytest.raises(BadInputError, match="whose folder was removed"), Run(run.path).lock():
            pass
        (run.path / "metrics.jsonl").touch()  # it goes on writing
        with pytest.raises(BadInputError, match="whose folder was removed"):
            Run(run.path).check(load_job("tiny"))
    with run.lock():
        pass


def test_a_line_torn_by_a_kill_is_skipped_and_the_next_line_is_whole(run):
    run.path.mkdir(parents=True)
    run.append_metrics({"step": 1, "loss": 2.0})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [line["step"] for line in run.read_metrics()] == [1]
    run.append_metrics({"step": 2, "loss": 1.5})
    assert [(line["step"], line["loss"]) for line in run.read_metrics()] == [(1, 2.0), (2, 1.5)]


def test_steps_done_again_after_a_resume_count_once_and_lost_ones_do_not_count(run):
    run.path.mkdir(parents=True)
    for step in [1, 2, 3, 4, 5]:
        run.append_metrics({"step": step, "attempt": 1})
    for step in [3, 4]:
        run.append_metrics({"step": step, "attempt": 2})
    assert [(line["step"], line["attempt"]) for line in run.read_metrics()] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]


def test_a_loss_that_is_not_a_number_stays_valid_json(run):
    run.path.mkdir(parents=True)
    run.append_metrics({"step": 1, "loss": float("nan")})
    assert json.loads(run.metrics_path.read_text(), parse_constant=pytest.fail) == {"step": 1, "loss": None}


def test_a_follower_sees_each_line_once_and_only_when_it_is_complete(run):
    run.path.mkdir(parents=True)
    tail = JsonlTail(run.events_path)
    assert tail.poll() == []
    run.append_event("start", world=2)
    with run.events_path.open("a") as file:
        file.write('{"event": ')
        file.flush()
        assert [event["event"] for event in tail.poll()] == ["start"]
        file.write('"finish"}\n')
    assert [event["event"] for event in tail.poll()] == ["finish"]
    assert tail.poll() == []


@pytest.mark.parametrize("value", ["0777", "0770", "770", "rwx", "", "0640", "488"])
def test_a_mode_that_others_can_write_or_that_is_unusable_is_refused(value):
    with pytest.raises(BadInputError, match=r"run\.mode.*0700.*0750.*0755") as refused:
        load_job("tiny", [f"run.mode={value}"])
    assert "\n" not in str(refused.value)


def test_an_older_run_without_the_section_of_its_folder_is_read(run):
    run.create_or_resume(load_job("tiny"))
    sections = run.job_path.read_text().split("\n[")
    run.job_path.write_text("\n[".join(one for one in sections if not one.startswith("run]")))
    assert "[run]" not in run.job_path.read_text() and run.job() == load_job("tiny")
