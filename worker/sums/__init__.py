"""How the ranks of a model sum, found out at start-up: what works is timed, the fastest is used."""
