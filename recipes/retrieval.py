"""The section that says what a question is given: chunks, nuggets in them, and their scores."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recipes.section import Device, Fraction, Natural, Positive, Section, Text, mistake

Weight = Annotated[float, Field(ge=0.0)]


class RetrievalWeights(Section):
    """What each of BGE-M3's scores counts in the score of a text."""

    dense: Weight = 1.0
    sparse: Weight = 0.0
    colbert: Weight = 0.0

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if not (self.dense or self.sparse or self.colbert):
            raise mistake("expected a weight above 0")
        return self


class BudgetConfig(Section):
    """Nuggets are taken by score as long as they fit; `retrieval.k` is then the most of them."""

    # Of all slices together, without prompt, query and anchors.
    tokens: Positive
    # A nugget more alike to a chosen one is left out: the tokens that both have, over all that
    # either has. null: none is.
    max_similarity: Fraction | None = 0.8
    # The best nuggets of every retrieved chunk that come first: no score tells which chunk is the
    # bridge to another.
    a_chunk: Natural = 0


class CrossEncoderConfig(Section):
    """A reranker, which reads a question and a text together."""

    # A model's name or folder, or where `coinrag train-scorer` leaves it.
    path: Text
    # Of question and text together; a longer text is cut.
    max_tokens: Annotated[int, Field(ge=32)] = 512
    # Pairs a forward pass. null: 32 on a GPU; 1 on a CPU, where a score's bits then do not depend
    # on the pairs beside it.
    batch_size: Positive | None = None
    device: Device = "cpu"


class HiddenFfnConfig(Section):
    """A small network that scores a nugget by its vector and the question's."""

    # The folder where `coinrag train-scorer` leaves it.
    path: Text
    # encoder: the dense vectors of retrieval.encoder; generator: means of model.path's last hidden
    # states, over a nugget's span in its chunk and over the question.
    vectors: Literal["encoder", "generator"] = "encoder"
    width: Positive = 256
    # The network corrects the cosine of the two vectors, and begins as it; false: it stands alone.
    add_cosine: bool = True


class RetrievalConfig(Section):
    encoder: Text
    encoder_kind: Literal["bge_m3", "flag_cls", "flag_mean"] = "bge_m3"
    weights: RetrievalWeights = RetrievalWeights()
    # Ranks chunks by reciprocal rank fusion of the encoder's ranking and BM25's.
    bm25: bool = False
    # contexts: a question is searched in its own passages; corpus: in all passages of the split.
    candidates: Literal["contexts", "corpus"] = "contexts"
    # one_stage: the best nuggets of all candidates, without choosing chunks first.
    selection: Literal["two_stage", "one_stage"] = "two_stage"
    k_c: Positive = 5
    k: Positive = 10
    # bi_encoder: by the encoder above; cross_encoder: by its section, question and nugget together;
    # hidden_ffn: by its section, a network that is trained for it.
    nugget_scorer: Literal["bi_encoder", "cross_encoder", "hidden_ffn"] = "bi_encoder"
    cross_encoder: CrossEncoderConfig | None = None
    hidden_ffn: HiddenFfnConfig | None = None
    # Of how many retrieved chunks the cross-encoder chooses the k_c; null: it chooses none.
    rerank_chunks: Positive | None = None
    # null: the best k nuggets, however long they are.
    budget: BudgetConfig | None = None
    # Nuggets with a lower score are left out. In the unit of the scorer: `coinrag nuggets` says
    # what a threshold keeps.
    min_score: float | None = None
    order: Literal["rank_then_document", "score"] = "rank_then_document"
    overlap: Literal["merge", "keep"] = "merge"
    # Texts a forward pass. null: 32 on a GPU; 1 on a CPU, where padding costs more than batches
    # gain and a vector's bits then do not depend on which texts it was encoded with.
    batch_size: Positive | None = None
    device: Device = "cpu"

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.encoder_kind != "bge_m3":
            for name in ("sparse", "colbert"):
                if getattr(self.weights, name):
                    raise mistake(
                        f"{name} scores need encoder_kind bge_m3, got {self.encoder_kind}",
                        at=f"retrieval.weights.{name}",
                        involves="retrieval.encoder_kind",
                    )
        if self.candidates == "corpus" and not self.weights.dense:
            raise mistake(
                "a corpus is searched by dense vectors first: expected a weight above 0",
                at="retrieval.weights.dense",
                involves="retrieval.candidates",
            )
        if self.bm25 and self.selection == "one_stage":
            raise mistake(
                "BM25 helps to choose chunks, which one_stage does not do",
                at="retrieval.bm25",
                involves="retrieval.selection",
            )
        if self.budget is not None and self.selection == "two_stage":
            reserved = self.budget.a_chunk * self.k_c
            if reserved > self.k:
                raise mistake(
                    f"{self.budget.a_chunk} nuggets of each of {self.k_c} chunks are more than k "
                    f"({self.k}): expected at most {self.k // self.k_c}",
                    at="retrieval.budget.a_chunk",
                    involves="retrieval.k",
                )
        return self

    @model_validator(mode="after")
    def _scorer_is_described(self) -> Self:
        scorer = self.nugget_scorer
        if scorer != "bi_encoder" and getattr(self, scorer) is None:
            raise mistake(
                f"retrieval.nugget_scorer {scorer} needs the section retrieval.{scorer}",
                at=f"retrieval.{scorer}",
                involves="retrieval.nugget_scorer",
            )
        return self

    @model_validator(mode="after")
    def _chunks_to_rerank(self) -> Self:
        if self.rerank_chunks is None:
            return self
        if self.cross_encoder is None:
            raise mistake(
                "retrieval.rerank_chunks needs the section retrieval.cross_encoder",
                at="retrieval.cross_encoder",
                involves="retrieval.rerank_chunks",
            )
        if self.selection == "one_stage":
            raise mistake(
                "the cross-encoder chooses among chunks, which one_stage does not do",
                at="retrieval.rerank_chunks",
                involves="retrieval.selection",
            )
        if self.rerank_chunks < self.k_c:
            raise mistake(
                f"expected at least retrieval.k_c ({self.k_c}), got {self.rerank_chunks}",
                at="retrieval.rerank_chunks",
                involves="retrieval.k_c",
            )
        return self
