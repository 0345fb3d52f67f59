"""One set of weights in memory, answering questions in every cell that uses them.

All cells answer from the same cached chunks, and in turn within a question, so that none is timed
on a warmer machine.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerBase

from cache_ops.closing import Closing
from cache_ops.plan import PROMPT, PrefixPlan, Slice
from eval.answers import Answer, Variant
from eval.cells import Cell
from eval.checkpoints import Weights, load_served
from eval.decoding import advance
from eval.diagnosis import diagnose
from eval.metrics import exact_match, token_f1
from eval.online import OnlinePath, OnlineRequest
from eval.serving import open_serving
from eval.systems import SYSTEMS, Question
from recipes.arms import Arm
from recipes.errors import UserError
from recipes.schema import Recipe


class Runner(Closing):
    """Weights and what all of their questions share; a context manager.

    With `store.folder` slices are read from the store's files inside the clock, without a memory
    tier in front: from the page cache, which making them ready has just filled for every system
    alike. Else they lie in memory when it starts.
    """

    def __init__(
        self,
        config: Recipe,
        weights: Weights,
        cells: Sequence[Cell],
        keys: Mapping[Variant, str],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Loads the weights, and opens what their cells need.

        Args:
            config: the recipe whose store and dtype count.
            weights: what to load.
            cells: those that will be answered in.
            keys: of each cell, for its answers.
            tokenizer: the recipe's.

        Raises:
            UserError, ModelNotFoundError, UnsupportedModelError, ForeignStoreError, StoreError:
                see `checkpoints.load_served` and `serving.open_serving`.
        """
        self.config = config
        self._keys = keys
        self._tokenizer = tokenizer
        # Whole chunks in memory serve all systems from one encoding.
        changes = {"memory_gib": 0.0} if config.store.folder else {"keep": "chunks"}
        store = config.store.model_copy(update=changes)
        own = config.model_copy(update={"store": store})
        self._served = load_served(own, weights, tokenizer)
        self._paths: dict[str, OnlinePath] = {}
        for arm in {cell.arm.name: cell.arm for cell in cells}.values():
            self._paths[arm.name] = self._open_path(arm, cells)

    def _open_path(self, arm: Arm, cells: Sequence[Cell]) -> OnlinePath:
        systems = [cell.system for cell in cells if cell.arm.name == arm.name]
        serving = open_serving(arm.config, self._served, self._tokenizer, systems)
        return OnlinePath(serving, self._served.model, self._served.supply)

    def close(self) -> None:
        """Closes what supplies slices."""
        self._served.close()

    def answer(self, asked: Sequence[tuple[Cell, Question]]) -> list[Answer]:
        """Answers one question in each cell; what is not cached yet is computed before the clock.

        Args:
            asked: the cells in their turn, each with the question as its arm has built it.
        """
        start = time.perf_counter()
        # Whole chunks first: they hold what others take slices of.
        widest_first = sorted(asked, key=lambda one: one[0].width.k is not None)
        offline_tokens = sum(self._warm(*one) for one in widest_first)
        offline_ms = (time.perf_counter() - start) * 1e3
        offline = {"offline_tokens": offline_tokens, "offline_ms": offline_ms}
        first = [self._first_token(cell, question) for cell, question in asked]
        # Only first tokens are timed; the others come for all cells together.
        while unfinished := [r.generation for r, _ in first if not r.generation.done]:
            advance(self._served.model, unfinished)
        answers = [
            self._answer(cell, question, *given) | offline
            for (cell, question), given in zip(asked, first, strict=True)
        ]
        for repeat in range(1, self.config.eval.ttft_repeats):
            for at in range(len(asked)):
                turn = (at + repeat) % len(asked)
                _, ttft_ms = self._first_token(*asked[turn])
                answers[turn]["ttft_ms"].append(ttft_ms)
        return [Answer(**fields) for fields in answers]

    def _warm(self, cell: Cell, question: Question) -> int:
        """Makes a cell's slices ready; how many tokens had to be encoded for that."""
        path = self._paths[cell.arm.name]
        if SYSTEMS[cell.system].extracts:
            prompt_ids = path.serving.template.prompt_ids
            if not prompt_ids:
                return 0
            prompt = PrefixPlan((Slice(PROMPT, 0, len(prompt_ids), 0),))
            fetch = path.supply.start(prompt, {PROMPT: prompt_ids})
        else:
            started = path.begin(question, cell.system, cell.width).fetch
            if started is None:
                return 0
            fetch = started
        supplied = fetch.wait()
        supplied.release()
        return supplied.tokens_encoded

    def _first_token(self, cell: Cell, question: Question) -> tuple[OnlineRequest, float]:
        """A request with its first token, and the time to it in milliseconds."""
        path = self._paths[cell.arm.name]
        start = time.perf_counter()
        request = path.begin(question, cell.system, cell.width)
        path.fill(request)
        path.advance([request])
        # At once: the next request's slices are to find its memory free.
        request.release()
        self._refuse_computed(request)
        assert request.generation.first_token is not None, "one pass gives one token"
        return request, (request.generation.first_token - start) * 1e3

    def _answer(
        self, cell: Cell, question: Question, request: OnlineRequest, ttft_ms: float
    ) -> dict[str, Any]:
        """The fields of an answer that its cell decides."""
        generation, served = request.generation, request.served
        token_ids, config = generation.token_ids, self._served.model.config
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
        f1 = token_f1(text, question.answers)
        whole = {chunk.chunk_id: chunk.text for chunk in question.chunks}
        return {
            "key": self._keys[cell.variant],
            "arm": cell.arm.name,
            "checkpoint": cell.checkpoint,
            "system": cell.system,
            "k_c": cell.width.k_c,
            "k": cell.width.k,
            "question_id": question.question_id,
            "dataset": question.dataset,
            "question": question.question,
            "chunk_ids": [chunk.chunk_id for chunk in question.chunks[: cell.width.k_c]],
            "evidence": [
                {
                    "chunk_id": piece.chunk_id,
                    "text": None if piece.text == whole[piece.chunk_id] else piece.text,
                }
                for piece in served.evidence
            ],
            "answer": text,
            "gold": question.answers,
            "f1": f1,
            "em": exact_match(text, question.answers),
            "ttft_ms": [ttft_ms],
            "load_ms": sum(request.stage_ms[stage] for stage in ("read", "copy", "rotate")),
            "extract_ms": served.extract_ms,
            "active_tokens": served.layout.tokens,
            "online_tokens": request.online_tokens,
            "recomputed_tokens": request.recomputed_tokens,
            "bytes_read": request.supplied.bytes_read if request.supplied else 0,
            "new_tokens": len(token_ids),
            "stopped": generation.stopped,
            "beyond_context": request.last_position > config.max_position_embeddings,
            "cut_tokens": served.cut_tokens,
            **asdict(diagnose(question, served, cell.width.k_c, f1)),
        }

    def _refuse_computed(self, request: OnlineRequest) -> None:
        """What is computed inside the clock is no measurement of a cache."""
        if request.supplied is None or not request.supplied.tokens_computed:
            return
        question = f"question {request.question.question_id!r}"
        if self.config.store.folder is None:
            raise UserError(
                f"store.memory_gib is too small to hold the chunks of {question}: raise it"
            )
        reasons = ", ".join(self._served.supply.not_stored) or "its chunks were evicted at once"
        raise UserError(
            f"slices of {question} are not in the store and could not be put there ({reasons}; the "
            "log says more): let it be written to and large enough (store.max_gib), fill it with "
            "`coinrag cache build` and store.keep=chunks, or compare with store.folder=null"
        )
