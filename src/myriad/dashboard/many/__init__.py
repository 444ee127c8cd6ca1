"""The page of many runs: a table of runs, and chosen ones in the same charts."""
