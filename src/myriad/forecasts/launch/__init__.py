"""Plans for other frameworks: the script that starts a plan, and the options or configuration that it
gives."""
