"""Builds on a real Ray cluster of two nodes of one CPU each, on this machine."""

import importlib
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from small import data_row, save_tiny_encoder, tiny_tokenizer, write_rows
from transformers import LlamaConfig

from data_builders.assets import AssetStore
from data_builders.executor import make_assets
from data_builders.ray_cluster import leaving_ray
from data_builders.records import Passage
from data_builders.workers import ChunkWork, EncodeWork, chunk_item, text_items
from recipes.building import BuildConfig, NuggetsConfig
from recipes.errors import UserError
from recipes.retrieval import RetrievalConfig

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow

TABLES = ("chunks.arrow", "samples.arrow")
# One split on the command line's terms, in small batches, so that there are many.
DRIVER = """
import json, logging, sys
from recipes.logs import set_up_logging
set_up_logging()
logging.getLogger("data_builders").setLevel(logging.WARNING)
from dataclasses import asdict
from data_builders import build, build_assets, pipeline, ray_cluster
from recipes.exit import run
from recipes.resolve import resolve
pipeline.PASSAGES_A_BATCH["rules"], build_assets.TEXTS_A_BATCH = 6, 16
def command():
    with ray_cluster.leaving_ray():
        built = build.build(resolve(sys.argv[1:]).config, "train")
    made = {kind: asdict(needed) for kind, needed in built.made.items()}
    print(json.dumps({"folder": str(built.folder), "made": made}))
sys.exit(run(command).status)
"""


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()


@pytest.fixture
def config(cluster) -> BuildConfig:
    return BuildConfig(executor="ray", ray_address=cluster.address)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A tokenizer, a random BERT as encoder, questions, and a recipe."""
    folder = tmp_path_factory.mktemp("ray")
    tiny_tokenizer().save_pretrained(folder / "model")
    LlamaConfig().save_pretrained(folder / "model")
    save_tiny_encoder(folder / "encoder")
    write_rows(folder / "train.jsonl", [data_row(number) for number in range(12)])
    write_rows(folder / "dev.jsonl", [data_row(number) for number in range(100, 102)])
    recipe = {
        "name": "ray",
        "model": {"path": str(folder / "model")},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "dev": [str(folder / "dev.jsonl")],
            "chunk_tokens": 64,
        },
        "retrieval": {
            "encoder": str(folder / "encoder"),
            "encoder_kind": "flag_mean",
            "k_c": 3,
            "k": 4,
        },
        "train": {"run_folder": str(folder / "run")},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def driver(world: Path, root: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    options = [str(world / "recipe.yaml"), f"data.built_root={world / root}", *arguments]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def finished(process: subprocess.Popen[str]) -> tuple[dict, str]:
    """What a driver printed, and its stderr without progress."""
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    lines = [line for line in stderr.splitlines() if not re.match(r"(build \w+|retrieve): ", line)]
    return json.loads(stdout), "\n".join(lines)


def tables(result: dict) -> list[bytes]:
    return [(Path(result["folder"]) / name).read_bytes() for name in TABLES]


def kept(root: Path, kind: str) -> int:
    """How many assets of a kind lie under `root`, as another process sees it."""
    count = 0
    for path in (root / "assets").glob(f"{kind}-*.sqlite"):
        with closing(sqlite3.connect(path, timeout=60)) as db:
            count += db.execute("SELECT count(*) FROM assets").fetchone()[0]
    return count


def killed_when_some_are_kept(process: subprocess.Popen[str], root: Path, kind: str) -> int:
    """Kills a driver at its first new assets of a kind; how many were kept in the end."""
    deadline = time.monotonic() + 120
    before = kept(root, kind)
    while kept(root, kind) == before:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    return kept(root, kind)


def test_killed_on_two_nodes_it_goes_on_and_gives_the_tables_of_a_local_build(world, config):
    on_cluster = ("build.executor=ray", f"build.ray_address={config.ray_address}")
    root = world / "cluster"
    encoded = killed_when_some_are_kept(driver(world, "cluster", *on_cluster), root, "encoded")
    result, noise = finished(driver(world, "cluster", *on_cluster))
    local, _ = finished(driver(world, "local"))
    assert tables(result) == tables(local)
    assert noise == ""
    made, made_locally = result["made"], local["made"]
    assert made_locally.pop("passages") == {"distinct": 48, "missing": 48}
    # What had arrived before the kill was there, and only the rest was made.
    assert made.pop("passages") == {"distinct": 48, "missing": 0}
    total = sum(needed["missing"] for needed in made_locally.values())
    assert 0 < encoded < total
    assert encoded + sum(needed["missing"] for needed in made.values()) == total


@pytest.fixture
def places() -> list[tuple[bytes, str]]:
    return [
        chunk_item(Passage(f"City {number}", "It lies at the sea. It is old. " * 4), None)
        for number in range(24)
    ]


def made(folder: Path, items, work, config: BuildConfig) -> dict[bytes, bytes]:
    with leaving_ray(), AssetStore(folder / f"{config.executor}.sqlite") as store:
        make_assets(store, items, work, config, 2, "items")
        return dict(store.get(key for key, _ in items))


def test_real_work_runs_on_both_nodes(world, config, places, tmp_path):
    chunk_work = ChunkWork(str(world / "model"), 64, NuggetsConfig())

    def with_node():
        worker = chunk_work()

        def work(payloads):
            import ray

            time.sleep(0.2)
            node = ray.get_runtime_context().get_node_id()
            return [f"{node} ".encode() + value for value in worker(payloads)]

        return work

    found = made(tmp_path, places, with_node, config)
    assert len({value.split(b" ", 1)[0] for value in found.values()}) == 2
    expected = made(tmp_path, places, chunk_work, BuildConfig())
    assert {key: value.split(b" ", 1)[1] for key, value in found.items()} == expected


def test_a_vector_has_the_bits_of_the_driver_whatever_its_threads(world, config, tmp_path):
    retrieval = RetrievalConfig(encoder=str(world / "encoder"), encoder_kind="flag_mean")
    items = list(text_items(f"text {number} " * (number + 1) for number in range(12)))
    work = EncodeWork(retrieval, 2)
    assert made(tmp_path, items, work, config) == made(tmp_path, items, work, BuildConfig())


def test_a_worker_that_dies_is_replaced(config, places, tmp_path, caplog):
    died = tmp_path / "died"

    def work():
        def reversed_payloads(payloads):
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return [payload[::-1].encode() for payload in payloads]

        return reversed_payloads

    found = made(tmp_path, places, work, config)
    assert died.exists()
    assert found == {key: payload[::-1].encode() for key, payload in places}
    assert "a worker died, its batch is tried again" in caplog.text


def test_a_batch_that_kills_every_worker_ends_the_build(config, places, tmp_path):
    def work():
        return lambda payloads: os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match="4 workers died at the same batch"):
        made(tmp_path, places[:1], work, config)


def test_a_mistake_of_the_users_is_told_and_a_fault_of_ours_keeps_its_traceback(
    config, places, tmp_path
):
    missing = RetrievalConfig(encoder=str(tmp_path / "nowhere"))
    with pytest.raises(
        UserError, match=r"worker of the Ray cluster: retrieval\.encoder: .*nowhere"
    ):
        made(tmp_path, places, EncodeWork(missing, 1), config)

    def faulty():
        return lambda payloads: [payloads.index("not there")]

    with pytest.raises(Exception, match="'not there' is not in list") as raised:
        made(tmp_path, places, faulty, config)
    assert not isinstance(raised.value, UserError)


def test_a_package_that_workers_lack(config, places, tmp_path, monkeypatch, capfd):
    (tmp_path / "only_here.py").write_text("def work():\n    return lambda payloads: []\n")
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("only_here").work
    with pytest.raises(UserError, match="Ray cluster: No module named 'only_here'"):
        made(tmp_path, places, work, config)
    assert re.fullmatch("(build items: .*\n)+", capfd.readouterr().err)


def test_warnings_of_workers_are_told_once(config, places, tmp_path, caplog):
    def work():
        def warning(payloads):
            logging.getLogger("data_builders.encoder").warning("a text was %s", "cut")
            return [b""] * len(payloads)

        return warning

    made(tmp_path, places, work, config)
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.endswith(": a text was cut")


def test_what_the_cluster_has_no_room_for(config, places, tmp_path, caplog):
    many = config.model_copy(update={"ray_workers": 5})

    def work():
        return lambda payloads: [payload.encode() for payload in payloads]

    assert made(tmp_path, places, work, many) == {k: payload.encode() for k, payload in places}
    assert "room for 2 of 5 workers" in caplog.text
    gpus = config.model_copy(update={"ray_gpus_a_worker": 1.0})
    with pytest.raises(UserError, match="no node has room for a worker of 1 CPU and 1 GPUs"):
        made(tmp_path / "gpus", places, work, gpus)


def test_a_connection_of_before_stays(cluster, config, places, tmp_path):
    import ray

    def work():
        return lambda payloads: [payload.encode() for payload in payloads]

    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        made(tmp_path, places, work, config)
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    made(tmp_path / "again", places, work, config)
    assert not ray.is_initialized()


def test_a_ray_of_its_own_is_quiet_and_leaves_nothing_running(tmp_path):
    script = """
import sys
from pathlib import Path
from data_builders import assets, executor, ray_cluster
from recipes.building import BuildConfig
def work():
    return lambda payloads: [payload.encode() for payload in payloads]
items = [(payload.encode(), payload) for payload in "abcdefgh"]
with ray_cluster.leaving_ray(), assets.AssetStore(Path(sys.argv[1])) as store:
    config = BuildConfig(executor="ray", ray_workers=1)
    print(executor.make_assets(store, items, work, config, 2, "letters"))
    print(sorted(store.get(key for key, _ in items).values()))
    sys.stdout.flush()
"""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    mark = f"COINRAG_TEST_{os.getpid()}"
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store.sqlite")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TMPDIR": str(folder), mark: "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(r"(build letters: .*\n)+", ended.stderr)
    assert ended.stdout.splitlines()[1] == str([letter.encode() for letter in "abcdefgh"])
    left = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in environment.read_bytes():
                left.append(environment.parent.joinpath("cmdline").read_bytes())
    assert left == []
