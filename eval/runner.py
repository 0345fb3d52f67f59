"""One checkpoint in memory, answering questions for every system from the same encoded chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cache_ops.hf import check_vocabulary, load_model
from cache_ops.plan import PROMPT
from cache_ops.rope import Rope
from data_builders.prompt import PromptTemplate
from eval import engine
from eval.answers import Answer
from eval.metrics import exact_match, token_f1
from eval.systems import SYSTEMS, Question, Request, Width
from recipes.schema import Recipe


@dataclass(frozen=True)
class Runner:
    """A checkpoint and what all of its questions share."""

    config: Recipe
    checkpoint: str
    key: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate
    rope: Rope
    prompt_kv: Mapping[str, Tensor]

    @classmethod
    def load(
        cls,
        config: Recipe,
        checkpoint: str,
        key: str,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        template: PromptTemplate,
    ) -> Self:
        """Load the weights onto the GPU if there is one, and encode the prompt once."""
        model = load_model(str(folder), config.model.dtype)
        check_vocabulary(model, tokenizer)
        model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        prompt_kv, _ = engine.encode_chunks(model, [(PROMPT, template.prompt_ids)])
        rope = Rope.from_config(model.config)
        return cls(config, checkpoint, key, model, tokenizer, template, rope, prompt_kv)

    def answer(self, question: Question, variants: Sequence[tuple[str, Width]]) -> list[Answer]:
        """Encode the question's chunks, let each (system, width) answer from them, free them."""
        requests = [
            SYSTEMS[system].request(question, width, self.template, self.config.retrieval)
            for system, width in variants
        ]
        used = {piece.chunk for request in requests for piece in request.plan.slices}
        chunks = {c.chunk_id: c.token_ids for c in question.chunks if c.chunk_id in used}
        chunk_kv, offline_ms = engine.encode_chunks(self.model, chunks.items())
        offline_tokens = sum(map(len, chunks.values()))
        return [
            self._answer(question, system, width, request, chunk_kv, offline_tokens, offline_ms)
            for (system, width), request in zip(variants, requests, strict=True)
        ]

    def _answer(
        self,
        question: Question,
        system: str,
        width: Width,
        request: Request,
        chunk_kv: Mapping[str, Tensor],
        offline_tokens: int,
        offline_ms: float,
    ) -> Answer:
        limit = self.config.eval.max_new_tokens
        completion = engine.answer(
            self.model,
            self.rope,
            request.plan,
            request.online_ids,
            {**self.prompt_kv, **chunk_kv},
            stop_ids=self.template.stop_ids,
            max_new_tokens=limit,
        )
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)).strip()
        last_position = request.plan.length + len(request.online_ids) + limit
        return Answer(
            key=self.key,
            checkpoint=self.checkpoint,
            system=system,
            k_c=width.k_c,
            k=width.k,
            question_id=question.question_id,
            dataset=question.dataset,
            question=question.question,
            evidence=request.evidence,
            answer=text,
            gold=question.answers,
            f1=token_f1(text, question.answers),
            em=exact_match(text, question.answers),
            ttft_ms=completion.ttft_ms,
            active_tokens=request.active_tokens,
            new_tokens=len(completion.token_ids),
            stopped=completion.stopped,
            beyond_context=last_position > self.model.config.max_position_embeddings,
            offline_tokens=offline_tokens,
            offline_ms=offline_ms,
        )
