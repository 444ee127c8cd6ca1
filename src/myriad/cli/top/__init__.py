"""The verb `myriad top`: a run or its nodes in the terminal."""
