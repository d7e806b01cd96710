"""The devices of this machine: which there are, which are idle, and how values move to them."""
