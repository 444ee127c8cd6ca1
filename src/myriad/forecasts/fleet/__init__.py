"""Simulated weeks: a cluster of thousands of nodes with faults, under Myriad's and published policies."""
