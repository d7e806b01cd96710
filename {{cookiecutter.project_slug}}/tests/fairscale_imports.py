"""What a fork server imports for the tests of FairScale."""

import fairscale.nn.data_parallel
import fairscale.optim  # noqa: F401
