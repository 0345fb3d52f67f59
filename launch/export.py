"""`coinrag export`: a finished run as a folder that serves, verified before it has its name."""

import argparse
import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args

from launch.cache import Checkpoint
from launch.commands import Result
from recipes.errors import UserError
from recipes.exit import is_users
from recipes.files import write_text

if TYPE_CHECKING:
    from train.export import Run

logger = logging.getLogger(__name__)

# As in `train.export`, which is imported when it is needed.
Form = Literal["merged", "adapter"]
Dtype = Literal["float32", "bfloat16"]
VERIFICATION_FILE = "verification.json"
_PACKAGES = ("coinrag", "transformers", "peft", "accelerate", "safetensors", "tokenizers")
_SPARE_BYTES = 64 << 20


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does: what is half written goes.

    A signal that the process was started to ignore, as by nohup, stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A second one would stop the clearing up.
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@_ended_by_signals()
def export(
    run: str,
    out: str,
    *,
    form: Form = "merged",
    dtype: Dtype | None = None,
    store: str | None = None,
    questions: int = 20,
) -> Result:
    """Export a run; what was written, and how it was verified.

    The folder has its name only when all of it is there and verified. A store is built after that.

    Args:
        run: the run's folder.
        out: the export's; new, or empty.
        form: the whole model, or the adapter alone.
        dtype: of the weights; None: as the run has left them.
        store: a folder for the keys and values of the built chunks, by the weights that encode
            them; None: none is built.
        questions: answered by both in the verification; 0: none, only logits are compared.

    Raises:
        UserError: the run cannot be exported so, or there is something at `out`, or no room.
        VerificationError: the export gives other logits or answers than the run.
    """
    target = Path(out)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"OUT: there is something at {target}: name a new folder, or delete it")
    from safetensors import SafetensorError

    from launch.verification import verify
    from launch.whole_texts import prompts_of
    from train.export import bytes_needed, check_form, open_run, write_export
    from train.run_folder import refuse_unwritable, replace_folder

    refuse_unwritable(target, "OUT")
    if store is not None:
        refuse_unwritable(Path(store), "--build-store")
    source = open_run(Path(run))
    check_form(source, form, dtype)
    building = None if store is None else _store_to_build(source, target, form, dtype, store)
    prompts, split = prompts_of(source, questions)
    _refuse_without_room(target, bytes_needed(source, form, dtype))
    result: Result = {}

    def write(folder: Path) -> None:
        try:
            write_export(source, folder, form, dtype, exported_with=_versions())
        except (OSError, SafetensorError) as error:
            raise UserError(f"OUT: {target} could not be written: {error}") from error
        logger.info("written; verifying in a fresh process with plain transformers")
        result["verification"] = verify(source, folder, form, prompts, split)
        text = json.dumps(result["verification"], indent=2, ensure_ascii=False)
        write_text(folder / VERIFICATION_FILE, f"{text}\n")

    replace_folder(target, write)
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    result |= {"folder": str(target), "form": form, "files": files}
    if building is not None:
        from launch.cache import build

        logger.info("the export %s is complete; building its store", target)
        try:
            result["store"] = build(**building)
        except Exception as error:
            kind = UserError if is_users(error) else RuntimeError
            raise kind(f"{error}; the export {target} is complete, its store is not") from error
    return result


def add_command(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Describe the command to a parser; `add` takes a name and a help text."""
    command = add("export", "Write a finished run as a folder that serves, and verify it.")
    command.add_argument("run", metavar="RUN", help="the run's folder (train.run_folder)")
    command.add_argument("out", metavar="OUT", help="a new folder for the export")
    command.add_argument(
        "--form",
        choices=get_args(Form),
        default="merged",
        help="the whole model, or the adapter alone (default merged)",
    )
    command.add_argument(
        "--dtype", choices=get_args(Dtype), help="of the weights (default: the run's)"
    )
    command.add_argument(
        "--build-store",
        metavar="FOLDER",
        help="then encode the recipe's built chunks into a store there, for the export",
    )
    command.add_argument(
        "--questions",
        metavar="N",
        type=_natural,
        default=20,
        help="answered by both in the verification; 0: compare logits alone (default 20)",
    )


def render(result: Result) -> str:
    """The result for a reader."""
    verified, size = result["verification"], sum(result["files"].values())
    logits, answers = verified["logits"], verified["answers"]
    by = " and ".join(f"{name} {number}" for name, number in verified["read_by"].items())
    lines = [
        f"{result['folder']}: {result['form']}, {len(result['files'])} files, {size:,} bytes",
        f"read in a fresh process by {by}, network blocked",
        f"logits after {verified['prompts']} prompts differ by at most "
        f"{logits['largest_difference']:.2g} ({logits['tolerance']:.2g} allowed)",
    ]
    if answers is None:
        lines.append("answers were not compared (--questions 0)")
    else:
        ties = f", {answers['near_ties']} part at a near tie" if answers["near_ties"] else ""
        lines.append(
            f"answers to {answers['of']} {verified['questions_from']} questions: "
            f"{answers['equal']} equal{ties}"
        )
        lines += [f"  {one['question']} -> {one['answer']!r}" for one in verified["examples"]]
    if "store" in result:
        store = result["store"]
        lines.append(f"{store['folder']}: {store['chunks']:,} chunks, {store['encoded']:,} encoded")
    return "\n".join(lines)


def _store_to_build(
    run: "Run", out: Path, form: Form, dtype: Dtype | None, store: str
) -> dict[str, Any]:
    """The arguments of `coinrag cache build` for the weights that encode the export's chunks.

    Raises:
        UserError: the system caches nothing, or the chunks are not built.
    """
    system = run.config.train.system
    if system == "standard_rag":
        raise UserError("--build-store: a run of train.system=standard_rag serves without a store")
    from data_builders.kv_build import tables_to_store
    from recipes.resolve import resolve

    arguments = [
        str(run.folder / "recipe.yaml"),
        f"model.dtype={dtype or run.dtype}",
        f"store.folder={store}",
        f"train.run_folder={out if form == 'merged' else run.folder}",
        f"eval.runs.{system}=null",
    ]
    tables_to_store(resolve(arguments).config)
    frozen = run.config.context.gradient == "frozen"
    checkpoint: Checkpoint = "base" if frozen else "fine_tuned"
    return {"arguments": arguments, "checkpoint": checkpoint, "system": system}


def _versions() -> dict[str, str | None]:
    """What exports: packages, commit and date."""
    from eval.environment import environment

    here, installed = environment(), {one.name: one.version for one in distributions()}
    return {
        **{name: here[name] for name in ("date", "commit", "python", "torch")},
        **{name: installed.get(name) for name in _PACKAGES},
    }


def _refuse_without_room(target: Path, needed: int) -> None:
    from train.run_folder import nearest_folder

    nearest = nearest_folder(target)
    free = shutil.disk_usage(nearest).free
    if free < needed + _SPARE_BYTES:
        raise UserError(
            f"OUT: the export takes {needed / 2**30:.2f} GiB, and {nearest} has "
            f"{free / 2**30:.2f} GiB free"
        )


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, got {value}")
    return value
