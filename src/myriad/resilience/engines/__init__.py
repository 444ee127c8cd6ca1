"""Ways to start ranks. Each engine starts them, watches them and leaves none behind."""
