"""One iteration of a job, simulated: every rank runs the actions of its program under a cost model."""
