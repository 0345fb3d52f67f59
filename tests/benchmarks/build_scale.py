"""Builds of sample-world corpora: memory and time by size, and what killing them does.

    python tests/benchmarks/build_scale.py --passages 10000 100000
    python tests/benchmarks/build_scale.py --passages 20000 --kills 30
    python tests/benchmarks/build_scale.py --passages 2000 --kills 30 --paid

The first line builds corpora of those sizes with the quickstart's encoder, each from nothing, and
shows the peak of resident memory beside that of a build of 400 passages, which holds the same
libraries and models. With `--kills` a build is killed at random moments so many times, then left to
finish, and its tables are compared, byte by byte, with those of a build that nobody disturbed.
With `--paid` nuggets come from a scripted server of a language model, whose calls are counted.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "data_builders" / "llm"), str(ROOT / "tests")]

from scripted_server import ScriptedServer, serve  # noqa: E402
from small import save_tiny_encoder  # noqa: E402

from data_builders.nuggets.llm.journal import Journal  # noqa: E402
from data_builders.world import write_corpus  # noqa: E402
from recipes.schema import LlmConfig  # noqa: E402

BASE_PASSAGES = 400
SECONDS_BETWEEN_LOOKS = 0.05


def main() -> None:
    options = _options()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "faiss-cpu", "pyarrow"))
    print(f"{date.today()}, {os.cpu_count()} cores {platform.machine()}, {versions}", flush=True)
    with TemporaryDirectory(dir=options.folder) as name:
        if options.small_encoder:
            save_tiny_encoder(Path(name) / "encoder")
            options.settings.append(f"retrieval.encoder={Path(name) / 'encoder'}")
        if options.kills == 0:
            _grow(options, Path(name))
        elif options.paid:
            with serve(delay_seconds=0.05) as server:
                _kill(options, Path(name), server)
        else:
            _kill(options, Path(name), None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--passages", type=int, nargs="+", required=True)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--paid", action="store_true", help="nuggets from a scripted server")
    parser.add_argument(
        "--small-encoder", action="store_true", help="a random one of 128 dimensions, for speed"
    )
    parser.add_argument("--start-seconds", type=float, default=12.0, help="until a build works")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where there is room for the builds")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for the recipe")
    return parser.parse_args()


def _grow(options: argparse.Namespace, folder: Path) -> None:
    """Builds each size from nothing; memory and time."""
    print("  passages    chunks questions  seconds  peak MiB   over")
    base = 0
    for passages in [BASE_PASSAGES, *options.passages]:
        recipe = _world(folder / f"world-{passages}", passages, options)
        started = time.monotonic()
        running = _start(recipe, folder / f"built-{passages}", folder / "log.txt")
        peak = 0
        while running.poll() is None:
            peak = max(peak, _resident(running.pid))
            time.sleep(SECONDS_BETWEEN_LOOKS)
        seconds = time.monotonic() - started
        _check(running, folder / "log.txt")
        base = base or peak
        report = _reports(folder / f"built-{passages}")["train"]
        print(
            f"{passages:>10,} {report['corpus']['chunks']:>9,} {report['questions']:>9,} "
            f"{seconds:>8.1f} {peak / 2**20:>9.0f} {(peak - base) / 2**20:>6.0f}",
            flush=True,
        )


def _kill(options: argparse.Namespace, folder: Path, server: ScriptedServer | None) -> None:
    """Builds the same twice, the second time killed again and again; compares the tables."""
    rng = random.Random(options.seed)
    for passages in options.passages:
        recipe = _world(folder / f"world-{passages}", passages, options)
        if server is not None:
            recipe += ["nuggets.extractor=llm", "nuggets.llm.model=scripted"]
            recipe += [f"nuggets.llm.base_url={server.url}"]
        whole, killed, log = folder / "whole", folder / "killed", folder / "log.txt"
        started = time.monotonic()
        running = _start(recipe, whole, log)
        running.wait()
        _check(running, log)
        seconds = time.monotonic() - started
        print(f"{passages:,} passages, undisturbed: {seconds:.0f} s", flush=True)
        first_calls = Counter(server.calls) if server else Counter()
        stages: Counter[str] = Counter()
        repeats_of_known = 0
        for _ in range(options.kills):
            known = _journaled(killed, server)
            before = Counter(server.calls) if server else Counter()
            running = _start(recipe, killed, log)
            # What a start takes goes on top, so that each run gets on.
            time.sleep(options.start_seconds + rng.uniform(0, 2 * seconds / options.kills))
            finished = running.poll() is not None
            running.send_signal(signal.SIGKILL)
            running.wait()
            stages["(had finished)" if finished else _stage(log)] += 1
            if server is not None:
                repeats_of_known += sum(server.calls[text] > before[text] for text in known)
        running = _start(recipe, killed, log)
        running.wait()
        _check(running, log)
        print("killed at:", ", ".join(f"{stage} {count}" for stage, count in stages.most_common()))
        print("tables byte-identical:", _digests(whole) == _digests(killed))
        if server is not None:
            calls = Counter(server.calls) - first_calls
            repeated = calls.total() - len(calls)
            print(
                f"{calls.total():,} calls for {len(calls):,} chunks; answered and asked again: "
                f"{repeats_of_known}; lost in flight and asked again: {repeated}"
            )


def _world(folder: Path, passages: int, options: argparse.Namespace) -> list[str]:
    """Writes a corpus and a question of each split for 100 passages; the recipe to build it."""
    questions = max(1, passages // 100)
    write_corpus(
        folder,
        passages=passages,
        train_questions=questions,
        dev_questions=questions,
        seed=options.seed,
    )
    return [
        "quickstart",
        "data.format=jsonl",
        f"data.train=[{folder / 'train.jsonl'}]",
        f"data.dev=[{folder / 'dev.jsonl'}]",
        f"data.corpus=[{folder / 'corpus.jsonl'}]",
        "retrieval.candidates=corpus",
        *options.settings,
    ]


def _start(recipe: list[str], root: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launch.cli", "build", *recipe, f"data.built_root={root}"]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def _check(running: subprocess.Popen[bytes], log: Path) -> None:
    if running.returncode:
        raise SystemExit(f"the build failed:\n{log.read_text()}")


def _resident(pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def _stage(log: Path) -> str:
    """What the build was doing when it wrote its last line."""
    lines = [line.split(":")[0] for line in log.read_text(errors="replace").splitlines() if line]
    return lines[-1] if lines else "start"


def _journaled(root: Path, server: ScriptedServer | None) -> set[str]:
    """The texts whose answers a killed build has on disk."""
    if server is None or not (root / "llm-journal.sqlite").exists():
        return set()
    config = LlmConfig(model="scripted", base_url=server.url)
    with closing(Journal(root / "llm-journal.sqlite", config)) as journal:
        return {text for text in server.calls if journal.outcome(text) is not None}


def _folders(root: Path) -> dict[str, Path]:
    return {split: next(root.glob(f"{split}-*[!l]")) for split in ("train", "dev")}


def _reports(root: Path) -> dict[str, Any]:
    return {
        split: json.loads((folder / "report.json").read_text())
        for split, folder in _folders(root).items()
    }


def _digests(root: Path) -> dict[str, str]:
    return {
        f"{split}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for split, folder in _folders(root).items()
        for path in folder.iterdir()
    }


if __name__ == "__main__":
    main()
