"""The scheduler: plain Python with integers, no torch."""
