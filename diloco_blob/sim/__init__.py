"""Simulation in virtual time: the protocol's own code under faults, from one seed. No torch."""
