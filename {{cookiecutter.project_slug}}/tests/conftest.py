"""Settings of all tests."""

import hypothesis

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")
