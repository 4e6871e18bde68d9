"""All scenarios, by name, in the order of the page."""

from __future__ import annotations

from benchmarks.ranks.scenarios import ends, programs, steps
from benchmarks.ranks.scenarios.scenario import Scenario

SCENARIOS = {each.name: each for each in (*programs.SCENARIOS, *steps.SCENARIOS, *ends.SCENARIOS)}

__all__ = ["SCENARIOS", "Scenario"]
