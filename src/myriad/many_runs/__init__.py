"""Several runs beside each other: their table, their differences, their losses, and which to delete."""
