"""The work of a build on a Ray cluster, through Ray Data: one actor a worker.

The driver sends payloads and receives values; workers read only their models. Nothing depends on
which worker gets what, and in which order.
"""

import logging
import os
import queue
import re
import socket
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from logging.handlers import QueueHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_builders.executor import Batch, Done, Work
from data_builders.ray_cluster import connected_ray, count_workers
from recipes.building import BuildConfig
from recipes.errors import UserError
from recipes.exit import is_users

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

# Characters of payload in Ray's object store at once. After so many the workers load anew.
WINDOW_CHARACTERS = 1 << 28
# Ray tries a batch whose worker died again, and would for ever.
MAX_ATTEMPTS = 4
# For so long nothing may arrive: longer than any batch takes.
STALLED_SECONDS = 6 * 3600.0
SECONDS_TO_WARNING = 120.0
# Packages whose version decides results; every worker must have the driver's.
_PACKAGES = ("coinrag", "torch", "transformers", "tokenizers", "FlagEmbedding", "numpy")


def run_on_ray(
    work: Work, batches: Iterator[Batch], config: BuildConfig
) -> Generator[Done, None, None]:
    """Does the batches on the cluster's workers; gives each when it is done, in any order.

    A Ray that this starts or connects to stays until `ray_cluster.leaving_ray` ends.

    Raises:
        UserError: Ray is not installed, there is no such cluster, it has no room for a worker, a
            worker lacks a package or met a mistake of the user's, or `MAX_ATTEMPTS` workers died
            at one batch.
        ray.exceptions.RayError: a worker raised another exception; it holds the traceback.
    """
    ray = connected_ray(config)
    import pyarrow as pa

    workers = count_workers(ray.nodes(), config)
    attempts = ray.remote(num_cpus=0)(_Attempts).remote()
    waiting = threading.Timer(SECONDS_TO_WARNING, _warn_of_waiting)
    waiting.daemon = True
    waiting.start()
    told: set[str] = set()
    with (
        ray.data.DataContext.current(_quiet_context(ray)),
        # Ray prints what it will try again; of dead workers ours tell.
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
    ):
        try:
            for window in _windows(batches):
                done = ray.data.from_blocks([_block(pa, batch) for batch in window]).map_batches(
                    _RayWorker,
                    fn_constructor_args=(work, attempts, _versions()),
                    batch_size=None,
                    batch_format="pyarrow",
                    compute=ray.data.ActorPoolStrategy(size=min(workers, len(window))),
                    num_cpus=1,
                    num_gpus=config.ray_gpus_a_worker,
                )
                for table in done.iter_batches(batch_size=None, batch_format="pyarrow"):
                    for row in table.to_pylist():
                        waiting.cancel()
                        yield _received(row, told)
        except ray.exceptions.RayError as error:
            if lacking := re.search(r"ModuleNotFoundError: (.+)", str(error)):
                raise UserError(f"on a worker of the Ray cluster: {lacking[1]}") from None
            raise
        finally:
            waiting.cancel()


def _windows(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    window: list[Batch] = []
    characters = 0
    for batch in batches:
        window.append(batch)
        characters += sum(len(payload) for _, payload in batch)
        if characters >= WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _block(pa: Any, batch: Batch) -> "pa.Table":
    """A batch as one row, which Ray Data cannot split."""
    keys, payloads = zip(*batch, strict=True)
    return pa.table(
        {
            "keys": pa.array([keys], pa.list_(pa.binary())),
            "payloads": pa.array([payloads], pa.list_(pa.large_string())),
        }
    )


def _received(row: Mapping[str, Any], told: set[str]) -> Done:
    for warning in row["warnings"]:
        if warning not in told:
            told.add(warning)
            log.warning("on %s: %s", row["host"], warning)
    if row["mistake"] is not None:
        raise UserError(f"on {row['host']}, a worker of the Ray cluster: {row['mistake']}")
    return list(zip(row["keys"], row["values"], strict=True))


class _Attempts:
    """Counts how often each batch was begun, in an actor that outlives the workers."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def begin(self, batch: bytes) -> int:
        self._counts[batch] += 1
        return self._counts[batch]


class _RayWorker:
    """A worker in an actor of its own; Ray Data gives it one batch after another."""

    def __init__(self, work: Work, attempts: Any, versions: Mapping[str, str]) -> None:
        self._load = cache(work)
        self._attempts = attempts
        self._versions = versions
        self._warnings: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        handler = QueueHandler(self._warnings)
        handler.setLevel(logging.WARNING)
        logging.getLogger("data_builders").addHandler(handler)

    def __call__(self, batch: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        (row,) = batch.to_pylist()
        values: list[bytes] = []
        mistake = None
        # An exception would come back as Ray's own, with the user's mistake lost in a traceback.
        try:
            self._check_versions()
            self._check_attempts(row["keys"][0])
            values = self._load()(row["payloads"])
        except Exception as error:
            if not is_users(error):
                raise
            mistake = str(error)
        warnings = [self._warnings.get().getMessage() for _ in range(self._warnings.qsize())]
        return pa.table(
            {
                "keys": batch["keys"],
                "values": pa.array([values], pa.list_(pa.large_binary())),
                "mistake": pa.array([mistake], pa.string()),
                "warnings": pa.array([warnings], pa.list_(pa.string())),
                "host": [socket.gethostname()],
            }
        )

    def _check_versions(self) -> None:
        here = _versions()
        others = [
            f"{name} {here[name]} (the driver has {wanted})"
            for name, wanted in self._versions.items()
            if here[name] != wanted
        ]
        if others:
            raise UserError(f"other versions than the driver's: {', '.join(others)}")

    def _check_attempts(self, batch: bytes) -> None:
        import ray

        attempt = ray.get(self._attempts.begin.remote(batch))
        if attempt > 1:
            log.warning("a worker died, its batch is tried again")
        if attempt > MAX_ATTEMPTS:
            raise UserError(
                f"{MAX_ATTEMPTS} workers died at the same batch, the usual cause is too little "
                "memory; fewer build.ray_workers leave more for each"
            )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            # What follows the plus sign tells CPU and GPU builds apart.
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _quiet_context(ray: Any) -> Any:
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = STALLED_SECONDS
    return context


def _warn_of_waiting() -> None:
    log.warning(
        "no worker of the Ray cluster has finished a batch for %.0f seconds; "
        "`ray status` shows whether they wait for CPUs or GPUs that others use",
        SECONDS_TO_WARNING,
    )
