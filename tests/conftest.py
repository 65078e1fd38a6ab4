"""Fixtures for every test: the ranks that `run_ranks` keeps live as long as the session."""

from collections.abc import Iterator

import pytest

from tensorplay.testing import close_ranks


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    close_ranks()
