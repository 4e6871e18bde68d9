"""Nothing that Dynamo compiled in one test is there in the next; and the lasting world of two ranks."""

import logging
from collections.abc import Callable, Generator

import pytest
import torch

from aotdist.dynamo import Region, regions
from tests.ranks.harness import world2 as world2


@pytest.fixture(autouse=True, scope="module")
def quiet_traces() -> Generator[None]:
    """pytest listens to every logger, for which PyTorch would print every graph: two thirds of the time."""
    log = logging.getLogger("torch.__trace")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Generator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def made() -> Callable[[], list[Region]]:
    """What Dynamo handed over in this test; of earlier ones, the garbage collector may not know yet."""
    before = set(regions())
    return lambda: [region for region in regions() if region not in before]
