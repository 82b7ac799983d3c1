"""Parity with the public reference, checkable by anybody: runs a golden directory and compares every number."""
