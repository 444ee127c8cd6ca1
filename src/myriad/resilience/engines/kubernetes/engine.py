"""Pods are started by Kubernetes and join by themselves; what is left to do is to leave bad machines.

    the driver gives a node up ──► its container was restarted, or its pod is going: Kubernetes sees to it
                                   its machine is not ready: so is that; the pod is deleted
                                   all seem to be well: the machine is taken out of service, the pod deleted;
                                   the Job makes the pod anew on another machine

The same by hand: ``kubectl cordon MACHINE && kubectl delete pod POD``. A run takes no more machines out of
service than it has spares, one at least: when the network fails the machines are not to blame. All of this
happens in a thread, which neither waits for the run nor it for an API server; what fails is logged.
"""

import logging
import threading
from queue import Empty, SimpleQueue
from typing import Any

from myriad.resilience.engines.kubernetes.api import Api, ApiError
from myriad.resilience.engines.kubernetes.labels import INDEX_LABEL, NODE_ROLE, ROLE_LABEL, RUN_LABEL
from myriad.run import Run

__all__ = ["KubernetesEngine"]

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 10.0
_GRACE_SECONDS = 5
_CORDONED_BY = "myriad/cordoned-by"


class KubernetesEngine:
    """Of the run whose pods have the label ``name``."""

    def __init__(self, run: Run, api: Api, namespace: str, name: str, spares: int) -> None:
        self._run, self._api, self._namespace, self._name = run, api, namespace, name
        self._most_cordons = max(1, spares)
        self._restarts: dict[int, int] = {}
        """Of each node's container, as they were seen last."""
        self._given_up: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kubernetes", daemon=True)

    def start(self) -> None:
        """Pods come by themselves."""
        self._thread.start()

    def poll(self) -> None:
        """Kubernetes looks after them."""

    def replace(self, node: int) -> None:
        """Later, in the thread."""
        self._given_up.put(node)

    def ask_to_stop(self) -> None:
        """The driver tells them."""

    def wait(self, seconds: float) -> None:
        """They were told."""

    def close(self) -> None:
        """JobSet ends what is left when the driver's pod has ended."""
        self._given_up.put(None)

    def _work(self) -> None:
        while True:
            try:
                node = self._given_up.get(timeout=_LOOK_SECONDS)
            except Empty:
                self._guarded(self._look)
                continue
            if node is None:
                return
            self._guarded(self._leave, node)

    def _guarded(self, what: Any, *arguments: int) -> None:
        try:
            what(*arguments)
        except (ApiError, KeyError, TypeError, ValueError) as error:
            _LOG.warning("Kubernetes: %s", error)

    def _look(self) -> None:
        """At how often containers were restarted."""
        for node, pod in self._pods().items():
            self._restarts[node] = _num_restarts(pod)

    def _pods(self, node: int | None = None) -> dict[int, dict[str, Any]]:
        """The newest pod of each node that is not going; ``node``: of this one alone."""
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
        """Whether it is out of service now, by this run."""
        if self._most_cordons == 0:
            _LOG.warning("%s stays in service: this run has taken out as many as it may", machine)
            return False
        path = f"/api/v1/nodes/{machine}"
        by = {_CORDONED_BY: f"{self._namespace}.{self._name}"}
        try:
            if not _is_ready(self._api.get(path)):
                return False
            self._api.patch(path, {"metadata": {"annotations": by}, "spec": {"unschedulable": True}})
        except ApiError as error:  # it may have no right to: its pod can be replaced even so
            _LOG.warning("%s stays in service: %s", machine, error)
            return False
        self._most_cordons -= 1
        return True


def _num_restarts(pod: dict[str, Any]) -> int:
    return sum(int(one["restartCount"]) for one in pod["status"].get("containerStatuses", ()))


def _is_ready(machine: dict[str, Any]) -> bool:
    """And in service."""
    conditions = {one["type"]: one["status"] for one in machine["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and not machine["spec"].get("unschedulable", False)
