"""Where the work of a build runs: in this process, or on the workers of a Ray cluster.

Work goes from payloads to asset values and depends on nothing else, so the place does not change
what comes out. Every finished batch is kept at once; a stopped build has only the rest to do.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing

from data_builders.assets import AssetStore, Needed
from recipes.building import BuildConfig
from recipes.progress import Progress

log = logging.getLogger(__name__)

Worker = Callable[[Sequence[str]], list[bytes]]
"""One asset value for each payload."""
Work = Callable[[], Worker]
"""Loads what the work needs; plain data, so that it can be sent to other machines."""
Batch = list[tuple[bytes, str]]
"""Keys and payloads."""
Done = list[tuple[bytes, bytes]]
"""Keys and asset values."""


def make_assets(
    store: AssetStore,
    items: Iterable[tuple[bytes, str]],
    work: Work,
    config: BuildConfig,
    batch_size: int,
    unit: str,
) -> Needed:
    """Makes the assets of those of the (key, payload) items that have none in the store.

    Only this process touches the store. A Ray that this starts stays until the end of
    `ray_cluster.leaving_ray`.

    Raises:
        UserError: the work cannot be loaded, here or on a worker, or there is no such cluster.
    """
    needed = store.need(items)
    reused = needed.distinct - needed.missing
    log.info("%s: %d of %d made before", unit, reused, needed.distinct)
    if needed.missing == 0:
        return needed
    with (
        Progress(f"build {unit}", needed.missing, unit) as progress,
        closing(_run(work, store.missing(batch_size), config)) as finished,
    ):
        for done in finished:
            store.put(done)
            progress.advance(len(done))
    return needed


def _run(work: Work, batches: Iterator[Batch], config: BuildConfig) -> Generator[Done, None, None]:
    if config.executor == "ray":
        from data_builders.ray_executor import run_on_ray

        yield from run_on_ray(work, batches, config)
        return
    worker = work()
    for batch in batches:
        keys, payloads = zip(*batch, strict=True)
        yield list(zip(keys, worker(payloads), strict=True))
