"""The two kinds of pods of a run: the driver's, and those of nodes and spares, with the labels that find
them.
"""

from typing import Any

from myriad.job import Job
from myriad.launchers.kubernetes.cluster_settings import PodSettings, Toleration, quantity
from myriad.system.machine import MACHINE
from myriad.wire.run_secret import SECRET_FILE

__all__ = [
    "INDEX_LABEL",
    "JOB_FILE",
    "NAMESPACE",
    "NODE_ROLE",
    "ROLE_LABEL",
    "RUN_LABEL",
    "RUN_NAME",
    "driver_job",
    "node_job",
]

JOB_FILE = "job.toml"
_JOB_FOLDER, _SECRET_FOLDER = "/etc/myriad/job", "/etc/myriad/secret"
_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130
"""Exit codes of `myriad train`: failed, bad input, interrupted."""
_FOR_EVER = 2**31 - 1
_AWAY_SECONDS = 15
"""How long a machine may be unreachable before its pod is given up; the cluster's default is five minutes."""
_END_SECONDS = 30


def driver_job(job: Job, settings: PodSettings) -> dict[str, Any]:
    """Return the driver's Job. The exit code decides what follows; a driver that was killed is replaced, and
    training continues."""
    codes = {"containerName": "driver", "operator": "In"}
    answered = [_FAILED, _BAD_INPUT, _INTERRUPTED]
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": [_FAILED, _BAD_INPUT]}},
        {"action": "Count", "onExitCodes": {**codes, "values": [_INTERRUPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "operator": "NotIn", "values": answered}},
    ]
    pod = {
        "restartPolicy": "Never",
        "serviceAccountName": settings.run,
        "terminationGracePeriodSeconds": int(job.checkpoint.timeout_seconds) + _END_SECONDS,
        "containers": [_driver_container(settings)],
        "volumes": [*_volumes(settings), {"name": "job", "configMap": {"name": settings.run}}],
    }
    return {
        "parallelism": 1,
        "completions": 1,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": _pod_metadata(settings, "driver"), "spec": pod},
    }


def _driver_container(settings: PodSettings) -> dict[str, Any]:
    folder = f"{settings.mount}/{settings.run}"
    train = ["myriad", "train", f"{_JOB_FOLDER}/{JOB_FILE}", "--run", folder]
    return {
        "name": "driver",
        "image": settings.image,
        "command": [*train, "--resilience.listen", "$(POD_IP)"],
        "workingDir": settings.mount,
        "env": [
            *_environment(),
            _from_pod("POD_IP", "status.podIP"),
            {"name": RUN_NAME, "value": settings.run},
            {"name": NAMESPACE, "value": settings.namespace},
        ],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},
        "readinessProbe": {
            "exec": {"command": ["test", "-s", f"{folder}/driver.json"]},
            "periodSeconds": 2,
        },
        "volumeMounts": [*_mounts(settings), {"name": "job", "mountPath": _JOB_FOLDER, "readOnly": True}],
    }


def node_job(settings: PodSettings, pods: int) -> dict[str, Any]:
    """Return the Job of the nodes and spares, with ``pods`` pods."""
    pod: dict[str, Any] = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "shareProcessNamespace": True,  # the pause container reaps processes that outlive their parent
        "terminationGracePeriodSeconds": _END_SECONDS,
        "affinity": {"podAntiAffinity": _alone_on_a_machine(settings)},
        "tolerations": _tolerations(settings),
        "containers": [_node_container(settings)],
        "volumes": [*_volumes(settings), {"name": "memory", "emptyDir": {"medium": "Memory"}}],
    }
    if settings.select:
        pod["nodeSelector"] = dict(settings.select)
    return {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": _FOR_EVER,
        "template": {"metadata": _pod_metadata(settings, NODE_ROLE), "spec": pod},
    }


def _node_container(settings: PodSettings) -> dict[str, Any]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return {
        "name": NODE_ROLE,
        "image": settings.image,
        "command": ["myriad", "join", f"{settings.mount}/{settings.run}", "--node", "$(MYRIAD_NODE)"],
        "workingDir": settings.mount,
        "env": [*_environment(), _from_pod("MYRIAD_NODE", index), _from_pod(MACHINE, "spec.nodeName")],
        "resources": _resources(settings),
        "volumeMounts": [*_mounts(settings), {"name": "memory", "mountPath": "/dev/shm"}],
    }


def _resources(settings: PodSettings) -> dict[str, Any]:
    requests: dict[str, str] = {name: str(count) for name, count in settings.resources.items()}
    if settings.gpus:
        requests[settings.gpu_resource] = str(settings.gpus)
    if settings.cpus is not None:
        requests["cpu"] = str(settings.cpus)
    if settings.memory is not None:
        requests["memory"] = quantity(settings.memory)
    # a CPU limit would throttle ranks
    limits = {name: value for name, value in requests.items() if name != "cpu"}
    return {"requests": requests, "limits": limits} if requests else {}


def _pod_metadata(settings: PodSettings, role: str) -> dict[str, Any]:
    return {"labels": {RUN_LABEL: settings.run, ROLE_LABEL: role}}


def _alone_on_a_machine(settings: PodSettings) -> dict[str, Any]:
    labels = {"matchLabels": {RUN_LABEL: settings.run, ROLE_LABEL: NODE_ROLE}}
    term = {"labelSelector": labels, "topologyKey": "kubernetes.io/hostname"}
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _tolerations(settings: PodSettings) -> list[dict[str, Any]]:
    away = [
        {
            "key": f"node.kubernetes.io/{what}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _AWAY_SECONDS,
        }
        for what in ("not-ready", "unreachable")
    ]
    gpu = [_toleration(Toleration(key=settings.gpu_resource))] if settings.gpus else []
    return [*away, *gpu, *map(_toleration, settings.tolerate)]


def _toleration(one: Toleration) -> dict[str, Any]:
    found: dict[str, Any] = {"key": one.key, "operator": "Exists" if one.value is None else "Equal"}
    if one.value is not None:
        found["value"] = one.value
    if one.effect is not None:
        found["effect"] = one.effect
    return found


# Parts of both kinds of pods


def _environment() -> list[dict[str, Any]]:
    return [{"name": SECRET_FILE, "value": f"{_SECRET_FOLDER}/secret"}]


def _from_pod(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volumes(settings: PodSettings) -> list[dict[str, Any]]:
    claim = {"claimName": settings.claim}
    secret = {"secretName": settings.run}
    return [{"name": "runs", "persistentVolumeClaim": claim}, {"name": "secret", "secret": secret}]


def _mounts(settings: PodSettings) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "mountPath": settings.mount},
        {"name": "secret", "mountPath": _SECRET_FOLDER, "readOnly": True},
    ]


RUN_LABEL, ROLE_LABEL, NODE_ROLE = "myriad/run", "myriad/role", "node"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""The node's number; the Job writes it on each pod, since Kubernetes 1.28."""
RUN_NAME, NAMESPACE = "MYRIAD_KUBERNETES_RUN", "MYRIAD_KUBERNETES_NAMESPACE"
"""Environment variables of the driver's pod: name and namespace of the run's pods."""
