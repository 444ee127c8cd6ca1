"""Pairwise network tests among several nodes, and collective rounds among groups of them."""
