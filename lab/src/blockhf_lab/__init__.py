"""The lab beside the library: the paper's three tasks and others, runs, races, claims, figures, benchmarks.

It uses the library; the library knows nothing of it.
"""

__version__ = "0.2.0"
