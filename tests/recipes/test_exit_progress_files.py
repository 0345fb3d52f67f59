"""Exit statuses, progress lines and whole-or-nothing writing."""

import json
import sys
from pathlib import Path

import pytest

from recipes import progress
from recipes.errors import UserError
from recipes.exit import STATUS_FILE_VARIABLE, run, run_main
from recipes.files import write_text


class _MarkedError(ValueError):
    is_user_error = True


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (UserError("fix it"), 2, "error: fix it\n"),
        (_MarkedError("fix it"), 2, "error: fix it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_the_user_causes_is_shown_without_a_traceback(
    error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(lambda: _raise(error)) == status
    assert capsys.readouterr().err == shown


def test_our_error_has_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(lambda: _raise(ValueError("ours"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_success_is_zero_whatever_is_returned() -> None:
    assert run_main(lambda: {"a": 1}) == 0


def test_failure_is_left_in_the_status_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STATUS_FILE_VARIABLE, str(tmp_path / "status"))
    run(lambda: None)
    assert not (tmp_path / "status").exists()
    # Whichever rank comes first, and it alone, tells the user.
    for rank, told in (("1", "error: fix it\n"), ("0", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert run(lambda: _raise(UserError("fix it"))).status == 2
        assert capsys.readouterr().err == told
    left = json.loads((tmp_path / "status").read_text(encoding="utf-8"))
    assert left == {"status": 2, "message": "fix it"}
    run(lambda: _raise(RuntimeError("a rank has lost its connection to the first that failed")))
    assert json.loads((tmp_path / "status").read_text(encoding="utf-8")) == left


def test_progress_outside_a_terminal_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    assert list(progress.track(list("abcdef"), "read", unit="rows")) == list("abcdef")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("read: 3/6 rows, ")
    assert lines[0].endswith(" left")
    assert lines[-1].startswith("read: 6/6 rows, ")
    assert not any("\r" in line for line in lines)


def test_progress_on_a_terminal_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress.track(range(3), "read", unit="rows")) == [0, 1, 2]
    error = capsys.readouterr().err
    assert "3/3" in error
    assert "\r" in error


def test_write_text_replaces_whole_and_leaves_nothing_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]
