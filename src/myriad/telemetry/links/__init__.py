"""Counters of the network links of a node: read from the kernel, kept in a ring, stored around anomalies."""
