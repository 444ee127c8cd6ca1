"""Predictions about a job on a cluster: the questions of `myriad plan`, `simulate`, `network` and `validate`.

This room sits between job files and the planner. Its functions take jobs and clusters and return values with
the numbers, the sentences and ``as_json()``; `myriad.cli` prints them and `myriad.reports` draws them.
"""
