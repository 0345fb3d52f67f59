"""Whether an export gives what its run gives: read back in a fresh process, by plain transformers.

The run's checkpoint reads whole texts in the way of Standard RAG, which is what plain transformers
can serve. The export must give the same logits after every prompt, and the same greedy answers.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from data_builders.key import Split
from launch.whole_texts import Prompt, Reference, references_of
from train.contract import messages
from train.export import Form, Run, base_of

READER = Path(__file__).parent / "plain_reader.py"
# Of the largest logit; a merged and an unmerged adapter also round differently.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
_SHOWN = 3
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class VerificationError(Exception):
    """An export does not give what its run gives; says where they differ."""


def verify(
    run: Run, folder: Path, form: Form, prompts: Sequence[Prompt], split: Split | None
) -> dict[str, Any]:
    """Compares an export with its run; what was compared, for JSON.

    Only one of the two is in memory at a time.

    Args:
        run: the run that was exported.
        folder: what was exported.
        form: as what.
        prompts, split: of `whole_texts.prompts_of`; without a split logits alone are compared.

    Raises:
        VerificationError: they differ, or plain transformers cannot read the export.
    """
    references = references_of(run, form, prompts, run.config.eval.max_new_tokens if split else 1)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    before, after = run.template.query_parts
    texts = [run.template.prompt_text, *(f"{before}{one.question}{after}" for one in prompts)]
    job: dict[str, Any] = {
        # Absolute: the process that reads it works elsewhere.
        "folder": str(folder.absolute()),
        "base": base_of(run) if form == "adapter" else None,
        "base_dtype": run.config.model.dtype,
        "prompts": [[*one.text_ids, *one.query_ids] for one in prompts],
        "answers": split is not None,
        "texts": texts,
        "chats": [messages(run.config, one.passages, one.question) for one in prompts],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    read, logits_NV = _read_plainly(job)
    coarse = "bfloat16" in (read["dtype"], run.dtype, run.config.model.dtype)
    largest = max(float(one.logits_V.abs().max()) for one in references)
    tolerance = TOLERANCE["bfloat16" if coarse else "float32"] * largest
    report: dict[str, Any] = {
        "read_by": {name: read[name] for name in ("transformers", "peft") if read[name]},
        "network": "blocked",
        "dtype": {"run": run.dtype, "export": read["dtype"]},
        "prompts": len(prompts),
        "logits": _compare_logits(references, logits_NV, tolerance),
        "answers": None,
        "tokenizer_texts": {
            "equal": sum(
                ids == run.tokenizer(text, add_special_tokens=False)["input_ids"]
                for ids, text in zip(read["tokenized"], texts, strict=True)
            ),
            "of": len(texts),
        },
        # A text's passages are tokenized one by one, a chat as a whole.
        "chats_with_the_same_tokens": sum(
            ids == prompt for ids, prompt in zip(read["chats"], job["prompts"], strict=True)
        ),
    }
    if split:
        report["questions_from"] = split
        # Both of two tokens may have moved so far.
        moved = max(2 * report["logits"]["largest_difference"], TOLERANCE["float32"] * largest)
        report["answers"] = compare_answers(references, read["answers"], min(moved, tolerance))
        pairs = zip(prompts, read["texts"], strict=True)
        report["examples"] = [
            {"question": prompt.question, "answer": text} for prompt, text in [*pairs][:_SHOWN]
        ]
    if wrong := _differences(run, report, prompts, references, read["texts"]):
        raise VerificationError("the export does not give what its run gives: " + "; ".join(wrong))
    return report


def _read_plainly(job: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    with tempfile.TemporaryDirectory(prefix="coinrag-") as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-P", str(READER), str(path), scratch],
            env=os.environ | _OFFLINE,
            cwd=scratch,
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            said = "\n".join(ended.stderr.strip().splitlines()[-5:])
            raise VerificationError(
                f"plain transformers cannot serve the export (status {ended.returncode}):\n{said}"
            )
        read: dict[str, Any] = json.loads((Path(scratch) / "read.json").read_text("utf-8"))
        return read, load_file(Path(scratch) / "logits.safetensors")["logits_NV"].clone()


def _compare_logits(
    references: Sequence[Reference], logits_NV: Tensor, tolerance: float
) -> dict[str, float]:
    expected_NV = torch.stack([one.logits_V for one in references])
    differences_NV = (expected_NV - logits_NV).abs()
    return {
        "largest": float(expected_NV.abs().max()),
        "largest_difference": float(differences_NV.max()),
        "mean_difference": float(differences_NV.mean()),
        "tolerance": tolerance,
    }


def compare_answers(
    references: Sequence[Reference], answers: Sequence[Sequence[int]], near: float
) -> dict[str, Any]:
    """How many answers are equal, and which part where two tokens are more than `near` apart."""
    different, near_ties = [], 0
    for number, (reference, answer) in enumerate(zip(references, answers, strict=True)):
        if reference.token_ids == list(answer):
            continue
        pairs = zip(reference.candidates, answer, strict=False)
        gaps = [max(likely.values()) - likely.get(token, -torch.inf) for likely, token in pairs]
        first = next((gap for gap in gaps if gap > 0), torch.inf)
        if first <= near:
            near_ties += 1
        else:
            different.append(number)
    equal = len(references) - near_ties - len(different)
    counts = {"equal": equal, "near_ties": near_ties, "of": len(references)}
    return {**counts, "different": different, "near": near}


def _differences(
    run: Run,
    report: Mapping[str, Any],
    prompts: Sequence[Prompt],
    references: Sequence[Reference],
    texts: Sequence[str],
) -> list[str]:
    wrong = []
    logits, tokenizer, answers = (report[x] for x in ("logits", "tokenizer_texts", "answers"))
    # Also where one of them is not a number.
    if not logits["largest_difference"] <= logits["tolerance"]:
        wrong.append(
            f"logits differ by up to {logits['largest_difference']:.3g}, and "
            f"{logits['tolerance']:.3g} is rounding"
        )
    if tokenizer["equal"] < tokenizer["of"]:
        wrong.append(f"{tokenizer['of'] - tokenizer['equal']} texts have other tokens")
    if answers and answers["different"]:
        shown = []
        for number in answers["different"][:_SHOWN]:
            ours = run.tokenizer.decode(references[number].token_ids, skip_special_tokens=True)
            shown.append(
                f"{prompts[number].question!r}: the run {str(ours).strip()!r}, "
                f"the export {texts[number]!r}"
            )
        count = len(answers["different"])
        wrong.append(f"{count} of {answers['of']} answers differ: " + ", ".join(shown))
    return wrong
