"""A script for ranks that train several recipes, one after the other: one start of them serves all.

Its argument is the recipes' arguments, as JSON.
"""

import json
import sys
from unittest.mock import patch

from accelerate.state import AcceleratorState

from eval.in_training import open_evaluator
from recipes.exit import run_main
from recipes.logs import set_up_logging
from recipes.resolve import resolve
from train.trainer import train


def main() -> None:
    """Trains them."""
    set_up_logging()
    # DeepSpeed keeps the groups of ranks that it has made; drawing takes longer than training here.
    with patch("torch.distributed.destroy_process_group"), patch("train.recorder.draw_curves"):
        for arguments in json.loads(sys.argv[1]):
            train(resolve(arguments), open_evaluator)
            AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
