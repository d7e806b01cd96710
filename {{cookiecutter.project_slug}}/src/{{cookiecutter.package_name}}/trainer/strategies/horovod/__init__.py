"""The Horovod engine. Nothing outside this folder names it."""

from ..registration import Entry, Registration
from .cluster import SOURCE

REGISTRATION = Registration({"horovod": Entry("strategy:Horovod")}, cluster_sources=[SOURCE])
