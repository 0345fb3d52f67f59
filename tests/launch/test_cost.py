"""`coinrag cost`: its scenarios, its options, its mistakes, and its output."""

import json
from pathlib import Path

import pytest

from launch import cli
from launch.cost import SCENARIOS, cost
from recipes.errors import UserError
from recipes.fields import options
from recipes.resolve import Kind, resolve_kind
from recipes.scenario import Scenario

KIND = Kind("scenario", Scenario, SCENARIOS)

# A change here is a change of the public configuration: say so in its commit.
SURFACE = """
cells corpus.changed_share_a_month corpus.chunk_tokens corpus.passages corpus.tokens_a_passage
extraction.covered_share extraction.instruction_tokens extraction.keep
extraction.output_tokens_a_token extraction.usd_a_million_input_tokens
extraction.usd_a_million_output_tokens extraction.usd_a_passage fine_tuning.extraction_usd
fine_tuning.machine_hours fine_tuning.training_tokens fine_tuning.usd_an_hour goal.f1
goal.p99_ttft_ms machine.disk_gb_a_second machine.disk_usd_a_gb_month machine.effective_tflops
machine.memory_gb_a_second machine.usd_an_hour model.attention_heads model.bytes_a_kv_number
model.bytes_a_parameter model.head_dim model.kv_heads model.layers model.name model.parameters
months months_between_models name queries.a_month queries.overhead_ms queries.prompt_tokens
queries.question_tokens
"""


def test_scenario_surface_is_pinned() -> None:
    assert sorted(path for path, _ in options(Scenario)) == SURFACE.split()


@pytest.mark.parametrize("name", KIND.names())
def test_shipped_scenario_opens_with_instructions_that_hold(name: str) -> None:
    lines = (SCENARIOS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    opening = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    assert "# Launch:" in opening
    assert opening[-2].startswith("# One override")
    override = opening[-1].split()
    assert override[1:3] == ["coinrag", "cost"]
    # The line a reader copies resolves and changes something.
    assert resolve_kind(override[3:], KIND)[0] != resolve_kind([name], KIND)[0]
    assert resolve_kind([name], KIND)[0].name == name


def test_every_value_is_overridden_on_the_command_line_and_by_later_files(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("queries: {a_month: 5e6}\nmachine: {usd_an_hour: 2}\n", encoding="utf-8")
    config, origins = resolve_kind(["paper", str(mine), "machine.usd_an_hour=3"], KIND)
    assert (config.queries.a_month, config.machine.usd_an_hour) == (5e6, 3)
    assert origins["queries.a_month"] == f"{mine}:1"
    assert origins["machine.usd_an_hour"] == "command line"
    assert origins["model.layers"].startswith("scenarios/paper.yaml:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["papr"], "papr: no such file or shipped scenario; did you mean paper?"),
        (["queries.a_month=3"], "no scenario given; shipped: paper, smollm2_135m"),
        (["paper", "query.a_month=3"], "unknown key; did you mean queries.a_month?"),
        (["paper", "queries.a_month=0"], "expected greater than 0, got 0"),
        (["paper", "goal.f1=x"], "expected number or null, got 'x'"),
        (
            ["paper", "extraction.usd_a_million_input_tokens=null"],
            "extraction (scenarios/paper.yaml:21): expected usd_a_passage, or both",
        ),
        (["paper", "fine_tuning.machine_hours=null"], "expected machine_hours or training_tokens"),
        (["paper", "cells=[{system: rag, k_c: 1, active_tokens: 1}]"], "expected one of"),
        (["paper", "cells=[{system: epic, k_c: 1, active_tokens: 1}]"], "or computed_tokens"),
        (
            ["paper", "cells=[{system: coinrag, k_c: 1, active_tokens: 1, extract_ms: 1}]"],
            "cells.0.extract_ms (command line): expected extract_ms within ttft_mean_ms",
        ),
        (["smollm2_135m"], "nothing to compare: give comparisons (--measured FILE) or set cells"),
    ],
)
def test_mistakes_are_told_in_one_message(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        cost(arguments)
    assert message in str(caught.value)


def test_output_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "paper.png"
    assert cli.main(["cost", "paper", "--picture", str(picture), "queries.a_month=2e6"]) == 0
    shown = capsys.readouterr().out
    assert "2,000,000 queries a month" in shown
    assert shown.endswith(f"drawn: {picture}\ndrawn: {picture.with_suffix('.svg')}\n")

    assert cli.main(["cost", "paper", "--json", "goal.p99_ttft_ms=100"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["command"], report["status"]) == ("cost", 0)
    assert report["setting"]["goal"]["p99_ttft_ms"] == 100
    assert [one["system"] for one in report["systems"] if one["not_eligible"]] == ["standard_rag"]


def test_a_missing_comparison_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cost", "paper", "--measured", "none.json", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["status"] == 2
    assert shown.err == "error: none.json: cannot be read: No such file or directory\n"
