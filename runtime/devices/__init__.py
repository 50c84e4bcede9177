"""Devices: where storages live and how copies run, behind one small protocol."""
