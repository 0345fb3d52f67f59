"""Nugget-aware fine-tuning: `accelerate launch train/nugget_ft.py RECIPE... [key=value...]`.

`coinrag train` runs this script; see `train.trainer` for what it does.
"""

import sys
from typing import TYPE_CHECKING

from recipes.exit import run_main
from recipes.logs import set_up_logging
from train.stopping import stop_signals

if TYPE_CHECKING:
    from train.watching import OpenEvaluator


def main() -> None:
    """Trains the recipe named on the command line."""
    set_up_logging()
    from recipes.resolve import resolve

    with stop_signals() as stop:
        resolved = resolve(sys.argv[1:])
        from train.trainer import train

        train(resolved, _evaluator() if resolved.config.train.evaluate else None, stop)


def _evaluator() -> "OpenEvaluator":
    from eval.in_training import open_evaluator

    return open_evaluator


if __name__ == "__main__":
    sys.exit(run_main(main))
