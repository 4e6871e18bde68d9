"""Fixtures for the passes that need real ranks."""

from tests.ranks.harness import world2 as world2
