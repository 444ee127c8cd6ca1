"""Costs on a cluster in seconds: operators, collectives, layers, layouts, snapshots."""
