"""A Slurm cluster of the test's own on this machine: one slurmctld, and a slurmd for each node, in a process
namespace of its own, so that a node can be lost with all that runs on it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ranks import free_port
from watching import descendants

from myriad.system import child_process

__all__ = ["SlurmCluster", "missing"]

_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "unshare")
_CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmctldAddr=127.0.0.1
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
JobRequeue=1
ReturnToService=1
SlurmdTimeout=10
MessageTimeout=5
KillWait=2
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool-%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd-%n.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


def missing() -> str | None:
    """Why there can be no cluster here; ``None`` where there can."""
    if os.geteuid() != 0:
        return "slurmctld and slurmd need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client)"
    probe = subprocess.run(["unshare", "-p", "-f", "--mount-proc", "true"], capture_output=True, text=True)
    return f"no process namespaces here: {probe.stderr.strip()}" if probe.returncode else None


class SlurmCluster:
    """Nodes n0, n1, ..."""

    def __init__(self, path: Path, num_nodes: int, topology: str | None = None) -> None:
        """``topology``: what topology.conf says; off: there is none."""
        self.path, self.names = path, [f"n{number}" for number in range(num_nodes)]
        (path / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=999"
            for name in self.names
        )
        self._conf = path / "slurm.conf"
        text = _CONF.format(host=host, port=free_port(), path=path, nodes=nodes)
        if topology is not None:
            (path / "topology.conf").write_text(topology)
            text += "TopologyPlugin=topology/tree\n"
        self._conf.write_text(text)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> Mapping[str, str]:
        """With which commands find this cluster."""
        return {"SLURM_CONF": str(self._conf)}

    def start(self) -> "SlurmCluster":
        """Returns when all nodes are idle."""
        self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self._conf)])
        for name in self.names:
            self.start_node(name)
        deadline = time.monotonic() + 60
        while self.states() != dict.fromkeys(self.names, "idle"):
            assert time.monotonic() < deadline, f"the nodes do not come up: {self.states()}"
            time.sleep(0.1)
        return self

    def start_node(self, name: str) -> None:
        """It boots."""
        slurmd = ["slurmd", "-D", "-N", name, "-f", str(self._conf)]
        self._start(name, ["unshare", "-p", "-f", "--mount-proc", "--kill-child=SIGKILL", *slurmd])

    def _start(self, name: str, command: list[str]) -> None:
        with (self.path / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-S", child_process.__file__, str(os.getpid()), *command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, *command: str) -> str:
        """What a command of Slurm says."""
        environment = {**os.environ, **self.environment}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return ended.stdout + ended.stderr

    def states(self) -> dict[str, str]:
        """Of each node, as sinfo has them."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines if len(line.split()) == 2)

    def lose_node(self, name: str) -> None:
        """All that runs there dies with it, without a word."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def silence(self, daemon: str) -> None:
        """Stop ``slurmctld``, or every ``slurmd``: connections are accepted, and nothing is answered."""
        for process in self._processes.values():
            for pid in (process.pid, *descendants(process.pid)):
                with suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() == daemon:
                        os.kill(pid, signal.SIGSTOP)

    def stop(self) -> None:
        """Nothing of it is left."""
        for name in reversed(list(self._processes)):
            with suppress(ProcessLookupError):
                self.lose_node(name)
