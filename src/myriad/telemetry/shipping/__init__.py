"""Ship spans from the ranks' rings to files and to a collector, with times of the cluster's reference
clock."""
