"""Probes: what a node's diagnosis measures, each in a process of its own (`probe_process`)."""
