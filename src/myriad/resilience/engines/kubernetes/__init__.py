"""The run on Kubernetes: what a person applies, and what the run itself asks of the API server."""
