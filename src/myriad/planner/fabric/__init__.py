"""A job on the switches and cables of a cluster: its traffic, hash collisions, placement of its nodes."""
