"""Exact search by cosine over vectors that stay on disk.

FAISS finds candidates block by block; their scores are then those of `retrieval.cosine_scores`, so
a corpus is ranked as a question's own contexts are. Memory does not grow with the corpus, unless
its file is mapped, and then by what the system has to spare.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_builders.retrieval import SCORE_DECIMALS, Embeddings, cosine_scores

BLOCK_BYTES = 16 * 2**20
# Neighbours that FAISS returns beyond those asked for, so that few blocks need a second look.
MARGIN = 64
# Rows that are scored at once in float64.
PIECE_ROWS = 4096


def write_vectors(path: Path, blocks: Iterable[Embeddings]) -> int:
    """Writes blocks of unit rows `[rows, dimensions]`, one after another, as one `.npy` file.

    The file appears at `path` when it is whole; until then it is `path` with `.partial` behind.

    Returns:
        How many rows were written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    rows, dimensions = 0, 0
    with partial.open("wb") as file:
        _write_header(file, rows, dimensions)
        start = file.tell()
        for block in blocks:
            assert block.dtype == np.float32, f"vectors are float32, got {block.dtype}"
            assert dimensions in (0, block.shape[1]), "blocks have different dimensions"
            dimensions = block.shape[1]
            rows += len(block)
            file.write(block.tobytes())
        file.seek(0)
        _write_header(file, rows, dimensions)
        # NumPy pads the header so that the first number can grow; its end must not have moved.
        assert file.tell() == start, "the header has outgrown its place"
    partial.replace(path)
    return rows


def _write_header(file: BinaryIO, rows: int, dimensions: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dimensions)}
    np.lib.format.write_array_header_1_0(file, header)


def map_vectors(path: Path) -> Embeddings:
    """The rows of a file by `write_vectors`, mapped into memory: read once, when first touched.

    Raises:
        ValueError: it is shorter than its header says, or no such file.
    """
    return np.asarray(np.load(path, mmap_mode="r"))


def search(
    vectors: Path | Embeddings, queries: Embeddings, count: int
) -> tuple[NDArray[np.int64], Embeddings]:
    """The nearest rows of a file by `write_vectors` for each query, best first.

    Exact: the result is that of `top(cosine_scores(query, rows), count)` over all rows, so ties go
    to the lower row, also where they are cut. Takes twice `BLOCK_BYTES` of memory for vectors, none
    if they are mapped, and about 16 bytes a query and neighbour.

    Args:
        vectors: unit rows: the file, which is read anew, or what `map_vectors` gives.
        queries: unit rows `[queries, dimensions]`.
        count: neighbours a query; all rows if there are fewer.

    Returns:
        Row numbers and rounded cosines, both `[queries, min(count, rows)]`.
    """
    ids = np.empty((len(queries), 0), dtype=np.int64)
    scores = np.empty((len(queries), 0), dtype=np.float32)
    for first, block in _blocks(vectors):
        found = _search_block(block, queries, count, scores)
        width = min(count, first + len(block))
        best_ids = np.empty((len(queries), width), dtype=np.int64)
        best_scores = np.empty((len(queries), width), dtype=np.float32)
        for query, (rows, row_scores) in enumerate(found):
            merged = np.concatenate([scores[query], row_scores])
            # Stable, and earlier blocks come first: the lower row wins a tie.
            order = np.argsort(-merged, kind="stable")[:width]
            best_ids[query] = np.concatenate([ids[query], first + rows])[order]
            best_scores[query] = merged[order]
        ids, scores = best_ids, best_scores
    return ids, scores


def _search_block(
    block: Embeddings, queries: Embeddings, count: int, best: Embeddings
) -> Iterator[tuple[NDArray[np.int64], Embeddings]]:
    """For each query the rows, ascending, that may belong to its result, and their scores.

    `best` holds each query's scores in the blocks before this one, in falling order.
    """
    import faiss

    nearest = min(count + MARGIN, len(block))
    # A float32 sum of d products of unit vectors is off by d * 2^-24 at most, and two of them are
    # compared; rounding moves a score by half a unit, and two of those as well.
    slack = 2 * block.shape[1] * 2.0**-24 + 10.0**-SCORE_DECIMALS
    products, rows = faiss.knn(queries, block, nearest, metric=faiss.METRIC_INNER_PRODUCT)
    for at, query in enumerate(queries):
        # What is surely below the count-th best, here or so far, is out.
        floor = products[at, min(count, nearest) - 1]
        if best.shape[1] >= count:
            floor = max(floor, best[at, count - 1])
        kept = np.sort(rows[at, products[at] >= floor - slack])
        if len(kept) == nearest < len(block):
            # There may be more than the margin holds, as when a text stands in many places.
            kept = np.flatnonzero(block @ query >= floor - slack)
        pieces = [kept[piece : piece + PIECE_ROWS] for piece in range(0, len(kept), PIECE_ROWS)]
        exact = [score for piece in pieces for score in cosine_scores(query, block[piece])]
        yield kept, np.array(exact, dtype=np.float32)


def _blocks(vectors: Path | Embeddings) -> Iterator[tuple[int, Embeddings]]:
    """The rows in blocks, each with the number of its first; of a file read, and never mapped."""
    if isinstance(vectors, np.ndarray):
        step = _block_rows(vectors.shape[1], vectors.itemsize)
        for first in range(0, len(vectors), step):
            yield first, vectors[first : first + step]
        return
    with vectors.open("rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0), f"{vectors} is no file of vectors"
        (rows, dimensions), _, kind = np.lib.format.read_array_header_1_0(file)
        step = _block_rows(dimensions, kind.itemsize)
        for first in range(0, rows, step):
            block = np.fromfile(file, kind, min(step, rows - first) * dimensions)
            yield first, block.reshape(-1, dimensions)


def _block_rows(dimensions: int, item_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(1, dimensions * item_bytes))
