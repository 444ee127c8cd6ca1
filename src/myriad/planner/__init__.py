"""What a layout will cost, before anything is rented: cost model, memory, simulator, search, validation."""
