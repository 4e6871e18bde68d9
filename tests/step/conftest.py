"""The lasting worlds of two and four ranks; see `tests/ranks/harness.py`."""

from tests.ranks.harness import world2 as world2
from tests.ranks.harness import world4 as world4
