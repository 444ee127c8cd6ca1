"""The commands that `myriad manifests` puts into pods do what they are there for: run here as processes,
with the pods' files and variables, they train; when a pod dies another has its ranks."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from same_run import slow_steps
from tiny_corpora import make_corpus
from watching import wait_until

from myriad.job import load_job
from myriad.launchers.kubernetes.cluster_settings import PodSettings
from myriad.launchers.kubernetes.jobset_manifests import make_manifests
from myriad.run import Run

_KEYS = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=24"]
_KEYS += ["layout.dp=2", "layout.micro_batch=2", "resilience.spares=1"]
_KEYS += ["resilience.engine=kubernetes", "checkpoint.linger_seconds=5", "checkpoint.memory_seconds=0"]


class Pods:
    """As processes: files of the volumes lie in a folder, the API server does not answer."""

    def __init__(self, objects: list[dict[str, Any]], root: Path) -> None:
        self._objects = {one["kind"]: one for one in objects}
        self._root = root
        (root / "etc/myriad/job").mkdir(parents=True)
        (root / "etc/myriad/secret").mkdir()
        for name, text in self._objects["ConfigMap"]["data"].items():
            (root / "etc/myriad/job" / name).write_text(text)
        (root / "etc/myriad/secret/secret").write_text("0123456789abcdef" * 4)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, node: int = 0) -> "subprocess.Popen[bytes]":
        jobs = {
            one["name"]: one["template"]["spec"] for one in self._objects["JobSet"]["spec"]["replicatedJobs"]
        }
        (container,) = jobs[role]["template"]["spec"]["containers"]
        told = {"status.podIP": "127.0.0.1", "spec.nodeName": f"m{node}", "metadata.annotations": str(node)}
        variables = {one["name"]: self._value(one, told) for one in container["env"]}
        words = [self._here(word) for word in container["command"]]
        for name, value in variables.items():
            words = [word.replace(f"$({name})", value) for word in words]
        cluster = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "9"}
        # as in an image with Myriad in it
        cluster["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words[0] = shutil.which(words[0], path=cluster["PATH"]) or words[0]
        with (self._root / f"{role}-{node}.log").open("ab") as log:
            process = subprocess.Popen(
                words,
                env=os.environ | variables | cluster,
                cwd=container["workingDir"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def _value(self, variable: dict[str, Any], told: dict[str, str]) -> str:
        if "value" in variable:
            return self._here(variable["value"])
        return told[variable["valueFrom"]["fieldRef"]["fieldPath"].partition("[")[0]]

    def _here(self, text: str) -> str:
        return text.replace("/etc/myriad", f"{self._root}/etc/myriad")

    def log(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in self._root.glob("*.log"))


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Their ranks sleep for most of each step, so that the run lasts until a pod has died."""
    for name, value in slow_steps(tmp_path / "faults", 20.0).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "corpus").mkdir()
    corpus = make_corpus(tmp_path / "corpus", count=300)
    job = load_job("tiny", [f"data.corpus={corpus}", *_KEYS])
    (tmp_path / "runs").mkdir()
    settings = PodSettings(run="small", image="none", mount=str(tmp_path / "runs"))
    found = Pods(make_manifests(job, settings), tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def test_pods_train_and_one_that_dies_is_replaced(pods: Pods, tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "small")
    driver = pods.start("driver")
    wait_until(lambda: (run.path / "driver.json").exists(), 60)  # the readiness probe
    node = pods.start("node", 0)
    wait_until(lambda: len(run.read_metrics()) >= 1, 120)
    spare = pods.start("node", 1)
    wait_until(lambda: any(event["event"] == "spares" for event in run.read_events()), 120)
    os.kill(node.pid, signal.SIGKILL)
    assert driver.wait(240) == 0, pods.log()
    assert spare.wait(60) == 0, pods.log()
    events = [event["event"] for event in run.read_events()]
    assert events.count("restart") == 1 and events[-1] == "finish"
    assert not (run.path / "secret").exists(), "the secret lies in the shared folder"
    steps = [line["step"] for line in run.read_metrics()]
    assert steps == list(range(1, 25))
