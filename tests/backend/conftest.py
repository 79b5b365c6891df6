"""Every test starts with nothing compiled and no session."""

from collections.abc import Iterator

import pytest
import torch

from sitsopt import session


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    session.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    session.clear()
