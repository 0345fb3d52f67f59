"""Trains a nugget scorer: `accelerate launch train/nugget_scorer.py RECIPE... [key=value...]`.

`coinrag train-scorer` does the same; see `train.scorer_run` for which one is trained.
"""

import sys

from recipes.exit import run_main
from recipes.logs import set_up_logging


def main() -> None:
    """Trains the scorer of the recipe named on the command line, and prints its folder."""
    set_up_logging()
    from recipes.resolve import resolve

    resolved = resolve(sys.argv[1:])
    from train.scorer_run import train_scorer

    print(train_scorer(resolved))


if __name__ == "__main__":
    sys.exit(run_main(main))
