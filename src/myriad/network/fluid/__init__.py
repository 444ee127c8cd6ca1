"""The fluid level: queues, rates and marks over time."""
