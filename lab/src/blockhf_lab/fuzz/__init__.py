"""Random cases for the library's promises: a campaign that can be bounded, repeated and resumed.

``cases`` holds random networks, losses, batches, partitions and policies against dense matrices in double
precision and against what the library promises of any step. ``interrupts`` ends steps at random lines.
"""
