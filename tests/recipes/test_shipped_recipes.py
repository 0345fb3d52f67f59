"""Every shipped YAML parses, opens with its instructions, and the config surface is pinned."""

from pathlib import Path

import pytest

import recipes
from recipes.fields import options
from recipes.resolve import resolve, shipped_recipes

ROOT = Path(recipes.__file__).parent

# A change here is a change of the public configuration: say so in its commit.
SURFACE = """
build.executor build.ray_address build.ray_gpus_a_worker build.ray_workers
context.anchors.prefix_tokens context.anchors.suffix_tokens context.anchors.summary
context.contextualizer.heads
context.contextualizer.layers context.contextualizer.width context.encoding context.gradient
context.packets.after_tokens context.packets.before_tokens context.positions
context.repair.check_layer context.repair.metric context.repair.ratio data.built_root
data.chunk_tokens data.corpus data.dev data.dev_format data.dev_rows_per_file data.format
data.train data.train_rows_per_file eval.ablations eval.arms eval.bootstrap_resamples
eval.budgets_ms eval.checkpoints eval.concurrent_requests eval.injection_clean eval.injections
eval.max_new_tokens eval.max_prompt_tokens eval.output eval.questions_per_dataset eval.runs.ape
eval.runs.block_attention eval.runs.cacheblend eval.runs.coinrag eval.runs.epic eval.runs.kvlink
eval.runs.online_nuggets eval.runs.standard_rag eval.runs.turborag eval.systems eval.ttft_repeats
eval.warmup_questions eval.widths model.dtype model.path name nuggets.extractor
nuggets.fuzzy_threshold nuggets.llm.api_key_variable nuggets.llm.attempts nuggets.llm.base_url
nuggets.llm.concurrent_requests nuggets.llm.input_price nuggets.llm.max_cost
nuggets.llm.max_output_tokens nuggets.llm.max_requests nuggets.llm.max_total_tokens
nuggets.llm.model nuggets.llm.output nuggets.llm.output_price nuggets.llm.temperature
nuggets.llm.timeout_seconds nuggets.local_model.batch_size nuggets.local_model.device
nuggets.local_model.dtype nuggets.local_model.max_new_tokens nuggets.local_model.path
nuggets.neighbour_sentences prompt.after_passages prompt.before_passages prompt.system
raft.noise_probability retrieval.batch_size retrieval.bm25 retrieval.budget.a_chunk
retrieval.budget.max_similarity retrieval.budget.tokens retrieval.candidates
retrieval.cross_encoder.batch_size retrieval.cross_encoder.device
retrieval.cross_encoder.max_tokens retrieval.cross_encoder.path retrieval.device retrieval.encoder
retrieval.encoder_kind retrieval.hidden_ffn.add_cosine retrieval.hidden_ffn.path
retrieval.hidden_ffn.vectors retrieval.hidden_ffn.width retrieval.k retrieval.k_c
retrieval.min_score retrieval.nugget_scorer retrieval.order retrieval.overlap
retrieval.rerank_chunks retrieval.selection retrieval.weights.colbert retrieval.weights.dense
retrieval.weights.sparse scorer.base scorer.batch_questions scorer.epochs scorer.held_out
scorer.learning_rate scorer.negatives
scorer.patience scorer.seed scorer.weak_labels scorer.weight_decay seed store.check_reads
store.dtype store.folder store.keep store.max_gib store.memory_gib store.read_threads
store.shard_mib store.when_full systems.ape.scale systems.ape.temperature
systems.cacheblend.check_layer systems.cacheblend.gradual systems.cacheblend.metric
systems.cacheblend.ratio systems.epic.recomputed_tokens systems.kvlink.link_tokens
systems.online_nuggets.extractor systems.online_nuggets.style systems.turborag.positions
train.attention train.distillation.answers train.distillation.temperature train.distillation.top_k
train.distillation.weight train.effective_batch_samples train.epochs train.evaluate.every_steps
train.evaluate.keep_best train.evaluate.patience train.evaluate.questions_per_dataset
train.evaluate.sample_answers train.gradient_checkpointing train.group_shared_chunks
train.init_from train.keep_states train.learning_rate train.log_every_steps train.lora.activated
train.lora.alpha train.lora.dora train.lora.dropout train.lora.rank train.lora.rank_stabilized
train.lora.target_modules train.max_grad_norm train.max_length_tokens train.max_steps
train.micro_batch_samples train.micro_batch_tokens train.mixed_precision train.optimizer
train.resume train.run_folder train.save_every_steps train.schedule train.spike_factor
train.system train.tensorboard train.trackio.project train.tuning train.wandb.mode
train.wandb.project train.warmup_fraction train.weight_decay
"""


def test_config_surface_is_pinned() -> None:
    assert sorted(path for path, _ in options()) == SURFACE.split()


def test_known_recipes_ship() -> None:
    assert {"quickstart", "smollm2_135m/coinrag", "qwen2_7b/coinrag"} <= set(shipped_recipes())


# Recipes of `options` are laid over another one, and do not stand alone.
BASE = "smollm2_135m/systems/coinrag"
OVERLAYS = [name for name in shipped_recipes() if name.startswith("options/")]
WHOLE = [name for name in shipped_recipes() if name not in OVERLAYS]


def arguments(name: str) -> list[str]:
    return [BASE, name] if name in OVERLAYS else [name]


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_parses_by_path_and_by_name(name: str) -> None:
    *base, _ = arguments(name)
    path = str(ROOT / f"{name}.yaml")
    assert resolve([*base, path]).config == resolve(arguments(name)).config


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_opens_with_instructions_that_hold(name: str) -> None:
    comment = [
        line
        for line in (ROOT / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    ]
    text = "\n".join(comment)
    assert all(word in text for word in ("Prerequisites", "Launch", "One override"))
    override = comment[-1].split()
    assert override[1] == "coinrag"
    # The line a reader copies resolves and changes something.
    assert resolve(override[3:]).config != resolve(arguments(name)).config


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_changes_its_own_option_and_the_run_folder_alone(name: str) -> None:
    base, config = (resolve(which).config.model_dump() for which in ([BASE], arguments(name)))
    runs = {base["train"].pop("run_folder"), config["train"].pop("run_folder")}
    assert runs <= {base_folder(), f"runs/{name}"}
    assert base != config


def base_folder() -> str:
    return resolve([BASE]).config.train.run_folder


def test_qwen2_7b_has_the_settings_of_the_paper() -> None:
    config = resolve(["qwen2_7b/coinrag"]).config
    assert (config.model.path, config.retrieval.encoder) == (
        "Qwen/Qwen2-7B-Instruct",
        "BAAI/bge-m3",
    )
    assert (config.train.learning_rate, config.train.effective_batch_samples) == (5e-6, 16)
    assert (config.train.epochs, config.train.max_length_tokens) == (1, 1024)
    assert (config.retrieval.k_c, config.retrieval.k) == (5, 10)
    assert config.raft.noise_probability == 0.15


def test_run_folders_and_names_differ() -> None:
    configs = [resolve([name]).config for name in WHOLE]
    assert len({config.train.run_folder for config in configs}) == len(configs)
    assert len({config.name for config in configs}) == len(configs)
