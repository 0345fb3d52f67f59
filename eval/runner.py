"""One checkpoint in memory, answering questions for every system from the same cached chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from cache_ops.closing import Closing
from data_builders.kv import open_supply
from data_builders.prompt import PromptTemplate
from eval.answers import Answer
from eval.checkpoints import Checkpoint, context_checkpoint, load_served, weights_folder
from eval.metrics import exact_match, token_f1
from eval.online import OnlinePath, OnlineRequest
from eval.systems import Question, Width
from recipes.errors import UserError
from recipes.schema import Recipe


@dataclass(frozen=True)
class Runner(Closing):
    """A checkpoint and what all of its questions share; a context manager.

    With `store.folder` slices are read from the store's files inside the clock, without a memory
    tier in front: from the page cache, which making them ready has just filled for every system
    alike. Else they lie in memory when it starts.
    """

    config: Recipe
    checkpoint: Checkpoint
    key: str
    tokenizer: PreTrainedTokenizerBase
    path: OnlinePath

    @classmethod
    def load(
        cls,
        config: Recipe,
        checkpoint: Checkpoint,
        key: str,
        tokenizer: PreTrainedTokenizerBase,
        template: PromptTemplate,
    ) -> Self:
        """Loads the weights, and opens where slices come from."""
        model = load_served(config, weights_folder(config, checkpoint), tokenizer)
        source = context_checkpoint(config, checkpoint)
        encoder = model
        if source != checkpoint:
            encoder = load_served(config, weights_folder(config, source), tokenizer)
        # Whole chunks in memory serve all systems from one encoding.
        changes = {"memory_gib": 0.0} if config.store.folder else {"keep": "chunks"}
        store = config.store.model_copy(update=changes)
        supply = open_supply(
            config.model_copy(update={"store": store}), encoder, tokenizer, source, writable=True
        )
        path = OnlinePath(config, model, template, supply)
        return cls(config, checkpoint, key, tokenizer, path)

    def close(self) -> None:
        """Closes what supplies slices."""
        self.path.supply.close()

    def answer(self, question: Question, variants: Sequence[tuple[str, Width]]) -> list[Answer]:
        """Has each (system, width) answer; what is not cached yet is computed before the clock."""
        start = time.perf_counter()
        # Whole chunks first: they hold what others take slices of.
        widest_first = sorted(variants, key=lambda variant: variant[1].k is not None)
        offline_tokens = sum(self._warm(question, *variant) for variant in widest_first)
        offline_ms = (time.perf_counter() - start) * 1e3
        return [
            self._answer(question, *variant, offline_tokens, offline_ms) for variant in variants
        ]

    def _warm(self, question: Question, system: str, width: Width) -> int:
        """Makes one system's slices ready; how many tokens had to be encoded for that."""
        fetch = self.path.begin(question, system, width).fetch
        if fetch is None:
            return 0
        supplied = fetch.wait()
        supplied.release()
        return supplied.tokens_encoded

    def _answer(
        self,
        question: Question,
        system: str,
        width: Width,
        offline_tokens: int,
        offline_ms: float,
    ) -> Answer:
        start = time.perf_counter()
        request = self.path.begin(question, system, width)
        self.path.fill(request)
        generation = request.generation
        while not generation.done:
            self.path.advance([request])
        request.release()
        assert generation.first_token is not None, "a finished answer has had a first token"
        self._refuse_computed(request)
        token_ids = generation.token_ids
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
        return Answer(
            key=self.key,
            checkpoint=self.checkpoint,
            system=system,
            k_c=width.k_c,
            k=width.k,
            question_id=question.question_id,
            dataset=question.dataset,
            question=question.question,
            evidence=request.served.evidence,
            answer=text,
            gold=question.answers,
            f1=token_f1(text, question.answers),
            em=exact_match(text, question.answers),
            ttft_ms=(generation.first_token - start) * 1e3,
            load_ms=sum(request.stage_ms[stage] for stage in ("read", "copy", "rotate")),
            active_tokens=request.served.active_tokens,
            bytes_read=request.supplied.bytes_read if request.supplied else 0,
            new_tokens=len(token_ids),
            stopped=generation.stopped,
            beyond_context=request.last_position > self.path.model.config.max_position_embeddings,
            offline_tokens=offline_tokens,
            offline_ms=offline_ms,
        )

    def _refuse_computed(self, request: OnlineRequest) -> None:
        """What is computed inside the clock is no measurement of a cache."""
        if request.supplied is None or not request.supplied.tokens_computed:
            return
        question = f"question {request.question.question_id!r}"
        if self.config.store.folder is None:
            raise UserError(
                f"store.memory_gib is too small to hold the chunks of {question}: raise it"
            )
        reasons = ", ".join(self.path.supply.not_stored) or "its chunks were evicted at once"
        raise UserError(
            f"slices of {question} are not in the store and could not be put there ({reasons}; the "
            "log says more): let it be written to and large enough (store.max_gib), fill it with "
            "`coinrag cache build` and store.keep=chunks, or compare with store.folder=null"
        )
