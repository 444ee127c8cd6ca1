"""The launcher of a run on Kubernetes, in its driver's pod: pods join by themselves, and bad machines are
replaced.

    the driver gives a node up ──► its container was restarted, or its pod is ending: nothing to do
                                   its machine is not ready: the pod is deleted
                                   all seem healthy: the machine is cordoned and the pod deleted; the Job
                                   creates the pod again on another machine

A person can do the same: ``kubectl cordon MACHINE && kubectl delete pod POD``. A run cordons at most as many
machines as it has spares, and at least one may be: if the network fails, the machines are not the cause. A
thread does all of this, so the launcher does not wait for it; failures are logged.
"""

import json
import logging
import os
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.launchers.kubernetes.pods import (
    INDEX_LABEL,
    NAMESPACE,
    NODE_ROLE,
    ROLE_LABEL,
    RUN_LABEL,
    RUN_NAME,
)
from myriad.launchers.launcher import Observer, Outcome
from myriad.launchers.supervised_run import supervise_run
from myriad.run import Run
from myriad.supervise.driver_address import check_listen

__all__ = ["Api", "KubernetesLauncher"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 10.0
_GRACE_SECONDS = 5
_CORDONED_BY = "myriad/cordoned-by"


_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Api:
    """Client of one API server, for use in one thread."""

    def __init__(self, url: str, account: Path = _ACCOUNT) -> None:
        """``account``: the folder with ``token`` and ``ca.crt``."""
        self._url, self._account = url, account

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """Return an object, or a list of objects. Raises `_ApiError`."""
        return self._ask("GET", f"{path}?{urllib.parse.urlencode(query)}" if query else path)

    def patch(self, path: str, change: dict[str, Any]) -> None:
        """Merge ``change`` into an object. Raises `_ApiError`."""
        self._ask("PATCH", path, change, _MERGE)

    def delete(self, path: str, grace_seconds: int) -> None:
        """Request the deletion of an object. Raises `_ApiError`."""
        self._ask("DELETE", path, {"gracePeriodSeconds": grace_seconds})

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": kind}
            request = urllib.request.Request(self._url + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS, context=self._context()) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise _ApiError(f"{method} {path}: {error.code} {error.reason}") from None
        except (OSError, ValueError) as error:
            raise _ApiError(f"{method} {path}: {error}") from None
        if not isinstance(found, dict):
            raise _ApiError(f"{method} {path}: no object")
        return found

    def _token(self) -> str:
        """Read the token each time, because it is renewed every hour."""
        return (self._account / "token").read_text().strip()

    def _context(self) -> ssl.SSLContext | None:
        if not self._url.startswith("https:"):
            return None
        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


class KubernetesLauncher:
    """Replaces the machines of a run; its pods have the label ``name``."""

    def __init__(self, run: Run, api: Api, namespace: str, name: str, spares: int) -> None:
        self._run, self._api, self._namespace, self._name = run, api, namespace, name
        self._most_cordons = max(1, spares)
        self._restarts: dict[int, int] = {}
        """Last known number of restarts of each node's container."""
        self._given_up: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kubernetes", daemon=True)

    def start(self) -> None:
        """Start the thread; pods join by themselves."""
        self._thread.start()

    def poll(self) -> None:
        """Do nothing: Kubernetes restarts containers and pods."""

    def replace(self, node: int) -> None:
        """Replace the machine of a node, in the thread."""
        self._given_up.put(node)

    def ask_to_stop(self) -> None:
        """Do nothing: the driver notifies the agents."""

    def wait(self, seconds: float) -> None:
        """Do nothing: the driver notifies the agents."""

    def close(self) -> None:
        """End the thread; JobSet ends the other pods after the driver's pod."""
        self._given_up.put(None)

    def _work(self) -> None:
        while True:
            try:
                node = self._given_up.get(timeout=_POLL_SECONDS)
            except Empty:
                self._guarded(self._poll)
                continue
            if node is None:
                return
            self._guarded(self._leave, node)

    def _guarded(self, what: Any, *arguments: int) -> None:
        try:
            what(*arguments)
        except (_ApiError, KeyError, TypeError, ValueError) as error:
            _LOG.warning("Kubernetes: %s", error)

    def _poll(self) -> None:
        """Read how often each node's container was restarted."""
        for node, pod in self._pods().items():
            self._restarts[node] = _num_restarts(pod)

    def _pods(self, node: int | None = None) -> dict[int, dict[str, Any]]:
        """Return the newest running pod of each node that is not being deleted; ``node``: only this
        node's."""
        selector = f"{RUN_LABEL}={self._name},{ROLE_LABEL}={NODE_ROLE}"
        selector += "" if node is None else f",{INDEX_LABEL}={node}"
        found = self._api.get(f"/api/v1/namespaces/{self._namespace}/pods", labelSelector=selector)
        pods = sorted(found["items"], key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        return {
            int(pod["metadata"]["labels"][INDEX_LABEL]): pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
        }

    def _leave(self, node: int) -> None:
        pod = self._pods(node).get(node)
        if pod is None:
            _LOG.info("node %d has no pod that runs: its Job sees to it", node)
            return
        before, now = self._restarts.get(node, 0), _num_restarts(pod)
        self._restarts[node] = now
        if now > before:
            _LOG.info("the container of node %d was restarted, and comes back by itself", node)
            return
        machine, name = str(pod["spec"]["nodeName"]), str(pod["metadata"]["name"])
        cordoned = self._cordon(machine)
        self._api.delete(f"/api/v1/namespaces/{self._namespace}/pods/{name}", _GRACE_SECONDS)
        self._run.append_event("replace", node=node, machine=machine, pod=name, cordoned=cordoned)

    def _cordon(self, machine: str) -> bool:
        """Cordon a machine, if the run may; return whether it is cordoned."""
        if self._most_cordons == 0:
            _LOG.warning("%s stays in service: this run has taken out as many as it may", machine)
            return False
        path = f"/api/v1/nodes/{machine}"
        by = {_CORDONED_BY: f"{self._namespace}.{self._name}"}
        try:
            if not _is_ready(self._api.get(path)):
                return False
            self._api.patch(path, {"metadata": {"annotations": by}, "spec": {"unschedulable": True}})
        except _ApiError as error:  # the run may lack the permission: the pod can be replaced all the same
            _LOG.warning("%s stays in service: %s", machine, error)
            return False
        self._most_cordons -= 1
        return True


def _num_restarts(pod: dict[str, Any]) -> int:
    return sum(int(one["restartCount"]) for one in pod["status"].get("containerStatuses", ()))


def _is_ready(machine: dict[str, Any]) -> bool:
    """Whether the machine is ready and not cordoned."""
    conditions = {one["type"]: one["status"] for one in machine["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and not machine["spec"].get("unschedulable", False)


_GATHER_SECONDS = 3600.0
"""How long to wait for nodes: a cluster may have to grow, and images must be pulled."""


def check_kubernetes(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuse to start outside the driver's pod. Raises `BadInputError`."""
    if _in_cluster() is None or RUN_NAME not in os.environ or NAMESPACE not in os.environ:
        allowed = "only in the driver's pod; `myriad manifests JOB --image IMAGE` writes what to apply"
        raise BadInputError("resilience.engine", "kubernetes", allowed)
    check_listen(job.resilience.listen)


def run_kubernetes(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Train ``world`` ranks in pods that join. Raises `RunFailedError`."""
    api = _in_cluster()
    assert api is not None, "it was checked"
    spares = run.job().resilience.spares
    engine = KubernetesLauncher(run, api, os.environ[NAMESPACE], os.environ[RUN_NAME], spares)
    return supervise_run(run, world, engine, observer, gather_seconds=_GATHER_SECONDS)


_ANSWER_SECONDS = 10.0
_MERGE = "application/merge-patch+json"


class _ApiError(Exception):
    """A request failed, or the API server refused it."""


def _in_cluster() -> Api | None:
    """Return the client for the cluster of this pod; ``None`` outside a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return Api(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
