"""Nugget-aware fine-tuning: `accelerate launch train/nugget_ft.py RECIPE... [key=value...]`.

`coinrag train` runs this script; see `train.trainer` for what it does.
"""

import logging
import sys

from recipes.exit import run_main


def main() -> None:
    """Trains the recipe named on the command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in ("data_builders", "train"):
        logging.getLogger(package).setLevel(logging.INFO)
    from recipes.resolve import resolve

    resolved = resolve(sys.argv[1:])
    from train.trainer import train

    train(resolved)


if __name__ == "__main__":
    sys.exit(run_main(main))
