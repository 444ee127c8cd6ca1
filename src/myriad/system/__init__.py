"""What Myriad uses of the operating system: the machine, processes, connections, files and URLs."""
