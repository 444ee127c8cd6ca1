"""A cluster's fabric: switches and cables, routing, congestion control, retransmission. No torch."""
