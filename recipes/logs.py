"""What a program of this package writes to stderr."""

import logging
import sys
import warnings

_OURS = ("cache_ops", "data_builders", "eval", "launch", "recipes", "train")
# transformers imports torchao where it is installed, which then tells every program that it lacks
# GPU kernels and uses a deprecated function of torch.
_SILENCED = ("torchao", "torch.utils._pytree")
# accelerate imports DeepSpeed where it is installed, which then says so on stdout without a GPU.
_DEEPSPEED_ON_CPU = "Setting accelerator to CPU"


def set_up_logging() -> None:
    """Libraries speak up from warnings on, our own packages from progress on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in _OURS:
        logging.getLogger(package).setLevel(logging.INFO)
    for library in _SILENCED:
        logging.getLogger(library).setLevel(logging.ERROR)
    # Its import sets its level.
    logging.getLogger("DeepSpeed").addFilter(_is_shown)
    # Libraries calling each other by names that will change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def _is_shown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DEEPSPEED_ON_CPU)
