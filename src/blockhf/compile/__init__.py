"""What makes the products of unrolled recurrences fast; optional, and loaded only where it is asked for.

``batch_small_matmuls`` turns the many small matrix products of an unrolled loop into few large ones,
``repeated_regions`` finds what repeats in a long graph, and ``fused`` compiles it. All work on recorded
graphs and have never heard of objectives or blocks.
"""
