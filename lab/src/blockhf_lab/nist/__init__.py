"""The 27 nonlinear regression problems of NIST's Statistical Reference Datasets.

``problems.json`` has, for each problem, its level of difficulty, two starts, the certified parameters with
their standard deviations, the certified sum of squares, and the observations. The numbers are facts that
NIST, an agency of the United States, has published:
https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml. They were read from the copies of its files that the
sources of lmfit 1.3.4 have.
"""

from blockhf_lab.nist.problems import NAMES, Problem, digits, load

__all__ = ["NAMES", "Problem", "digits", "load"]
