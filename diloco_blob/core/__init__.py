"""Identifiers, errors, clock, limits and settings: the vocabulary that every layer shares."""
