"""Every packet an event: queues, marks, pauses, loss, retransmission."""
