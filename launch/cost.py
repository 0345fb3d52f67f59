"""`coinrag cost`: what each system costs a month at equal F1, and from which volume it pays off."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.commands import Result

SCENARIOS = Path(__file__).parent / "scenarios"
_HELP = "shipped scenarios or YAML files, later ones win; then section.key=value"


def cost(
    arguments: Sequence[str], measured: Sequence[str] = (), picture: str | None = None
) -> Result:
    """The costs of a scenario at the cells of `compare.json` files, or at its own; drawn if wanted.

    Raises:
        UserError: the scenario is wrong, or see `eval.cost.cost` and `draw_cost`.
    """
    from recipes.resolve import Kind, resolve_kind
    from recipes.scenario import Scenario

    scenario, _ = resolve_kind(arguments, Kind("scenario", Scenario, SCENARIOS))
    from eval.cost import cost as compare_costs
    from eval.cost_figures import draw_cost

    result = compare_costs(scenario, measured)
    if picture is not None:
        result["pictures"] = [str(path) for path in draw_cost(result, Path(picture))]
    return result


def add_command(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Describe the command to a parser; `add` takes a name and a help text."""
    command = add("cost", "Count what each system costs at equal F1, and when it pays off.")
    command.add_argument("arguments", nargs="+", metavar="SCENARIO|KEY=VALUE", help=_HELP)
    command.add_argument(
        "--measured",
        metavar="FILE",
        action="append",
        default=[],
        help="a compare.json in place of the scenario's cells; may be repeated",
    )
    command.add_argument("--picture", metavar="FILE", help="draw it: FILE.png and FILE.svg")


def render(result: Result) -> str:
    """The result for a reader."""
    from eval.cost_report import render_cost

    pictures = [f"drawn: {path}" for path in result.get("pictures", [])]
    if result.get("pictures") == []:
        pictures = ["nothing drawn: no system reaches the F1 within the latency budget"]
    return "\n".join([render_cost(result), *pictures])
