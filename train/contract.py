"""`serving.json`: what a server must know of an export to serve it as it was trained.

Nothing is in it that was not read: what is not at hand when a run is exported (its data, its
encoder, a comparison) is null or absent.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from cache_ops.contextualizer import CONTEXTUALIZER_FILE, contextualizer_saved_in
from cache_ops.fingerprint import Fingerprint
from cache_ops.hf import load_model
from cache_ops.records import StoreDtype
from cache_ops.soft_tokens import SOFT_TOKENS_FILE, soft_tokens_saved_in
from data_builders.build import built_folder
from data_builders.encoder import encoder_identity
from data_builders.key import SPLITS, Split, tokenizer_identity
from data_builders.models import folder_identity, model_folder
from data_builders.prompt import PromptTemplate
from data_builders.scorers import used_cross_encoder
from data_builders.scorers.cross_encoder import cross_encoder_key
from data_builders.scorers.hidden_ffn import ffn_key
from recipes.exit import is_users
from recipes.schema import Recipe
from train.history import read_metrics
from train.lineage import starting_weights

FORMAT = 2
_T = TypeVar("_T")
_EVALUATED = ("questions", "f1", "em", "stop_rate")
_MEASURED = ("arm", "k_c", "k", "questions", "f1", "f1_low", "f1_high", "em", "stop_rate")


def contract(
    config: Recipe,
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: Path,
    dtype: StoreDtype,
    run: Path,
    adapter: Mapping[str, Any] | None,
    exported_with: Mapping[str, Any],
) -> dict[str, Any]:
    """The contract of an export, for JSON.

    Args:
        config: the run's recipe.
        template: the prompt as it was trained with.
        tokenizer: the run's.
        weights: the folder of the whole model, as exported or, for an adapter, as trained.
        dtype: of the exported weights.
        run: the run's folder.
        adapter: the exported adapter's config, None for a whole model.
        exported_with: versions, date and commit.

    Raises:
        ModelNotFoundError: context is frozen, and the base model is not at hand.
    """
    base = starting_weights(config)
    if adapter is not None:
        base = str(adapter["base_model_name_or_path"])
    described: dict[str, Any] = {
        "format": FORMAT,
        "form": "merged" if adapter is None else "adapter",
        "system": config.train.system,
        "dtype": dtype,
        "prompt": _prompt(config, template),
        "chunks": {
            "most_tokens": config.data.chunk_tokens,
            "tokenizer_sha256": tokenizer_identity(tokenizer),
            "special_tokens": False,
            "text": "title (where there is one) and passage, each ended by a newline",
        },
        "retrieval": _retrieval(config),
        "prefix": _prefix(config),
    }
    if config.train.system != "standard_rag":
        described["context"] = _context(config, tokenizer, weights, dtype)
    if groups := soft_tokens_saved_in(weights):
        described["soft_tokens"] = {
            "file": SOFT_TOKENS_FILE,
            "groups": {
                name: {"places": places, "tokens_a_place": tokens}
                for name, (places, tokens) in groups.items()
            },
        }
    if (spec := contextualizer_saved_in(weights)) is not None:
        # Before the query sees the prefix, in every layer.
        described["contextualizer"] = {"file": CONTEXTUALIZER_FILE, **spec.options}
    if adapter is not None:
        described["adapter"] = {
            "base_model": base,
            "invocation_token_ids": adapter.get("alora_invocation_tokens"),
        }
    described["metrics"] = _metrics(config, run)
    described["lineage"] = {
        "recipe": "recipe.yaml",
        "origins": "origins.json" if (run / "origins.json").is_file() else None,
        "run": str(run.absolute()),
        "base_model": {
            "path": base,
            "sha256": _at_hand(lambda: folder_identity(model_folder(base, "model.path"))),
        },
        "built_data": {split: _built(config, split) for split in SPLITS},
        "exported_with": dict(exported_with),
    }
    return described


def _prompt(config: Recipe, template: PromptTemplate) -> dict[str, Any]:
    before, after = template.query_parts
    return {
        "sha256": template.digest,
        # The cached prompt, then the passages, then the query.
        "static": {"text": template.prompt_text, "token_ids": template.prompt_ids},
        "query": {"before_question": before, "after_question": after},
        # The same as messages; {passages} and {question} are to be filled in.
        "messages": messages(config, "{passages}", "{question}"),
        "chat_template_kwargs": {"enable_thinking": False},
        "stop_token_ids": sorted(template.stop_ids),
        "max_new_tokens": config.eval.max_new_tokens,
        "decoding": "greedy",
    }


def messages(config: Recipe, passages: str, question: str) -> list[dict[str, str]]:
    """The chat that a prompt is rendered from, before its answer."""
    prompt = config.prompt
    content = prompt.before_passages + passages
    content += prompt.after_passages.replace("{question}", question)
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return [*system, {"role": "user", "content": content}]


def _retrieval(config: Recipe) -> dict[str, Any]:
    options = config.retrieval.model_dump(
        mode="json", include={"candidates", "selection", "k_c", "bm25", "weights"}
    )
    encoder = config.retrieval.encoder
    options["encoder"] = {
        "path": encoder,
        "kind": config.retrieval.encoder_kind,
        "sha256": _at_hand(lambda: encoder_identity(encoder)),
    }
    if (read_together := used_cross_encoder(config.retrieval)) is not None:
        options["rerank_chunks"] = config.retrieval.rerank_chunks
        options["cross_encoder"] = {
            "path": read_together.path,
            "sha256": _at_hand(lambda: cross_encoder_key(read_together)["sha256"]),
            "max_tokens": read_together.max_tokens,
        }
    if config.train.system == "coinrag":
        chosen = {"nugget_scorer", "k", "budget", "min_score"}
        options |= config.retrieval.model_dump(mode="json", include=chosen)
        found = {"extractor", "fuzzy_threshold", "neighbour_sentences"}
        if config.retrieval.hidden_ffn is not None and options["nugget_scorer"] == "hidden_ffn":
            options["hidden_ffn"] = {
                **config.retrieval.hidden_ffn.model_dump(mode="json"),
                "sha256": _at_hand(lambda: ffn_key(config)["sha256"]),
            }
        options["nuggets"] = config.nuggets.model_dump(mode="json", include=found)
    return options


def _prefix(config: Recipe) -> dict[str, Any]:
    """What stands before the query, and where."""
    match config.train.system:
        case "coinrag":
            retrieval, context = config.retrieval, config.context
            return {
                "of": "nuggets",
                "order": retrieval.order,
                "overlap": retrieval.overlap,
                "encoding": context.encoding,
                "positions": context.positions,
                **context.asked(),
            }
        case "turborag":
            return {"of": "chunks", "positions": config.systems.turborag.positions}
        case "standard_rag":
            return {"of": "text", "most_tokens": config.eval.max_prompt_tokens}
        case _:
            return {"of": "chunks", "positions": "reordered"}


def _context(
    config: Recipe, tokenizer: PreTrainedTokenizerBase, weights: Path, dtype: StoreDtype
) -> dict[str, Any]:
    """Whose keys and values the chunks have, and what identifies a store of them."""
    frozen = config.context.gradient == "frozen"
    model = load_model(config.model.path if frozen else str(weights), dtype)
    fingerprint = Fingerprint.from_model(
        model,
        config.store.dtype or dtype,
        tokenizer=tokenizer_identity(tokenizer),
        chunking=f"{config.data.chunk_tokens} tokens",
    )
    return {
        "encoded_by": "base_model" if frozen else "this_model",
        "each_chunk": "alone, from position 0, without the prompt in view",
        "store_fingerprint": fingerprint.as_json(),
        "store_fingerprint_sha256": fingerprint.digest,
    }


def _metrics(config: Recipe, run: Path) -> dict[str, Any]:
    """The run's last logged step, its evaluations, and what a comparison has measured of it."""
    lines = read_metrics(run)
    steps = [line for line in lines if "loss" in line]
    metrics: dict[str, Any] = {"last_step": steps[-1] if steps else None}
    metrics["evaluations"] = [
        {"step": line["step"], **{name: line["evaluation"][name] for name in _EVALUATED}}
        for line in lines
        if "evaluation" in line
    ]
    report = Path(config.eval.output or run / "compare") / "compare.json"
    if report.is_file():
        compared = json.loads(report.read_text(encoding="utf-8"))
        system, asked = config.train.system, compared["config"]
        answered = asked["eval"]["runs"][system] or asked["train"]["run_folder"]
        if Path(answered).resolve() == run.resolve():
            metrics["compared"] = [
                {name: row[name] for name in _MEASURED}
                for row in compared["results"]
                if (row["system"], row["checkpoint"]) == (system, "fine_tuned")
            ]
            metrics["compared_on"] = compared["environment"]["date"]
    return metrics


def _built(config: Recipe, split: Split) -> str | None:
    """The content key of a split's tables, if they are at hand."""
    folder = _at_hand(lambda: built_folder(config, split))
    return folder.name if folder is not None and folder.is_dir() else None


def _at_hand(read: Callable[[], _T]) -> _T | None:
    """What was read, None where it is not on this machine."""
    try:
        return read()
    except Exception as error:
        if is_users(error):
            return None
        raise
