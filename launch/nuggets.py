"""`coinrag nuggets`: extractor, scorer and selection of a recipe, without asking a generator."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.commands import RECIPE_HELP, Result


def nuggets(arguments: Sequence[str], picture: str | None = None) -> Result:
    """The figures of a recipe's nuggets and of its arms', see `nugget_figures`; drawn if wanted.

    Raises:
        UserError: see `eval.nugget_figures.nugget_figures` and `eval.drawing.save_as`.
    """
    from recipes.resolve import resolve

    config = resolve(arguments).config
    from eval.nugget_figures import nugget_figures
    from eval.nugget_picture import draw_nuggets

    result = nugget_figures(config)
    if picture is not None:
        result["pictures"] = [str(path) for path in draw_nuggets(result, Path(picture))]
    return result


def add_command(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Describe the command to a parser; `add` takes a name and a help text."""
    command = add("nuggets", "Measure extractor, scorer and selection on the built dev tables.")
    command.add_argument("arguments", nargs="+", metavar="RECIPE|KEY=VALUE", help=RECIPE_HELP)
    command.add_argument(
        "--picture", metavar="FILE", help="draw coverage against tokens: FILE.png and FILE.svg"
    )


def render(result: Result) -> str:
    """The result for a reader."""
    from eval.nugget_report import render_nuggets

    pictures = [f"drawn: {path}" for path in result.get("pictures", [])]
    return "\n".join([render_nuggets(result), *pictures])
