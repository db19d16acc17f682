"""Configuration of the whole suite: Hypothesis profiles, chosen with the environment variable HYPOTHESIS_PROFILE.

ci (default)  200 examples per property; new ones on every run, failures are kept in .hypothesis and replayed first
quick         20 examples, for the edit-and-run loop
night         20000 examples, for long runs
"""

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=200, deadline=None, print_blob=True, derandomize=False)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
settings.register_profile("night", settings.get_profile("ci"), max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
