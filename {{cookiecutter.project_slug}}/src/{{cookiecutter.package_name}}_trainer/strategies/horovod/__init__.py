"""The Horovod engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/`` and ``gradients/``, and from the floors below.
"""

from ..registration import Entry, Registration
from .cluster import SOURCE

REGISTRATION = Registration(
    {"horovod": Entry("horovod:Horovod")},
    cluster_sources=[SOURCE],
)
