"""The verb `myriad simulate`: one iteration, one program, or weeks with faults."""
