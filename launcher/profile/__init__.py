"""What bounds a decode step on this machine, and what the step consists of."""
