"""By what the pods of a run are found: the manifests write it, the run looks for it."""

__all__ = ["INDEX_LABEL", "NAMESPACE", "NODE_ROLE", "ROLE_LABEL", "RUN_LABEL", "RUN_NAME"]

RUN_LABEL, ROLE_LABEL, NODE_ROLE = "myriad/run", "myriad/role", "node"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
"""The node's number; the Job writes it on each pod, since Kubernetes 1.28."""
RUN_NAME, NAMESPACE = "MYRIAD_KUBERNETES_RUN", "MYRIAD_KUBERNETES_NAMESPACE"
"""Tell the driver's pod, in its environment, where the pods are."""
