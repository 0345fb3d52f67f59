"""Work done in shards that are on disk whole or not at all, so that it can stop and go on."""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data_builders.retrieval import Embeddings, Encoder
from recipes.progress import Progress

log = logging.getLogger(__name__)
TEXTS_A_SHARD = 1024


def run_shards(
    folder: Path, items: int, size: int, write: Callable[[Path, range], None], unit: str
) -> list[Path]:
    """Makes each missing shard of `size` items; gives the paths of all, in order.

    `write` gets a temporary path, which may become a file or a folder, and the items' numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranges = [range(first, min(first + size, items)) for first in range(0, items, size)]
    shards = [(folder / f"{number:05d}", shard) for number, shard in enumerate(ranges)]
    missing = [(path, shard) for path, shard in shards if not path.exists()]
    if len(missing) < len(shards):
        finished = len(shards) - len(missing)
        log.info("%s: %d of %d shards were finished before", unit, finished, len(shards))
    if not missing:
        return [path for path, _ in shards]
    with Progress(f"build {unit}", sum(len(shard) for _, shard in missing), unit) as progress:
        for path, shard in missing:
            temporary = path.with_suffix(".tmp")
            # A folder that an interrupted build left; a file would be written over.
            shutil.rmtree(temporary, ignore_errors=True)
            write(temporary, shard)
            temporary.replace(path)
            progress.advance(len(shard))
    return [path for path, _ in shards]


def embed_once(
    folder: Path, texts: Sequence[str], load: Callable[[], Encoder], unit: str
) -> Callable[[Sequence[str]], Embeddings]:
    """Embeds each distinct text once; gives a function from texts to their rows.

    `load` is called only if some text still has to be embedded.
    """
    distinct = list(dict.fromkeys(texts))

    def write(target: Path, shard: range) -> None:
        rows = load()([distinct[index] for index in shard])
        with target.open("wb") as file:
            np.save(file, rows)

    paths = run_shards(folder, len(distinct), TEXTS_A_SHARD, write, unit)
    shards = [np.load(path, mmap_mode="r") for path in paths]
    places = {text: divmod(index, TEXTS_A_SHARD) for index, text in enumerate(distinct)}

    def look_up(wanted: Sequence[str]) -> Embeddings:
        return np.stack([shards[shard][row] for shard, row in map(places.__getitem__, wanted)])

    return look_up
