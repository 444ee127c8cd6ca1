"""Supervision of a run: the recovery policy, the driver and its lease, the node agent, and the accounting."""
