"""How ranks find each other: the authenticated key-value store of an attempt, and Redis in its place."""
