"""What is applied to a cluster to have a run there: a JobSet, and what it needs around it.

    JobSet RUN ─┬─ driver   one pod: `myriad train`. It drives, and starts no ranks
                └─ node     one pod for each node and each spare, never two on a machine: `myriad join`

Who restarts what, the nearest first: the driver its ranks, in place, within a second; the kubelet a container
whose executor has died, in place; the Job a pod whose machine is gone, on another one; JobSet everything,
when the driver was told to stop (its machine is drained: all is saved, and goes on elsewhere). A run that has
failed (exit code 1) or was given bad input (2) is not tried again: the JobSet has failed. JobSet's own
in-place restart is not asked for: it restarts all pods together, is behind a feature gate, and needs an agent
in each pod to do what the driver does.
"""

from typing import Any

from myriad.job import Job, dump_toml
from myriad.resilience.engines.kubernetes.jobset import JobSet
from myriad.resilience.engines.kubernetes.labels import RUN_LABEL
from myriad.resilience.engines.kubernetes.pods import JOB_FILE, driver_job, node_job
from myriad.resilience.engines.kubernetes.settings import PodSettings, quantity

__all__ = ["make_manifests"]

_RESTARTS = 10


def make_manifests(job: Job, settings: PodSettings) -> list[dict[str, Any]]:
    """In the order in which they are to be applied. Raises `BadInputError`."""
    pods = job.resilience.nodes + job.resilience.spares
    settings.check(pods)
    claim = [] if settings.storage is None else [_claim(settings, settings.storage)]
    cordon = [_cluster_role(settings), _cluster_role_binding(settings)] if settings.cordon else []
    return [
        _service_account(settings),
        _role(settings),
        _role_binding(settings),
        *cordon,
        _network_policy(settings),
        *claim,
        _config_map(job, settings),
        dict(_job_set(job, settings, pods)),
    ]


def _metadata(settings: PodSettings, name: str = "") -> dict[str, Any]:
    labels = {RUN_LABEL: settings.run}
    return {"name": name or settings.run, "namespace": settings.namespace, "labels": labels}


def _cluster_metadata(settings: PodSettings) -> dict[str, Any]:
    """Of objects outside all namespaces."""
    return {"name": f"{settings.namespace}-{settings.run}-cordon", "labels": {RUN_LABEL: settings.run}}


# Rights: pods of its own namespace, and taking machines out of service


def _service_account(settings: PodSettings) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _metadata(settings)}


def _subjects(settings: PodSettings) -> list[dict[str, Any]]:
    return [{"kind": "ServiceAccount", "name": settings.run, "namespace": settings.namespace}]


def _role(settings: PodSettings) -> dict[str, Any]:
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "delete"]}
    return _rbac("Role", metadata=_metadata(settings), rules=[rule])


def _role_binding(settings: PodSettings) -> dict[str, Any]:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": settings.run}
    subjects = _subjects(settings)
    return _rbac("RoleBinding", metadata=_metadata(settings), roleRef=reference, subjects=subjects)


def _cluster_role(settings: PodSettings) -> dict[str, Any]:
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}
    return _rbac("ClusterRole", metadata=_cluster_metadata(settings), rules=[rule])


def _cluster_role_binding(settings: PodSettings) -> dict[str, Any]:
    metadata = _cluster_metadata(settings)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": metadata["name"]}
    subjects = _subjects(settings)
    return _rbac("ClusterRoleBinding", metadata=metadata, roleRef=reference, subjects=subjects)


def _rbac(kind: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, **fields}


# What pods share


def _network_policy(settings: PodSettings) -> dict[str, Any]:
    """Pods of this run hear each other and nobody else."""
    own = {"podSelector": {"matchLabels": {RUN_LABEL: settings.run}}}
    spec = {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return {**kind, "metadata": _metadata(settings), "spec": spec}


def _claim(settings: PodSettings, storage: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": quantity(storage)}},
    }
    if settings.storage_class is not None:
        spec["storageClassName"] = settings.storage_class
    metadata = _metadata(settings, settings.claim)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _config_map(job: Job, settings: PodSettings) -> dict[str, Any]:
    data = {JOB_FILE: dump_toml(job)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(settings), "data": data}


# The JobSet


def _job_set(job: Job, settings: PodSettings, pods: int) -> JobSet:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(settings),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": settings.run,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
            "failurePolicy": {
                "maxRestarts": _RESTARTS,
                "rules": [
                    {
                        "name": "failed",
                        "action": "FailJobSet",
                        "targetReplicatedJobs": ["driver"],
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    },
                    {
                        "name": "stopped",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "targetReplicatedJobs": ["driver"],
                        "onJobFailureReasons": ["BackoffLimitExceeded"],
                    },
                ],
            },
            "replicatedJobs": [
                {"name": "driver", "replicas": 1, "template": {"spec": driver_job(job, settings)}},
                {
                    "name": "node",
                    "replicas": 1,
                    "dependsOn": [{"name": "driver", "status": "Ready"}],
                    "template": {"spec": node_job(settings, pods)},
                },
            ],
        },
    }
