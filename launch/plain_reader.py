"""Reads an export as a stranger does: plain transformers and peft, nothing of ours, no network.

`python -P plain_reader.py JOB OUT` is started by `launch.verification`, which also reads what is
left in OUT: `logits.safetensors`, of the token after each prompt, and `read.json`.
"""

import json
import logging
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def _refuse(*_: object) -> Any:
    raise OSError("the network is blocked while an export is verified")


socket.socket.connect = _refuse  # type: ignore[method-assign]
socket.socket.connect_ex = _refuse  # type: ignore[method-assign]
# They tell of missing GPU kernels; stderr is for what went wrong here.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)

import torch  # noqa: E402 - after the network is blocked
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: E402


def main() -> None:
    """Answers a job's prompts, all by default settings of the exported folder."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder, out = job["folder"], Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, options = _load(folder, job["base"], job["base_dtype"])
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    logits, answers = [], []
    for ids in job["prompts"]:
        ids_1T = torch.tensor([ids], device=model.device)
        generated = model.generate(
            input_ids=ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            output_logits=True,
            return_dict_in_generate=True,
            **options,
            **({} if job["answers"] else {"max_new_tokens": 1}),
        )
        logits.append(generated.logits[0][0].float().cpu())
        answers.append(generated.sequences[0, len(ids) :].tolist())
    save_file({"logits_NV": torch.stack(logits)}, out / "logits.safetensors")
    found = {
        "answers": answers,
        "texts": [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in answers],
        "tokenized": [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in job["texts"]
        ],
        "chats": [_chat(tokenizer, chat, job["chat_template_kwargs"]) for chat in job["chats"]],
        "dtype": str(model.dtype).removeprefix("torch."),
        "transformers": version("transformers"),
        "peft": version("peft") if job["base"] else None,
    }
    (out / "read.json").write_text(json.dumps(found), encoding="utf-8")


def _load(folder: str, base: str | None, base_dtype: str) -> tuple[Any, dict[str, Any]]:
    """The model, and what `generate` needs beside its own settings."""
    if base is None:
        return AutoModelForCausalLM.from_pretrained(folder), {}
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, base_dtype))
    settings = GenerationConfig.from_pretrained(folder)
    return PeftModel.from_pretrained(model, folder), {"generation_config": settings}


def _chat(
    tokenizer: Any, messages: list[dict[str, str]], options: dict[str, Any]
) -> list[int] | None:
    """A prompt's tokens when it is read as one chat; None without a chat template."""
    if not tokenizer.chat_template:
        return None
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **options
    )["input_ids"]
    return ids


if __name__ == "__main__":
    main()
