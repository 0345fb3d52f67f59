"""A finished run as a folder that serves: weights or adapter, tokenizer, settings, contract.

A run's checkpoint is whole and, after LoRA, merged already.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from cache_ops.hf import load_tokenizer
from data_builders.models import model_folder
from data_builders.prompt import PromptTemplate
from recipes.errors import UserError
from recipes.files import write_text
from recipes.schema import Recipe
from train.beside import BESIDE_FILES
from train.contract import contract
from train.run_folder import CONTRACT_FILE, finished_run
from train.shards import SHARD_BYTES, Dtype, copy_weights, tensor_bytes

Form = Literal["merged", "adapter"]
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_LINEAGE_FILES = ("recipe.yaml", "origins.json")
# Names that only transformers 5 knows, or that tell how this machine has loaded a tokenizer.
_OF_LOADING = ("is_local", "local_files_only")
_TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: the run's.
        config: its recipe.
        tokenizer, template: as it was trained with.
        dtype: of its checkpoint.
        adapter: peft's config of its adapter, where it has one.
    """

    folder: Path
    config: Recipe
    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate
    dtype: Dtype
    adapter: dict[str, Any] | None

    @property
    def checkpoint(self) -> Path:
        """The folder of the whole model."""
        return self.folder / "checkpoint"


def open_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        UserError: there is none, or it has not come to its end.
        ModelNotFoundError: its checkpoint has no readable tokenizer.
    """
    config = finished_run(folder, "RUN").config
    checkpoint = folder / "checkpoint"
    tokenizer = load_tokenizer(str(checkpoint))
    template = PromptTemplate(tokenizer, config.prompt)
    stored = _read_json(checkpoint / "config.json")["dtype"]
    adapter_config = folder / "adapter" / "adapter_config.json"
    adapter = _read_json(adapter_config) if adapter_config.is_file() else None
    return Run(folder, config, tokenizer, template, stored, adapter)


def check_form(run: Run, form: Form, dtype: Dtype | None) -> None:
    """Passes what a run can be exported as.

    Raises:
        UserError: an adapter of a run that trained none, or in another dtype than it was trained
            in, or without the base model's folder.
    """
    if form == "merged":
        return
    if run.adapter is None:
        raise UserError(
            f"--form adapter: {run.folder} has no adapter (train.tuning={run.config.train.tuning});"
            " --form merged exports its whole model"
        )
    if dtype is not None:
        raise UserError("--dtype goes with --form merged: an adapter stays as it was trained")
    model_folder(base_of(run), "the base model of the adapter")


def base_of(run: Run) -> str:
    """The name of the model that the run's adapter lies on, or its absolute folder."""
    assert run.adapter is not None, "only an adapter has a base"
    named = str(run.adapter["base_model_name_or_path"])
    return str(Path(named).absolute()) if Path(named).is_dir() else named


def bytes_needed(run: Run, form: Form, dtype: Dtype | None) -> int:
    """The size of what `write_export` writes, without a few small files.

    Raises:
        UserError: the run's weights cannot be read.
    """
    if form == "adapter":
        weights = sum((run.folder / "adapter" / name).stat().st_size for name in _ADAPTER_FILES)
    else:
        try:
            weights = sum(tensor_bytes(run.checkpoint, dtype).values())
        except (OSError, SafetensorError) as error:
            raise UserError(f"RUN: {run.checkpoint} cannot be read: {error}") from error
    return weights + sum(path.stat().st_size for path in _beside_weights(run.checkpoint))


def write_export(
    run: Run,
    folder: Path,
    form: Form = "merged",
    dtype: Dtype | None = None,
    *,
    exported_with: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes all of an export but its verification into an empty folder.

    Args:
        run: what to export, see `check_form`.
        folder: where to.
        form: the whole model, or the adapter alone.
        dtype: of the weights; None: as the run has left them. Soft tokens stay in fp32.
        exported_with: versions, date and commit, for the lineage.
        shard_bytes: of the largest file of weights, unless a single tensor is larger.

    Raises:
        OSError, SafetensorError: the weights cannot be read, or not be written.
    """
    for path in _beside_weights(run.checkpoint):
        shutil.copyfile(path, folder / path.name)
    for name in _LINEAGE_FILES:
        if (run.folder / name).is_file():
            shutil.copyfile(run.folder / name, folder / name)
    _plain_tokenizer_config(folder / "tokenizer_config.json")
    if form == "adapter":
        _write_adapter(run, folder)
    else:
        copy_weights(run.checkpoint, folder, dtype, shard_bytes)
        _write_config(run.checkpoint, folder, dtype or run.dtype)
    _generation_config(run).save_pretrained(folder)
    described = contract(
        run.config,
        run.template,
        run.tokenizer,
        weights=folder if form == "merged" else run.checkpoint,
        dtype=dtype or run.dtype,
        run=run.folder,
        adapter=None if form == "merged" else _read_json(folder / "adapter_config.json"),
        exported_with=exported_with,
    )
    text = json.dumps(described, indent=2, ensure_ascii=False)
    write_text(folder / CONTRACT_FILE, f"{text}\n")
    _share(folder)


def _beside_weights(checkpoint: Path) -> list[Path]:
    """Tokenizer, chat template and what was trained beside the weights."""
    written = ("config.json", "generation_config.json", "model.safetensors.index.json")
    return [
        path
        for path in sorted(checkpoint.iterdir())
        if path.is_file()
        and (path.suffix != ".safetensors" or path.name in BESIDE_FILES)
        and path.name not in written
    ]


def _write_config(checkpoint: Path, folder: Path, dtype: Dtype) -> None:
    """The model's config, with RoPE also under the names that transformers 4 reads."""
    config = _read_json(checkpoint / "config.json") | {"dtype": dtype}
    rope = dict(config["rope_parameters"])
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _write_adapter(run: Run, folder: Path) -> None:
    """The adapter, which names its base so that it is found from any working directory."""
    for name in _ADAPTER_FILES:
        shutil.copyfile(run.folder / "adapter" / name, folder / name)
    config = {**(run.adapter or {}), "base_model_name_or_path": base_of(run)}
    write_text(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")


def _plain_tokenizer_config(path: Path) -> None:
    config = {key: value for key, value in _read_json(path).items() if key not in _OF_LOADING}
    if config.get("tokenizer_class") in _TOKENIZER_CLASSES:
        config["tokenizer_class"] = _TOKENIZER_CLASSES[config["tokenizer_class"]]
    write_text(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _generation_config(run: Run) -> GenerationConfig:
    """Greedy answers of at most `eval.max_new_tokens`, ended as the template ends them."""
    stop_ids = sorted(run.template.stop_ids)
    pad = run.tokenizer.pad_token_id
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=run.config.eval.max_new_tokens,
        bos_token_id=run.tokenizer.bos_token_id,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0] if pad is None else pad,
    )


def _share(folder: Path) -> None:
    """Gives every file the permissions of new files; safetensors makes its own private."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
