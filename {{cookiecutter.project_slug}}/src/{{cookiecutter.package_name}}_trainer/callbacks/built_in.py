"""The callbacks of the trainer by name."""

from .base import Callback
from .best_checkpoint import BestCheckpoint
from .early_stopping import EarlyStopping
from .ema import EMA
from .profile import Profile
from .stochastic_weight_averaging import StochasticWeightAveraging
from .system_monitor import SystemMonitor
from .upload_checkpoints import UploadCheckpoints

BUILT_IN: dict[str, type[Callback]] = {
    each.__name__: each
    for each in (
        *(BestCheckpoint, EarlyStopping, EMA, Profile, StochasticWeightAveraging),
        SystemMonitor,
        UploadCheckpoints,
    )
}
