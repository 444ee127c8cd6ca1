"""What runs once for a run: the driver, its journal, and the lease by which it alone drives."""
