"""What Linux says of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def status(key: Literal["VmRSS", "VmHWM"]) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024
