"""An export's reader in the test's own process, which saves a start."""

import runpy
import socket
import subprocess
import sys

import pytest

from launch import verification
from launch.verification import READER


def read_here(patch: pytest.MonkeyPatch) -> None:
    """Has exports verified without a fresh process; the network is blocked until `patch` ends."""
    for name in ("connect", "connect_ex"):
        # Noted, so that it is put back when the reader has blocked it.
        patch.setattr(socket.socket, name, getattr(socket.socket, name))
    start = subprocess.run

    def read(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if str(READER) not in command:
            return start(command, **options)
        patch.setattr(sys, "argv", command[command.index(str(READER)) :])
        runpy.run_path(str(READER), run_name="__main__")
        return subprocess.CompletedProcess(command, 0)

    patch.setattr(verification.subprocess, "run", read)
