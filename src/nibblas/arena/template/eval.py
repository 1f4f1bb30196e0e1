"""Evaluation as KernelBot starts it: python eval.py MODE CASES, with results to the descriptor POPCORN_FD.

On your own machine `nibblas arena run . submission.py` says more.
"""

import sys

from nibblas.arena.popcorn import evaluate

if __name__ == "__main__":
    sys.exit(evaluate(sys.argv[1:]))
