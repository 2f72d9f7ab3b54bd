"""The public test kit: a virtual clock, toy models and runs, and a fleet of islands in one thread. No torch."""
