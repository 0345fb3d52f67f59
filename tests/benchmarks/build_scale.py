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
from recipes.building import LlmConfig  # noqa: E402

BASE_PASSAGES = 400
SECONDS_BETWEEN_LOOKS = 0.05
STAGES = ("passages", "questions", "chunks", "nuggets", "retrieve", "build ", "Nuggets by")


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
    parser.add_argument("--start-seconds", type=float, default=8.0, help="until a build works")
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
    """Builds once undisturbed, then killed so many times, and compares the tables."""
    rng = random.Random(options.seed)
    for passages in options.passages:
        recipe = _world(folder / f"world-{passages}", passages, options)
        if server is not None:
            recipe += ["nuggets.extractor=llm", "nuggets.llm.model=scripted"]
            recipe += [f"nuggets.llm.base_url={server.url}"]
        whole, log = folder / "whole", folder / "log.txt"
        seconds = _finish(recipe, whole, log)
        print(f"{passages:,} passages, undisturbed: {seconds:.0f} s", flush=True)
        stages: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        asked_again = 0
        rounds = [folder / "killed-1"]
        equal = True
        before = Counter(server.calls) if server else Counter()
        while stages.total() < options.kills:
            known, so_far = _journaled(rounds[-1], server), Counter(server.calls if server else ())
            running = _start(recipe, rounds[-1], log)
            # What a start takes goes on top of a share of the work, so that each run gets on.
            share = options.start_seconds + 2 * (seconds - options.start_seconds) / options.kills
            time.sleep(rng.uniform(0.5, share))
            finished = running.poll() is not None
            running.send_signal(signal.SIGKILL)
            running.wait()
            if server is not None:
                time.sleep(0.3)
                asked_again += sum(server.calls[text] > so_far[text] for text in known)
            if finished:
                equal &= _digests(whole) == _digests(rounds[-1])
                calls += Counter(server.calls if server else ()) - before
                rounds.append(folder / f"killed-{len(rounds) + 1}")
                before = Counter(server.calls) if server else Counter()
            else:
                stages[_stage(log)] += 1
        _finish(recipe, rounds[-1], log)
        equal &= _digests(whole) == _digests(rounds[-1])
        calls += Counter(server.calls if server else ()) - before
        print("killed at:", ", ".join(f"{stage} {count}" for stage, count in stages.most_common()))
        print(f"builds: {len(rounds)}; tables byte-identical to the undisturbed: {equal}")
        if server is not None:
            needed = len(rounds) * len(calls)
            print(
                f"{calls.total():,} calls for {needed:,} chunks; answered and asked again: "
                f"{asked_again}; in flight at a kill and asked again: {calls.total() - needed}"
            )


def _finish(recipe: list[str], root: Path, log: Path) -> float:
    """Lets a build end; its seconds."""
    started = time.monotonic()
    running = _start(recipe, root, log)
    running.wait()
    _check(running, log)
    return time.monotonic() - started


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
    """The last stage that the build's log speaks of."""
    lines = log.read_text(errors="replace").splitlines()
    stages = [line.split(":")[0] for line in lines if line.startswith(STAGES)]
    return stages[-1].removeprefix("build ") if stages else "start"


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
