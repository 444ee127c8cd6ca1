"""Record and ship spans, counters and metrics of a run. No failure in this package blocks or ends a run."""
