"""For tests that need a lab: where there can be none they are skipped with the reason, and in CI they fail with it."""

import os

import pytest

from tests.wan.lab import Lab


def need_lab() -> None:
    """Returns where a lab can run. Skips the calling test elsewhere; fails it where `CI=true` is set."""
    if reason := Lab.unavailable():
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
