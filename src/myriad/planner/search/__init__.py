"""The search for the best layout: all legal layouts, their scores, the plans, and the explanation of a
plan."""
