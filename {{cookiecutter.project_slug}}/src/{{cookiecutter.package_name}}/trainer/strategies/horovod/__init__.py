"""The Horovod engine. Nothing outside this folder names it."""

from ..registration import Entry, Registration

REGISTRATION = Registration({"horovod": Entry("strategy:Horovod")})
