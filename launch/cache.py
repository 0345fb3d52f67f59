"""`coinrag cache`: fill, check, describe, compact and copy stores of keys and values."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

from launch.commands import RECIPE_HELP, Result, system_name
from recipes.errors import UserError

Checkpoint = Literal["base", "fine_tuned"]
StoreDtype = Literal["float32", "bfloat16", "float16", "int8", "float8"]
CHECKPOINTS: tuple[Checkpoint, ...] = get_args(Checkpoint)
# They compute their context online, or encode chunks behind the prompt.
_WITHOUT_CHUNKS = ("standard_rag", "ape", "online_nuggets")
_DAMAGED_SHOWN = 20


class UnrepairedError(UserError):
    """Chunks of a store are damaged; `result` names all of them."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


def build(
    arguments: Sequence[str],
    *,
    checkpoint: Checkpoint = "base",
    system: str = "coinrag",
    remove_others: bool = False,
) -> Result:
    """Encode what a checkpoint's store lacks of a recipe's built chunks; what it holds then.

    `eval.runs` may have a `system` answer with weights, and from a store, of its own.

    Raises:
        UserError: the recipe is wrong or has no store, or nothing is built; or the system answers
            from nothing that can be encoded ahead.
    """
    if system in _WITHOUT_CHUNKS:
        raise UserError(
            f"--system {system}: it answers from no chunks that are encoded alone, so there is "
            "nothing to be put into a store before it answers"
        )
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from cache_ops.hf import load_tokenizer
    from data_builders.kv_build import fill_store, tables_to_store
    from eval.checkpoints import load_weights, weights_of

    weights = weights_of(config, checkpoint, system)
    if weights.context != weights.folder:
        raise UserError(
            "context.gradient=frozen answers from the base model's keys and values: "
            "build its store, with --checkpoint base"
        )
    tables = tables_to_store(config)
    tokenizer = load_tokenizer(config.model.path)
    model = load_weights(config, weights.folder, tokenizer)
    name = weights.context_store
    return asdict(fill_store(config, tables, model, tokenizer, name, remove_others=remove_others))


def verify(folder: str, *, model: str | None = None) -> Result:
    """Compare every checksum of a store; what is damaged, and how much `model` computed again.

    Raises:
        UnrepairedError: something is damaged and was not computed again.
        UserError: the folder holds no store, or `model` is not the one that filled it.
    """
    from cache_ops.store import Store
    from cache_ops.store.lock import WAIT_SECONDS
    from cache_ops.store.upkeep import TOKENS_DAMAGED
    from data_builders.kv_build import recompute_lost

    with Store.open(folder, wait_seconds=WAIT_SECONDS) as store:
        found = store.verify()
        damaged: dict[bytes, Result] = {
            one.key: {
                "chunk": one.key.hex(),
                "tokens": one.tokens,
                "shard": one.shard,
                "why": one.why,
            }
            for one in found.damaged
        }
        # Lost chunks that were found damaged before have no shard any more.
        recomputed = recompute_lost(store, model) if model and store.lost() else 0
        lost = list(store.lost())
        known = store.token_ids([*lost, *damaged])
        left: dict[bytes, Result] = {
            key: {
                "chunk": key.hex(),
                "why": "found damaged before" if key in known else TOKENS_DAMAGED,
                **damaged.get(key, {}),
            }
            for key in lost
        }
        if not store.writable:
            left |= damaged
        result: Result = {
            "folder": folder,
            "chunks": found.chunks,
            "bytes": found.bytes,
            "damaged": list(damaged.values()),
            "recomputed": recomputed,
            "lost": list(left.values()),
        }
    if left:
        raise UnrepairedError(_unrepaired(folder, result, len(left.keys() - known.keys())), result)
    return result


def stat(folder: str) -> Result:
    """What a store holds, and what that came from.

    Raises:
        UserError: the folder holds no store.
    """
    from cache_ops.store import Store
    from cache_ops.store.lock import WAIT_SECONDS

    with Store.open(folder, wait_seconds=WAIT_SECONDS) as store:
        return {
            "folder": folder,
            **asdict(store.stat()),
            "layout": store.layout.as_json(),
            "token_bytes": store.layout.token_bytes,
            "fingerprint": store.fingerprint.as_json(),
            "fingerprint_digest": store.fingerprint.digest,
        }


def gc(folder: str) -> Result:
    """Give back the bytes that a store does not need; how many.

    Raises:
        UserError: the folder holds no store, or takes no writes.
        UnrepairedError: chunks were found damaged on the way.
    """
    from cache_ops.store import Store
    from cache_ops.store.lock import WAIT_SECONDS

    with Store.open(folder, wait_seconds=WAIT_SECONDS) as store:
        done = store.gc()
    result: Result = {
        "folder": folder,
        "orphans": done.orphans,
        "compacted_shards": done.compacted,
        "freed_bytes": done.freed_bytes,
        "lost": [
            {"chunk": one.key.hex(), "tokens": one.tokens, "shard": one.shard, "why": one.why}
            for one in done.damaged
        ],
    }
    if done.damaged:
        raise UnrepairedError(_unrepaired(folder, result), result)
    return result


def export(folder: str, out: str, *, dtype: StoreDtype | None = None) -> Result:
    """Copy a store's chunks into a new one, possibly in another dtype; how much that is.

    Raises:
        UserError: the folder holds no store, a chunk is damaged, or there is something at `out`.
    """
    from cache_ops.store import Store
    from cache_ops.store.lock import WAIT_SECONDS
    from data_builders.kv_build import export_store

    with Store.open(folder, wait_seconds=WAIT_SECONDS) as store:
        export_store(store, Path(out), dtype)
    return stat(out)


def add_commands(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Describe the commands to a parser; `add` takes a name and a help text."""
    command = add("build", "Encode all chunks of the built tables into the recipe's store.")
    command.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE", help=RECIPE_HELP)
    command.add_argument(
        "--checkpoint", choices=CHECKPOINTS, default="base", help="whose weights (default base)"
    )
    command.add_argument(
        "--system",
        metavar="NAME",
        type=system_name,
        default="coinrag",
        help="whose run, by eval.runs, the fine-tuned weights are of (default coinrag)",
    )
    command.add_argument(
        "--remove-others", action="store_true", help="remove chunks that the tables do not have"
    )
    command = add("verify", "Compare every checksum of a store, and name what is damaged.")
    _add_store(command)
    command.add_argument("--model", metavar="FOLDER", help="compute what is damaged again with it")
    _add_store(add("stat", "Say what a store holds and what it came from."))
    _add_store(add("gc", "Give back the bytes of removed chunks and of interrupted writes."))
    command = add("export", "Copy the chunks of a store into a new one.")
    _add_store(command)
    command.add_argument("out", metavar="OUT", help="folder of the copy")
    command.add_argument(
        "--dtype", choices=get_args(StoreDtype), help="of the copy (default: the store's)"
    )


def call(arguments: argparse.Namespace) -> Result:
    """Run the command that was parsed."""
    match arguments.cache_command:
        case "build":
            return build(
                arguments.arguments,
                checkpoint=arguments.checkpoint,
                system=arguments.system,
                remove_others=arguments.remove_others,
            )
        case "verify":
            return verify(arguments.store, model=arguments.model)
        case "stat":
            return stat(arguments.store)
        case "gc":
            return gc(arguments.store)
        case _:
            return export(arguments.store, arguments.out, dtype=arguments.dtype)


def render(command: str, result: Result) -> str:
    """A command's result for a reader."""
    folder = result["folder"]
    match command:
        case "build":
            there = result["chunks"] - result["encoded"]
            return (
                f"{folder}: {result['chunks']:,} chunks of {result['tokens']:,} tokens; {there:,} "
                f"were there, {result['encoded']:,} encoded, {result['removed']:,} others removed"
            )
        case "verify":
            again = f", {result['recomputed']:,} computed again" if result["recomputed"] else ""
            whole = "all whole" if not result["damaged"] else f"{len(result['damaged']):,} damaged"
            return (
                f"{folder}: {result['chunks']:,} chunks, {_size(result['bytes'])}, {whole}{again}"
            )
        case "gc":
            return (
                f"{folder}: {_size(result['freed_bytes'])} freed; {result['compacted_shards']:,} "
                f"shards rewritten, {result['orphans']:,} leftover files deleted"
            )
        case _:
            return _described(result)


def _described(result: Result) -> str:
    layout = result["layout"]
    lines = {
        "chunks": f"{result['chunks']:,}, and {result['lost_chunks']:,} lost",
        "tokens": f"{result['tokens']:,}, {result['token_bytes']:,} bytes each",
        "shards": f"{result['shards']:,}, {_size(result['shard_bytes'])}",
        "live": _size(result["live_bytes"]),
        "dead": _size(result["dead_bytes"]),
        "index": _size(result["index_bytes"]),
        "records": f"{layout['dtype']}: {layout['layers']} layers x 2 x {layout['kv_heads']} heads "
        f"x {layout['head_dim']}",
        **{name.replace("_", " "): str(part) for name, part in result["fingerprint"].items()},
    }
    width = max(map(len, lines))
    return "\n".join([result["folder"], *(f"  {k:<{width}}  {v}" for k, v in lines.items())])


def _unrepaired(folder: str, result: Result, without_tokens: int = 0) -> str:
    """The lost chunks and the way out, which is another one for those `without_tokens`."""
    lost = result["lost"]
    shown = [
        f"{one['chunk']}" + (f" in {one['shard']}" if "shard" in one else "") + f": {one['why']}"
        for one in lost[:_DAMAGED_SHOWN]
    ]
    more = [f"and {len(lost) - _DAMAGED_SHOWN:,} more (--json names all)"]
    lines = shown + (more if len(lost) > _DAMAGED_SHOWN else [])
    if not without_tokens:
        way_out = (
            "coinrag cache verify --model FOLDER computes them again, and so does coinrag cache "
            "build with the recipe"
        )
    else:
        way_out = (
            f"coinrag cache build with the recipe computes them again; verify --model cannot do so "
            f"for {without_tokens:,} of them, whose tokens are damaged"
        )
    return f"{folder}: {len(lost):,} damaged chunks:\n  " + "\n  ".join(lines) + f"\n{way_out}"


def _size(count: int) -> str:
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def _add_store(command: argparse.ArgumentParser) -> None:
    command.add_argument("store", metavar="STORE", help="the store's folder")
