"""Models on this machine: where they lie, what identifies them and what can run them."""

import contextlib
import hashlib
from pathlib import Path

from recipes.errors import UserError

_CONTENT = {".json", ".txt", ".model", ".jinja", ".safetensors", ".bin", ".pt"}


def model_folder(name: str, option: str) -> Path:
    """The folder of a model given by path or by a name in the local Hugging Face cache.

    Args:
        name: the path or name.
        option: the recipe's option that holds it, for errors.

    Raises:
        UserError: neither is there. Nothing is downloaded.
    """
    # An unknown user's home stays as it is written.
    with contextlib.suppress(RuntimeError):
        folder = Path(name).expanduser()
        if (folder / "config.json").is_file():
            return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{option}: no model at {name!r}: expected a folder with config.json, or a name in "
            "the local Hugging Face cache (nothing is downloaded)"
        ) from error


def folder_identity(folder: Path) -> str:
    """SHA-256, in hex, of the names and contents of a model's weights, tokenizer and configs."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _CONTENT and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def check_device(device: str, option: str) -> None:
    """Passes `cpu`, `mps`, `cuda` and `cuda:N` where this machine has them.

    Raises:
        UserError: it has no such device; names those it has and the `option` at fault.
    """
    import torch

    kind, _, number = device.partition(":")
    mps = int(torch.backends.mps.is_available())
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": mps}
    if int(number or 0) >= counts[kind]:
        there = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise UserError(f"{option}: no {device} on this machine; it has {there}")
