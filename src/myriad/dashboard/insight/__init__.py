"""What spans say: where time goes, who is slow, what a step waits for. Values in, values out."""
