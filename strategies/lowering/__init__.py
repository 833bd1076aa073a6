"""From graph and plan to the program of all ranks, and the passes from program to program."""
