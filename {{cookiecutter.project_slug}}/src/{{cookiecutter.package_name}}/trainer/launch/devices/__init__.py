"""Devices of this machine: which exist, which are idle, and why some cannot be used."""
