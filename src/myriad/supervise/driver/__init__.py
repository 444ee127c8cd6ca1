"""The driver of a run, its journal, and the lease that lets only one driver lead."""
