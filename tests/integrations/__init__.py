"""Tests of the integrations that have files of their own."""
