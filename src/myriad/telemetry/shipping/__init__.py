"""Ship spans from the ranks' rings to files and to a collector, in the reference clock's time."""
