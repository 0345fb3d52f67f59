"""The Ray cluster of a build: connected to when first needed, left at the end."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.building import BuildConfig
from recipes.errors import UserError

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0


def connected_ray(config: BuildConfig) -> Any:
    """The library `ray`, connected to the configured cluster, or to that of an earlier call.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(
            "build.executor: ray is not installed; run `pip install coinrag[ray]`"
        ) from error
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.ray_address is None:
        options |= {
            "address": "local",
            "num_cpus": config.ray_workers,
            "include_dashboard": False,
            # Sockets lie there, and their paths must be short: no TMPDIR.
            "_temp_dir": None if "RAY_TMPDIR" in os.environ else "/tmp/ray",
        }
    else:
        _check_address(config.ray_address)
        options["address"] = config.ray_address
    try:
        with _without_native_log():
            ray.init(**options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"build.ray_address: Ray does not start or answer: {error}") from error
    return ray


@contextmanager
def leaving_ray() -> Iterator[None]:
    """Leaves the Ray that is started or connected to in this block; not one from before it."""
    before = _is_connected()
    try:
        yield
    finally:
        if not before and _is_connected():
            sys.modules["ray"].shutdown()


def _is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def count_workers(nodes: Sequence[Mapping[str, Any]], config: BuildConfig) -> int:
    """`build.ray_workers`, or as many as the nodes of the cluster hold at once.

    Args:
        nodes: what `ray.nodes()` gives.
        config: a worker takes one CPU and `ray_gpus_a_worker` GPUs.

    Raises:
        UserError: there is no room for one worker.
    """
    gpus = config.ray_gpus_a_worker
    found = [node["Resources"] for node in nodes if node["Alive"]]
    room = 0
    for node in found:
        places, cards = int(node.get("CPU", 0)), int(node.get("GPU", 0))
        if gpus >= 1:
            places = min(places, int(cards // gpus))
        elif gpus > 0:
            # A worker's share is of one card.
            places = min(places, cards * int(1 / gpus + 1e-6))
        room += places
    if room == 0:
        there = "; ".join(f"{n.get('CPU', 0):g} CPUs, {n.get('GPU', 0):g} GPUs" for n in found)
        raise UserError(
            f"build.ray_gpus_a_worker: no node has room for a worker of 1 CPU and {gpus:g} GPUs; "
            f"the cluster's nodes: {there}"
        )
    if room < config.ray_workers:
        log.warning("the Ray cluster has room for %d of %d workers", room, config.ray_workers)
    return min(room, config.ray_workers)


def _check_address(address: str) -> None:
    """Refuses an address without a cluster, where `ray.init` waits for minutes and then exits."""
    reason = ""
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        code = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR')"
        subprocess.run(
            [sys.executable, "-c", code, address],
            check=True,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
        )
        return
    except OSError as error:
        reason = str(error)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_ANSWER_SECONDS:.0f} seconds"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
    raise UserError(f"build.ray_address: no Ray cluster at {address!r}: {reason}")


@contextmanager
def _without_native_log() -> Iterator[None]:
    """Keeps Ray's C++ part, which has loggers of its own, from stderr, now and later."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    stderr = os.dup(2)
    try:
        # It says once that it obeys the variable.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
