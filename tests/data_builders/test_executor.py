import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from data_builders import ray_cluster
from data_builders.assets import AssetStore, Needed
from data_builders.executor import make_assets
from data_builders.ray_cluster import connected_ray, count_workers, leaving_ray
from launch import cli
from recipes.building import BuildConfig
from recipes.errors import UserError
from recipes.fields import options

LAUNCH = Path(cli.__file__).parent
LOCAL = BuildConfig()
ITEMS = [(bytes([number]), str(number)) for number in range(10)]


class Doubling:
    """Work that notes what it is asked for, and fails when it is to."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.fails_at = fails_at
        self.loaded = 0
        self.batches: list[list[str]] = []

    def __call__(self):
        self.loaded += 1

        def worker(payloads):
            if self.fails_at in payloads:
                raise RuntimeError("on the way")
            self.batches.append(list(payloads))
            return [(payload * 2).encode() for payload in payloads]

        return worker


def test_each_missing_item_is_made_once(tmp_path):
    work = Doubling()
    with AssetStore(tmp_path / "store.sqlite") as store:
        store.put([(b"\x03", b"kept")])
        needed = make_assets(store, [*ITEMS, *ITEMS], work, LOCAL, 4, "items")
        assert needed == Needed(10, 9)
        assert work.batches == [list("0124"), list("5678"), ["9"]]
        values = store.get(key for key, _ in ITEMS)
    assert values == {key: b"kept" if text == "3" else (text * 2).encode() for key, text in ITEMS}


def test_finished_batches_stay_when_a_later_one_fails(tmp_path):
    with AssetStore(tmp_path / "store.sqlite") as store:
        with pytest.raises(RuntimeError, match="on the way"):
            make_assets(store, ITEMS, Doubling("6"), LOCAL, 2, "items")
        rest = Doubling()
        assert make_assets(store, ITEMS, rest, LOCAL, 2, "items") == Needed(10, 4)
        assert rest.batches == [["6", "7"], ["8", "9"]]


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_nothing_is_loaded_or_started_when_nothing_is_missing(tmp_path, executor):
    work = Doubling()
    config = BuildConfig(executor=executor, ray_address="localhost:1")
    with AssetStore(tmp_path / "store.sqlite") as store:
        store.put((key, b"") for key, _ in ITEMS)
        assert make_assets(store, ITEMS, work, config, 2, "items") == Needed(10, 0)
    assert work.loaded == 0


def test_values_of_another_number_are_a_fault(tmp_path):
    with (
        AssetStore(tmp_path / "store.sqlite") as store,
        pytest.raises(ValueError, match=r"zip\(\)"),
    ):
        make_assets(store, ITEMS, lambda: lambda payloads: [b""], LOCAL, 2, "items")


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_addresses_of_clusters(address):
    assert BuildConfig(ray_address=address).ray_address == address


@pytest.mark.parametrize(
    "address", ["", "head", "ray://head:10001", "http://head:8265", "head:port", "head:6379/", ":1"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValidationError, match=r"auto or host:port|at least 1 character"):
        BuildConfig(ray_address=address)


def test_a_worker_has_a_share_of_one_gpu_or_whole_ones():
    assert [BuildConfig(ray_gpus_a_worker=n).ray_gpus_a_worker for n in (0, 0.25, 1, 2)]
    with pytest.raises(ValidationError, match=r"at most 1 or a whole number, got 1\.5"):
        BuildConfig(ray_gpus_a_worker=1.5)


@pytest.mark.parametrize(
    ("gpus", "room"), [(0, 12), (1, 5), (2, 2), (0.5, 10), (0.6, 5), (0.1, 12), (4, 1)]
)
def test_workers_that_nodes_hold(gpus, room):
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}},
        {"Alive": True, "Resources": {}},
        {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}},
    ]
    config = BuildConfig(ray_workers=50, ray_gpus_a_worker=gpus)
    assert count_workers(nodes, config) == room
    assert count_workers(nodes, config.model_copy(update={"ray_workers": 1})) == 1


def test_no_node_holds_a_worker():
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}]
    with pytest.raises(UserError, match=r"1 CPU and 2 GPUs; .*: 8 CPUs, 1 GPUs"):
        count_workers(nodes, BuildConfig(ray_gpus_a_worker=2))


def test_ray_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install coinrag\[ray\]"):
        connected_ray(BuildConfig(executor="ray"))


def test_leaving_a_ray_that_was_never_needed():
    with leaving_ray():
        pass
    assert not ("ray" in sys.modules and sys.modules["ray"].is_initialized())


def test_no_cluster_at_the_address(monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setattr(ray_cluster, "_ANSWER_SECONDS", 6.0)
    with socket.create_server(("127.0.0.1", 0)) as other_service:
        silent = f"127.0.0.1:{other_service.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refused = f"127.0.0.1:{closed.getsockname()[1]}"
        for address, reason in ((refused, "refused"), (silent, "no answer within 6 seconds")):
            config = BuildConfig(executor="ray", ray_address=address)
            started = time.monotonic()
            with pytest.raises(UserError, match=rf"no Ray cluster at '{address}': .*{reason}"):
                connected_ray(config)
            assert time.monotonic() - started < 10


def built_options(words: list[str]) -> list[str]:
    """The options after `coinrag build RECIPE` among the words of a command line."""
    at = words.index("coinrag")
    assert words[at : at + 2] == ["coinrag", "build"]
    return [word for word in words[at + 3 :] if "=" in word]


def test_the_kubernetes_manifest_runs_our_command():
    job = yaml.safe_load((LAUNCH / "kubernetes" / "build.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    words = shlex.split(spec["entrypoint"])
    arguments = cli.parse([word for word in words if word != "coinrag"])
    assert arguments.command == "build"
    values = dict(option.split("=", 1) for option in built_options(words))
    assert set(values) <= {name for name, _ in options()}
    config = BuildConfig(
        **{name.removeprefix("build."): yaml.safe_load(value) for name, value in values.items()}
    )
    workers = spec["rayClusterSpec"]["workerGroupSpecs"]
    cpus = sum(group["replicas"] * int(group["rayStartParams"]["num-cpus"]) for group in workers)
    assert (config.executor, config.ray_address, config.ray_workers) == ("ray", "auto", cpus)
    for group in (spec["rayClusterSpec"]["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_slurm_script_runs_our_command(tmp_path):
    """With stand-ins for Slurm's commands and for `ray`, which show how they are called."""
    for name, body in {
        "scontrol": "printf 'node1\\nnode2\\n'",
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "ray": "printf '%s\\n' \"$@\"",
    }.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "node[1-2]", "JOB_ID": "34567", "JOB_NUM_NODES": "2"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    shown = subprocess.run(
        ["bash", str(LAUNCH / "slurm" / "build.sbatch"), "quickstart", "seed=1"],
        env=os.environ | environment | {"SLURM_CPUS_PER_TASK": "4", "COINRAG_ENV": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    words = shown.stdout.splitlines()
    assert words[:5] == ["symmetric-run", "--address", "node1:24567", "--min-nodes", "2"]
    assert words[words.index("--") + 1 :] == [
        *("coinrag", "build", "quickstart", "seed=1", "build.executor=ray"),
        *("build.ray_address=node1:24567", "build.ray_workers=8"),
    ]
    assert {option.split("=")[0] for option in built_options(words)} <= {
        name for name, _ in options()
    }
