"""The manifests of a run on Kubernetes: a JobSet, and the objects around it.

    JobSet RUN ─┬─ driver   one pod: `myriad train`. It starts no ranks
                └─ node     one pod for each node and each spare, never two on a machine: `myriad join`

Restarts, the cheapest first: the driver restarts its ranks, in place, within a second; the kubelet a
container whose agent has died, in place; the Job a pod whose machine is gone, on another one; JobSet
everything, when the driver was asked to stop (its machine is drained: the run saves and continues elsewhere).
A run that has failed (exit code 1) or was given bad input (2) is not retried: the JobSet has failed. JobSet's
own in-place restart is not used: it restarts all pods together, is behind a feature gate, and needs an agent
in each pod.

The types are JobSet's part of a manifest, from the API ``jobset.x-k8s.io/v1alpha2``: only what is used here,
without feature gates, as it is since 0.8. A wrong key is a type error, and a validation error for users of
pydantic. The contents of a Job's template are Kubernetes' own types.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from myriad.job import Job, dump_toml
from myriad.launchers.kubernetes.cluster_settings import PodSettings, quantity
from myriad.launchers.kubernetes.pods import JOB_FILE, RUN_LABEL, driver_job, node_job

__all__ = ["make_manifests"]

_EXACT = ConfigDict(extra="forbid", strict=True)


@with_config(_EXACT)
class FailureRule(TypedDict):
    """A reaction of the JobSet to a failed Job; the first rule that matches counts."""

    name: str
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    targetReplicatedJobs: list[str]
    onJobFailureReasons: list[Literal["PodFailurePolicy", "BackoffLimitExceeded"]]


@with_config(_EXACT)
class FailurePolicy(TypedDict):
    """The rules for failed Jobs. A failure without a rule restarts all Jobs, ``maxRestarts`` times."""

    maxRestarts: int
    rules: list[FailureRule]


@with_config(_EXACT)
class SuccessPolicy(TypedDict):
    """The Jobs that must succeed for the JobSet to be done."""

    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[str]


@with_config(_EXACT)
class Network(TypedDict):
    """The headless service that JobSet creates: each pod has a name that the other pods can resolve."""

    enableDNSHostnames: bool
    publishNotReadyAddresses: bool
    subdomain: str


@with_config(_EXACT)
class DependsOn(TypedDict):
    """A condition on another Job, on which a Job is created."""

    name: str
    status: Literal["Ready", "Complete"]


@with_config(_EXACT)
class ReplicatedJob(TypedDict):
    """A Job, and the number of its copies."""

    name: str
    replicas: int
    template: dict[str, Any]
    dependsOn: NotRequired[list[DependsOn]]


@with_config(_EXACT)
class JobSetSpec(TypedDict):
    """The specification of a JobSet."""

    network: Network
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


@with_config(_EXACT)
class JobSet(TypedDict):
    """A Kubernetes JobSet: the driver's job and the job of the nodes."""

    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: dict[str, Any]
    spec: JobSetSpec


_RESTARTS = 10


def make_manifests(job: Job, settings: PodSettings) -> list[dict[str, Any]]:
    """Return the manifests in the order in which they are applied. Raises `BadInputError`."""
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
    """Return the metadata of objects outside all namespaces."""
    return {"name": f"{settings.namespace}-{settings.run}-cordon", "labels": {RUN_LABEL: settings.run}}


# Permissions: pods of the own namespace, and cordoning machines


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


# Objects that the pods share


def _network_policy(settings: PodSettings) -> dict[str, Any]:
    """Let pods of this run reach each other, and nothing else."""
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
