"""The lasting world of two ranks; see `tests/ranks/harness.py`."""

from tests.ranks.harness import world2 as world2
