"""Runs on Kubernetes: the manifests that a person applies, and the requests of a run to the API server."""
