"""Configuration of the whole suite: Hypothesis profiles, chosen with the environment variable HYPOTHESIS_PROFILE.

ci (default)  200 examples per property, the same on every run: what is red here is red for whoever looks into it
search        200 examples, new ones on every run; failures are kept in .hypothesis and replayed first
quick         20 examples, for the edit-and-run loop
night         20000 new examples, for long runs
"""

import os

import pytest
from hypothesis import settings

settings.register_profile("search", max_examples=200, deadline=None, print_blob=True, derandomize=False)
settings.register_profile("ci", settings.get_profile("search"), derandomize=True)
settings.register_profile("quick", settings.get_profile("search"), max_examples=20)
settings.register_profile("night", settings.get_profile("search"), max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say a failure when it happens: a run that is cut off later has named it."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", flush=True)  # noqa: T201
