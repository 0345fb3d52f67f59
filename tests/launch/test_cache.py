"""`coinrag cache`: what is stored is what the model gives, and every damage is told or repaired."""

import json
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from small import data_row, write_rows

from cache_ops.encode import encode_chunk
from cache_ops.hf import load_model, load_tokenizer
from cache_ops.records import RecordLayout
from cache_ops.store import Store
from cache_ops.store.lock import writer_lock
from cache_ops.store.reading import SliceReader
from cache_ops.store.stored import chunk_key, union_ranges
from data_builders import kv_build
from data_builders.build import load_built
from data_builders.prompt import PromptTemplate
from data_builders.tables import Tables
from launch import cli
from recipes.resolve import resolve

Recipe = Callable[..., list[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """A function that runs a command and gives the JSON that it ends with."""

    def call(*words: str, status: int = 0) -> dict:
        capsys.readouterr()
        assert cli.main([*words, "--json"]) == status
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return json.loads(shown.out.splitlines()[-1])

    return call


@pytest.fixture
def filled(recipe: Recipe, run: Callable[..., dict], tmp_path: Path) -> Path:
    """The store of the base model, filled."""
    run("build", *recipe())
    run("cache", "build", *recipe())
    return tmp_path / "stores" / "base"


def built(arguments: list[str]) -> list[Tables]:
    config = resolve(arguments).config
    return [load_built(config, split) for split in ("train", "dev")]


def wanted(arguments: list[str], whole: bool = False) -> dict[bytes, tuple[list[int], tuple]]:
    """The chunks of the tables and the prompt, with the ranges to be kept."""
    config = resolve(arguments).config
    prompt = PromptTemplate(load_tokenizer(config.model.path), config.prompt).prompt_ids
    chunks = {chunk_key(prompt): (prompt, ((0, len(prompt)),))}
    for tables in built(arguments):
        for chunk in tables.at(range(tables.count())):
            ids = chunk.token_ids
            ranges = ((0, len(ids)),) if whole else union_ranges(chunk.nuggets)
            chunks[chunk_key(ids)] = (ids, ranges)
    return chunks


def records_of(folder: Path) -> dict[bytes, tuple[tuple, torch.Tensor]]:
    """All that a store holds: ranges and records by key."""
    found = {}
    with Store.open(folder) as store, SliceReader(store, 1, check=True) as reader:
        for key, stored in store.locate(store.keys()).items():
            rows = sum(end - start for start, end in stored.ranges)
            records_TR = torch.empty((rows, store.layout.token_bytes), dtype=torch.uint8)
            assert not reader.start([(key, *span) for span in stored.ranges], records_TR).wait()
            found[key] = (stored.ranges, records_TR)
    return found


def expected(folder: Path, chunks: dict, layout: RecordLayout) -> dict:
    model = load_model(str(folder), "float32").eval()
    found = {}
    for key, (ids, ranges) in chunks.items():
        kv_TL2HD = encode_chunk(model, ids)
        rows = torch.cat([kv_TL2HD[start:end] for start, end in ranges])
        found[key] = (ranges, layout.encode(rows))
    return found


def assert_same(found: dict, other: dict) -> None:
    assert found.keys() == other.keys()
    for key, (ranges, records_TR) in found.items():
        assert ranges == other[key][0]
        assert torch.equal(records_TR, other[key][1])


def flip(folder: Path, at: int = -5) -> str:
    """Changes a byte of the first shard; its name."""
    shard = min((folder / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
    return shard.name


@pytest.mark.parametrize("keep", ["nuggets", "chunks"])
@pytest.mark.parametrize("checkpoint", ["base", "fine_tuned"])
def test_every_chunk_is_stored_as_its_model_gives_it(recipe, run, tmp_path, keep, checkpoint):
    run("build", *recipe())
    arguments = recipe(f"store.keep={keep}")
    result = run("cache", "build", *arguments, "--checkpoint", checkpoint)
    folder = tmp_path / "stores" / checkpoint
    chunks = wanted(arguments, whole=keep == "chunks")
    assert result["folder"] == str(folder)
    assert result["chunks"] == result["encoded"] == len(chunks) == 36 + 1
    tokens = sum(end - start for _, ranges in chunks.values() for start, end in ranges)
    assert result["tokens"] == tokens
    with Store.open(folder) as store:
        layout = store.layout
    weights = tmp_path / ("model" if checkpoint == "base" else "run/checkpoint")
    assert_same(records_of(folder), expected(weights, chunks, layout))
    again = run("cache", "build", *arguments, "--checkpoint", checkpoint)
    assert (again["encoded"], again["chunks"]) == (0, len(chunks))


def test_a_stopped_build_goes_on(recipe, run, tmp_path, monkeypatch):
    run("build", *recipe())
    encoded = []

    def stopped(model, ids):
        if len(encoded) == 7:
            raise KeyboardInterrupt
        encoded.append(ids)
        return encode_chunk(model, ids)

    with monkeypatch.context() as patch:
        patch.setattr(kv_build, "encode_chunk", stopped)
        run("cache", "build", *recipe(), status=130)
    chunks = wanted(recipe())
    assert run("cache", "build", *recipe())["encoded"] == len(chunks) - 7
    assert records_of(tmp_path / "stores" / "base").keys() == chunks.keys()


def test_a_chunk_that_kept_other_tokens_is_completed(recipe, run, filled):
    result = run("cache", "build", *recipe("store.keep=chunks"))
    chunks = wanted(recipe(), whole=True)
    partial = sum(ranges != chunks[key][1] for key, (_, ranges) in wanted(recipe()).items())
    assert result["encoded"] == partial > 0
    assert {key: ranges for key, (ranges, _) in records_of(filled).items()} == {
        key: ranges for key, (_, ranges) in chunks.items()
    }


def test_other_chunks_go_when_asked_to_and_gc_gives_their_bytes_back(recipe, run, filled, tmp_path):
    write_rows(tmp_path / "dev.jsonl", [data_row(20)])
    run("build", *recipe())
    assert run("cache", "build", *recipe())["removed"] == 0
    assert run("cache", "build", *recipe(), "--remove-others")["removed"] == 8
    assert records_of(filled).keys() == wanted(recipe()).keys()
    dead = run("cache", "stat", str(filled))["dead_bytes"]
    assert dead > 0
    assert run("cache", "gc", str(filled))["freed_bytes"] >= dead
    assert run("cache", "stat", str(filled))["dead_bytes"] == 0
    assert records_of(filled).keys() == wanted(recipe()).keys()


def test_what_cannot_be_stored_is_told_before_the_model_is_loaded(recipe, run, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "coinrag build" in run("cache", "build", *recipe(), status=2)["error"]
    run("build", *recipe())
    told = run("cache", "build", *recipe("store.folder=null"), status=2)
    assert told["error"].startswith("store.folder is null")
    assert (told["command"], told["status"]) == ("cache build", 2)


def test_a_store_of_another_model_is_not_filled(recipe, run, filled, tmp_path):
    (tmp_path / "stores" / "base").rename(tmp_path / "stores" / "fine_tuned")
    told = run("cache", "build", *recipe(), "--checkpoint", "fine_tuned", status=2)
    assert "weights: " in told["error"]


def test_damage_is_named_and_the_next_build_repairs_it(recipe, run, filled, capsys):
    before = records_of(filled)
    assert run("cache", "verify", str(filled))["damaged"] == []
    shard = flip(filled)
    told = run("cache", "verify", str(filled), status=2)
    [damaged] = told["damaged"]
    assert damaged["shard"] == shard
    assert bytes.fromhex(damaged["chunk"]) in before
    assert told["lost"] == [damaged]
    for word in (shard, damaged["chunk"], "records are damaged", "cache build"):
        assert word in told["error"]
    # It stays so until somebody repairs it.
    assert run("cache", "verify", str(filled), status=2)["lost"] == [
        {"chunk": damaged["chunk"], "why": "found damaged before"}
    ]
    assert run("cache", "build", *recipe())["encoded"] == 1
    assert run("cache", "verify", str(filled))["lost"] == []
    assert_same(records_of(filled), before)


def test_the_model_computes_again_what_is_damaged(recipe, run, filled, tmp_path):
    before = records_of(filled)
    flip(filled)
    told = run(
        "cache", "verify", str(filled), "--model", str(tmp_path / "run/checkpoint"), status=2
    )
    assert "weights: the store has" in told["error"]
    result = run("cache", "verify", str(filled), "--model", str(tmp_path / "model"))
    assert (result["recomputed"], result["lost"]) == (1, [])
    assert_same(records_of(filled), before)
    for shard in (filled / "shards").iterdir():
        shard.unlink()
    result = run("cache", "verify", str(filled), "--model", str(tmp_path / "model"))
    assert result["recomputed"] == len(result["damaged"]) == len(before)
    assert all("is missing" in one["why"] for one in result["damaged"])
    assert_same(records_of(filled), before)


@pytest.mark.parametrize("dtype", [None, "int8", "float8", "bfloat16"])
def test_an_export_holds_what_the_dtype_makes_of_it(recipe, run, filled, tmp_path, dtype):
    with Store.open(filled) as store:
        layout = store.layout
    out = tmp_path / "out"
    chosen = ["--dtype", dtype] if dtype else []
    result = run("cache", "export", str(filled), str(out), *chosen)
    layout = RecordLayout(layout.layers, layout.kv_heads, layout.head_dim, dtype or layout.dtype)
    assert (result["chunks"], result["layout"]) == (len(wanted(recipe())), layout.as_json())
    assert_same(records_of(out), expected(tmp_path / "model", wanted(recipe()), layout))
    # It is the store of a recipe with that dtype.
    (tmp_path / "moved").mkdir()
    out.rename(tmp_path / "moved" / "base")
    overrides = [f"store.folder={tmp_path / 'moved'}", f"store.dtype={dtype or 'null'}"]
    assert run("cache", "build", *recipe(*overrides))["encoded"] == 0


def test_an_export_is_whole_or_not_there(recipe, run, filled, tmp_path):
    assert "exists" in run("cache", "export", str(filled), str(tmp_path), status=2)["error"]
    flip(filled)
    told = run("cache", "export", str(filled), str(tmp_path / "out"), status=2)
    assert "is damaged; run coinrag cache verify" in told["error"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_stat_says_what_a_store_is(recipe, run, filled, capsys):
    result = run("cache", "stat", str(filled))
    tokens = sum(end - start for _, ranges in wanted(recipe()).values() for start, end in ranges)
    assert result["tokens"] == tokens
    assert result["live_bytes"] == tokens * result["token_bytes"]
    assert set(result["fingerprint"]) >= {"weights", "rope", "tokenizer", "chunking", "dtype"}
    assert cli.main(["cache", "stat", str(filled)]) == 0
    shown = capsys.readouterr().out
    for text in (f"{tokens:,}", "128 tokens", "float32 model, float32 records", "dead"):
        assert text in shown


@pytest.mark.parametrize("command", ["verify", "stat", "gc", "export"])
def test_a_folder_without_a_store_is_told(run, tmp_path, command):
    more = [str(tmp_path / "out")] if command == "export" else []
    told = run("cache", command, str(tmp_path / "nothing"), *more, status=2)
    assert f"no store at {tmp_path / 'nothing'}" in told["error"]


def test_a_systems_own_run_has_a_store_of_its_own(recipe, run, tmp_path):
    run("build", *recipe())
    (tmp_path / "run").rename(tmp_path / "turbo")
    arguments = recipe(f"eval.runs.turborag={tmp_path / 'turbo'}", "store.keep=chunks")
    words = ["cache", "build", *arguments, "--checkpoint", "fine_tuned"]
    assert "no fine-tuned checkpoint" in run(*words, status=2)["error"]
    folder = Path(run(*words, "--system", "turborag")["folder"])
    assert folder.name.startswith("fine_tuned-")
    with Store.open(folder) as store:
        layout = store.layout
    chunks = wanted(arguments, whole=True)
    assert_same(records_of(folder), expected(tmp_path / "turbo" / "checkpoint", chunks, layout))


@pytest.mark.parametrize("system", ["standard_rag", "ape", "online_nuggets"])
def test_a_system_without_chunks_of_its_own_fills_no_store(recipe, run, tmp_path, system):
    told = run("cache", "build", *recipe(), "--system", system, status=2)
    assert f"--system {system}: it answers from no chunks" in told["error"]
    assert not (tmp_path / "stores").exists()


def test_results_read_well(recipe, filled, capsys):
    for words, text in (
        (["build", *recipe()], "37 chunks of"),
        (["verify", str(filled)], "37 chunks, "),
        (["gc", str(filled)], "freed"),
    ):
        capsys.readouterr()
        assert cli.main(["cache", *words]) == 0
        assert text in capsys.readouterr().out


def _truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [Path.unlink, _truncate])
def test_a_build_encodes_what_its_shards_lack(recipe, run, filled, damage):
    before = records_of(filled)
    for shard in (filled / "shards").iterdir():
        damage(shard)
    assert run("cache", "build", *recipe())["encoded"] == len(before)
    assert_same(records_of(filled), before)


def _change_index(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
        assert index.execute(statement).rowcount


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM shards", "is damaged; run coinrag cache verify"),
        (
            "UPDATE chunks SET offset = offset + 1 WHERE id = 3",
            "is damaged; run coinrag cache verify",
        ),
        ("UPDATE details SET token_ids = x'00' WHERE chunk = 3", "is damaged; run coinrag cache"),
        ("UPDATE chunks SET shard = NULL WHERE id IN (3, 4)", "2 chunks of .* cache build"),
    ],
)
def test_an_export_leaves_nothing_out(run, filled, tmp_path, statement, message):
    _change_index(filled, statement)
    told = run("cache", "export", str(filled), str(tmp_path / "out"), status=2)
    assert re.search(message, told["error"])
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_an_export_touches_nothing_beside_it(run, filled, tmp_path):
    theirs = tmp_path / "out.partial" / "file"
    theirs.parent.mkdir()
    theirs.write_text("theirs")
    for inside in (filled / "copy", filled / "shards" / "copy"):
        told = run("cache", "export", str(filled), str(inside), status=2)
        assert "lies in the store itself" in told["error"]
    run("cache", "export", str(filled), str(tmp_path / "new" / "out"))
    run("cache", "export", str(filled), str(tmp_path / "out"))
    assert theirs.read_text() == "theirs"
    assert records_of(tmp_path / "new" / "out").keys() == records_of(filled).keys()
    told = run("cache", "export", str(filled), str(theirs / "out"), status=2)
    assert "no copy can be made" in told["error"]


def test_only_a_build_repairs_damaged_tokens(recipe, run, filled, tmp_path):
    before = records_of(filled)
    _change_index(filled, "UPDATE details SET token_ids = x'00000000' WHERE chunk = 3")
    for _ in range(2):
        told = run("cache", "verify", str(filled), "--model", str(tmp_path / "model"), status=2)
        [lost] = told["lost"]
        assert lost["why"] == "its tokens in the index are damaged"
        assert "verify --model cannot do so for 1 of them" in told["error"]
    assert run("cache", "build", *recipe())["encoded"] == 1
    assert run("cache", "verify", str(filled))["lost"] == []
    assert_same(records_of(filled), before)


def test_a_store_of_another_layout_is_refused(recipe, run, filled):
    _change_index(
        filled,
        """UPDATE meta SET value = json_replace(value, '$.kv_heads', 7) WHERE name='layout'""",
    )
    assert "kv heads: the store has 7" in run("cache", "build", *recipe(), status=2)["error"]


@pytest.mark.parametrize("command", ["build", "gc", "verify"])
def test_commands_wait_for_another_writer(recipe, run, filled, tmp_path, command):
    write_rows(tmp_path / "dev.jsonl", [data_row(50)])
    run("build", *recipe())
    with ThreadPoolExecutor(1) as pool:
        with writer_lock(filled, 0.0):
            arguments = recipe() if command == "build" else [str(filled)]
            done = pool.submit(run, "cache", command, *arguments)
            with pytest.raises(TimeoutError):
                done.result(1.0)
        done.result()


def test_rounded_records_are_not_converted_once_more(run, filled, tmp_path):
    small = tmp_path / "small" / "base"
    run("cache", "export", str(filled), str(small), "--dtype", "int8")
    words = ["cache", "export", str(small), str(tmp_path / "wide"), "--dtype", "float32"]
    assert "int8 of a float32 model" in run(*words, status=2)["error"]
    assert not (tmp_path / "wide").exists()
    run("cache", "export", str(small), str(tmp_path / "copy"))
    assert_same(records_of(tmp_path / "copy"), records_of(small))
