"""Network models: fabrics, routing, fair rates, fluid and packet simulation, link flaps. No torch."""
